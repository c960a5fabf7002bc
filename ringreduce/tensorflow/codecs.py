"""Rounds gradients before they travel, and restores their dtype afterwards."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringreduce.vocabulary.errors import ConfigError

__all__ = ["CODECS", "Codec"]

# 16-bit floats are added in float32 (`ringreduce.pure.kernels`), and the sum is divided before it
# is rounded: only a gradient or a mean can overflow the dtype, not a sum.
CODECS: dict[str, Any] = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}


class Codec:
    """Rounds 32- and 64-bit gradients as `CODECS` says; ConfigError if it has no such name."""

    def __init__(self, name: str) -> None:
        if name not in CODECS:
            raise ConfigError(f"compression is {name!r}; accepted: {', '.join(CODECS)}")
        self._dtype = CODECS[name]

    def encode(self, gradient: Any) -> Any:
        """`gradient`, a tensor, `tf.IndexedSlices` or None, as it travels."""
        if gradient is None or self._dtype is None or gradient.dtype not in _ROUNDED:
            return gradient
        return _cast(gradient, self._dtype)

    def decode(self, mean: Any, gradient: Any) -> Any:
        """`mean` in the dtype of the `gradient` that was encoded."""
        return None if gradient is None else _cast(mean, gradient.dtype)


_ROUNDED = (tf.float32, tf.float64)


def _cast(gradient: Any, dtype: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)
