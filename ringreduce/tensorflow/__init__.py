"""Gradients and variables of TensorFlow on their way through the ring."""

from ringreduce.tensorflow.bridge import GradientBridge
from ringreduce.tensorflow.replicas import verify_replicas
from ringreduce.tensorflow.variables import (
    broadcast_values,
    broadcast_variables,
    is_initialized,
    path_of,
)

__all__ = [
    "GradientBridge",
    "broadcast_values",
    "broadcast_variables",
    "is_initialized",
    "path_of",
    "verify_replicas",
]
