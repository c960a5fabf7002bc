"""The names of compressions, the rounding of what travels as rows, and what rounding takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.pure.buckets import BucketPlan
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


class Residuals:
    """Parts of gradients that rounding has taken, which the next step adds; for one thread.

    They belong to variables, since buckets differ between routes: an eager step may come before
    those of a graph. While one plan is in use they are laid out as its buckets. With `arrays` 2, of
    int8, they are of what this rank or its host contributes, and of the results that it sends.
    """

    def __init__(self, arrays: int) -> None:
        self._arrays = arrays
        # Flat, by the variable's identity. The variable is kept, so that no other gets that.
        self._stored: dict[int, tuple[Any, np.ndarray]] = {}
        self._laid_out: list[tuple[Any, np.ndarray]] = []
        self._used_by: object = None
        self._buckets: list[np.ndarray] = []

    def of(self, plan: BucketPlan, variables: Sequence[Any]) -> Callable[[int], np.ndarray]:
        """Return a function from buckets to their residuals, float32 of shape (arrays, count)."""
        me = object()

        def residuals(bucket: int) -> np.ndarray:
            if self._used_by is not me:
                self._put_away()
                self._lay_out(plan, variables)
                self._used_by = me
            return self._buckets[bucket]

        return residuals

    def _put_away(self) -> None:
        for variable, parts in self._laid_out:
            self._stored[id(variable)] = variable, parts.copy()

    def _lay_out(self, plan: BucketPlan, variables: Sequence[Any]) -> None:
        self._laid_out, self._buckets = [], []
        for bucket in plan.buckets:
            memory = np.zeros((self._arrays, bucket.count), np.float32)
            self._buckets.append(memory)
            for slot in bucket.slots:
                variable, parts = variables[slot.gradient], memory[:, slot.start :][:, : slot.count]
                _, parts[:] = self._stored.pop(id(variable), (variable, 0))
                self._laid_out.append((variable, parts))
