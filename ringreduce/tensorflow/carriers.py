"""Carries tensors of dtypes that cannot travel in another dtype that holds all their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ringreduce.vocabulary.errors import ArrayError
from ringreduce.vocabulary.types import ReduceOp, reduce_op

__all__ = ["carried"]

# A sum of uint16 that is too large wraps in the cast back, as other integers do.
_CARRIERS = {"uint16": tf.int32, "bool": tf.uint8}


def carried(tensor: Any, collective: Callable[[Any], Any], op: ReduceOp | str = "max") -> Any:
    """The result of `collective` on `tensor`; uint16 and bool travel in another dtype.

    Raises:
        ArrayError: the dtype is bool, and `op` is a sum or a mean.
    """
    value = tf.convert_to_tensor(tensor)
    carrier = _CARRIERS.get(value.dtype.name)
    if carrier is None:
        return collective(value)
    if value.dtype == tf.bool and reduce_op(op) in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ArrayError(
            f"cannot reduce a tensor of dtype bool with op={reduce_op(op).name.lower()!r}",
            remedy='Use op="max" for any, op="min" for all, or count with tf.cast.',
        )
    return tf.cast(collective(tf.cast(value, carrier)), value.dtype)
