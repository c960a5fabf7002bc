"""Gradients and variables of TensorFlow on their way through the ring."""

from ringreduce.tensorflow.bridge import GradientBridge

__all__ = ["GradientBridge"]
