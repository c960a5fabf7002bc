"""Between TensorFlow and the ring: gradients and variables in and out."""

from ringreduce.tensorflow.bridge import GradientBridge, broadcast_variables, is_initialized
from ringreduce.tensorflow.replicas import verify_replicas

__all__ = ["GradientBridge", "broadcast_variables", "is_initialized", "verify_replicas"]
