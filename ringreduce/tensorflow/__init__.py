"""Gradients and variables of TensorFlow on their way through the ring."""

from ringreduce.tensorflow.bridge import GradientBridge
from ringreduce.tensorflow.variables import (
    broadcast_values,
    broadcast_variables,
    is_initialized,
    path_of,
    verify_replicas,
)

__all__ = ["GradientBridge", "broadcast_values", "broadcast_variables", "is_initialized"]
__all__ += ["path_of", "verify_replicas"]
