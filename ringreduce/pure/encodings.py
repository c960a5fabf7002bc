"""Float32 values as fewer bytes, for the way between hosts. Pure.

bfloat16 and float16 round each value. int8 divides each block of 256 by a scale of its own and
rounds; what rounding takes from a value is added to the next one at its place (error feedback:
Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error
feedback fixes SignSGD", ICML 2019).

Decoding is the same arithmetic everywhere, in float32 and without contraction, so all ranks get
equal bits from equal bytes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from ringreduce.pure import kernels
from ringreduce.vocabulary.types import dtype_named


class Coding(NamedTuple):
    """How a collective's values travel between hosts."""

    encoding: Encoding
    # Float32 of shape (2, n) for n values: of what this rank, or its host, contributes and of the
    # results that this rank sends. Changed unless a result is not finite. None: rounding loses it.
    residuals: np.ndarray | None = None

    def of(self, part: slice) -> Coding:
        """That of a part of the values."""
        return self if self.residuals is None else Coding(self.encoding, self.residuals[:, part])


class Half:
    """16-bit floats, ``float16`` or ``bfloat16``. All arrays are contiguous, of one dimension."""

    has_residuals = False  # whether what rounding takes can be kept

    def __init__(self, name: str) -> None:
        self.name, self._dtype = name, dtype_named(name)

    def nbytes(self, count: int) -> int:
        """Bytes of `count` encoded values; a multiple of 4, or of the size of a value."""
        return 2 * count

    def encode(self, values: np.ndarray, out: np.ndarray, residuals: np.ndarray | None) -> None:
        """Write `values`, float32, into `out`, uint8 of shape (nbytes,).

        `residuals`, like `values`, are added before, and get what rounding takes. NaN and infinity
        are encoded as some value that is not finite.
        """
        kernels.narrow(values, out.view(self._dtype))

    def decode(self, encoded: np.ndarray, out: np.ndarray) -> None:
        """Fill `out`, float32, with the values in `encoded`."""
        kernels.widen(encoded.view(self._dtype), out)

    def are_finite(self, encoded: np.ndarray, count: int) -> bool:
        """Whether `count` values in `encoded` are; asked where there are residuals."""
        return kernels.first_nonfinite(encoded.view(self._dtype)) < 0


class Int8:
    """The scales of all blocks, then the values divided by them; methods as of `Half`."""

    name, has_residuals = "int8", True

    def nbytes(self, count: int) -> int:
        return 4 * _blocks(count) + count + -count % 4

    def encode(self, values: np.ndarray, out: np.ndarray, residuals: np.ndarray | None) -> None:
        scales, numbers = self._parts(out, values.size)
        kept = np.zeros(values.size, np.float32) if residuals is None else residuals
        kernels.quantize(values, kept, scales, numbers)

    def decode(self, encoded: np.ndarray, out: np.ndarray) -> None:
        kernels.dequantize(*self._parts(encoded, out.size), out)

    def are_finite(self, encoded: np.ndarray, count: int) -> bool:
        return bool(np.isfinite(self._parts(encoded, count)[0]).all())

    @staticmethod
    def _parts(encoded: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        end = 4 * _blocks(count)
        return encoded[:end].view(np.float32), encoded[end : end + count].view(np.int8)


def _blocks(count: int) -> int:
    return -(-count // kernels.QUANTIZED)


Encoding = Half | Int8


@cache
def encoding_of(name: str) -> Encoding:
    """The encoding ``"fp16"``, ``"bf16"`` or ``"int8"``."""
    return Int8() if name == "int8" else Half({"fp16": "float16", "bf16": "bfloat16"}[name])
