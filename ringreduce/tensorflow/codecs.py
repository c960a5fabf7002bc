"""Rounds gradients before they travel, and restores their dtype afterwards."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringreduce.vocabulary.errors import ConfigError

_DTYPES: dict[str, Any] = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}


class Codec(str):
    """The name of a compression, which rounds gradients; ConfigError for none of `Compression`."""

    def __new__(cls, name: str) -> Codec:
        """The compression of that name."""
        if name not in _DTYPES:
            raise ConfigError(f"compression is {name!r}; accepted: {', '.join(_DTYPES)}")
        return super().__new__(cls, name)

    def encoded(self, gradient: Any) -> Any:
        """`gradient`, a tensor, `tf.IndexedSlices` or None, as it travels: floats over 16 bits."""
        is_wide = gradient is not None and gradient.dtype in (tf.float32, tf.float64)
        dtype = _DTYPES[self]
        return tf.cast(gradient, dtype) if is_wide and dtype is not None else gradient

    def decoded(self, mean: Any, gradient: Any) -> Any:
        """`mean` in the dtype of the `gradient` that was encoded."""
        return None if gradient is None else tf.cast(mean, gradient.dtype)

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """As Horovod's: `tensor`, rounded if it is of floats, and what `decompress` needs."""
        return self.encoded(tensor), tensor.dtype

    def decompress(self, tensor: Any, dtype: Any) -> Any:
        """`tensor` in the `dtype` that it had."""
        return tf.cast(tensor, dtype)


class Compression:
    """What `DistributedOptimizer(compression=...)` accepts; the names are Horovod's.

    Sums are made in float32 and divided before they are rounded, so that only a single gradient or
    a mean can be too large for the dtype.

    Attributes:
        none: gradients travel as they are.
        fp16: as float16: 11 significant bits, at most 65504, coarser below 6e-5. Meant for a scaled
            loss (mixed_float16), where overflow becomes infinity and all ranks skip the step.
        bf16: as bfloat16: 8 significant bits, and the range of float32.
    """

    none = Codec("none")
    fp16 = Codec("fp16")
    bf16 = Codec("bf16")
