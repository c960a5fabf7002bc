"""The names of compressions, and the rounding of what travels as rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringreduce.vocabulary.errors import ConfigError

_DTYPES: dict[str, Any] = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16, "int8": None}


class Codec(str):
    """The name of a compression; ConfigError for none of `Compression`."""

    def __new__(cls, name: str) -> Codec:
        """The compression of that name."""
        if name not in _DTYPES:
            accepted = f"{', '.join(_DTYPES)}, or a PowerSGD object"
            raise ConfigError(f"compression is {name!r}; accepted: {accepted}")
        return super().__new__(cls, name)

    def encoded(self, gradient: Any) -> Any:
        """`gradient`, a tensor or `tf.IndexedSlices`, of 16-bit floats if these are meant."""
        dtype = _DTYPES[self] if gradient.dtype in (tf.float32, tf.float64) else None
        return gradient if dtype is None else tf.cast(gradient, dtype)

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return `tensor`, rounded if of floats, and what `decompress` needs, as Horovod does."""
        if self == "int8":
            text = "int8 is for what an optimizer sends, which keeps what rounding takes"
            raise ConfigError(text, remedy="Use Compression.fp16 or Compression.bf16.")
        return self.encoded(tensor), tensor.dtype

    def decompress(self, tensor: Any, dtype: Any) -> Any:
        """`tensor` in the `dtype` that it had."""
        return tf.cast(tensor, dtype)


class Compression:
    """The codecs for `DistributedOptimizer(compression=...)`; Horovod has the first two.

    Gradients of float32 are encoded between hosts alone; within a host they are read where they
    are. Sums are made in float32 and divided before they are encoded again, so that only a single
    gradient or a mean can be too large for the dtype. Rows of tables are rounded on all ways, and
    with ``int8`` not at all.

    Attributes:
        none: gradients travel as they are.
        fp16: as float16: 11 significant bits, at most 65504, coarser below 6e-5. Meant for a scaled
            loss (mixed_float16), where overflow becomes infinity and all ranks skip the step.
        bf16: as bfloat16: 8 significant bits, and the range of float32.
        int8: 256 values share a scale, and each is one of 255 multiples of it. What rounding takes
            is added in the next step, by which training converges as without; it takes eight bytes
            of memory for each weight, and is not saved. Not for a scaled loss.
    """

    none = Codec("none")
    fp16 = Codec("fp16")
    bf16 = Codec("bf16")
    int8 = Codec("int8")
