"""Element-wise kernels, compiled once for each operator and dtype, called by address.

Each combines `count` elements at `target` with those at `source`, result in `target`, without the
GIL. The compiled ring loop calls them by C address: one loop serves all dtypes, and a kernel is
compiled (0.1-0.3 s, then cached on disk) when a program first uses it.

No fastmath: a NaN or an infinity in a gradient must stay one. 16-bit floats are widened to float32,
reduced there, and rounded once (`widen`, `narrow`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from ringreduce.vocabulary.compiled import callback, jit
from ringreduce.vocabulary.types import ReduceOp


def reduction(op: ReduceOp, dtype: np.dtype) -> int:
    """Address of ``void(target, source, count)`` that reduces `source` into `target`.

    The dtype is float32, float64 or an integer. MEAN reduces like SUM; `divide` the result then.
    """
    return int(_compiled(_REDUCTIONS[op], np.dtype(dtype).name).address)


def divide(dtype: np.dtype) -> int:
    """Address of ``void(target, divisor, count)`` that divides `target` by ``divisor[0]``.

    Floats are divided, not multiplied by a reciprocal, which is exact for sums of equal values.
    Integers round towards minus infinity.
    """
    name = np.dtype(dtype).name
    divide = _divide_float if name.startswith("float") else _divide_integer
    return int(_compiled(divide, name).address)


def widen(source: np.ndarray, target: np.ndarray) -> None:
    """Fill `target`, float32 of shape (n,), with `source`, float16 or bfloat16 of shape (n,)."""
    kernel = _widen_float16 if source.dtype.name == "float16" else _widen_bfloat16
    kernel(source.view(np.uint16), target)


def widened(source: np.ndarray) -> np.ndarray:
    """A float32 copy of `source`, float16 or bfloat16 of shape (n,)."""
    target = np.empty(source.size, np.float32)
    widen(source, target)
    return target


def narrow(source: np.ndarray, target: np.ndarray) -> None:
    """Fill `target`, float16 or bfloat16 of shape (n,), with `source`, float32, rounded to even."""
    kernel = _narrow_float16 if target.dtype.name == "float16" else _narrow_bfloat16
    kernel(source, target.view(np.uint16))


def first_nonfinite(flat: np.ndarray) -> int:
    """Index of the first NaN or infinity in `flat`, shape (n,), contiguous; -1 if there is none."""
    if flat.dtype.kind in "iu":
        return -1
    exponent = _EXPONENTS.get(flat.dtype.name)
    # In blocks that stay in the cache.
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        if exponent is None:
            are_finite = np.isfinite(block)
        else:
            are_finite = (block.view(np.uint16) & exponent) != exponent
        if not are_finite.all():
            return start + int(are_finite.argmin())
    return -1


# By 16-bit floats, of which numpy looks at one after the other: the exponent's bits, which are all
# set in NaN and infinity alone.
_EXPONENTS = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
_BLOCK = 1 << 15


def _sum(target, source, count):
    to, of = carray(target, count), carray(source, count)
    for i in range(count):
        to[i] += of[i]


def _product(target, source, count):
    to, of = carray(target, count), carray(source, count)
    for i in range(count):
        to[i] *= of[i]


def _min(target, source, count):
    to, of = carray(target, count), carray(source, count)
    for i in range(count):
        # `x != x` is true for NaN alone; a NaN already in `to` stays, since `<` is then false.
        if of[i] < to[i] or of[i] != of[i]:
            to[i] = of[i]


def _max(target, source, count):
    to, of = carray(target, count), carray(source, count)
    for i in range(count):
        if of[i] > to[i] or of[i] != of[i]:
            to[i] = of[i]


def _divide_float(target, divisor, count):
    to = carray(target, count)
    by = carray(divisor, 1)[0]
    for i in range(count):
        to[i] /= by


def _divide_integer(target, divisor, count):
    to = carray(target, count)
    by = carray(divisor, 1)[0]
    for i in range(count):
        to[i] //= by


_REDUCTIONS: dict[ReduceOp, Callable[..., None]] = {
    ReduceOp.SUM: _sum,
    ReduceOp.MEAN: _sum,
    ReduceOp.MIN: _min,
    ReduceOp.MAX: _max,
    ReduceOp.PRODUCT: _product,
}


# The cache also keeps compiled functions alive, whose addresses are handed out.
@cache
def _compiled(function: Callable[..., None], dtype_name: str) -> Any:
    element = types.CPointer(numba.from_dtype(np.dtype(dtype_name)))
    return callback(types.void(element, element, types.intp), function)


@intrinsic
def call_kernel(typing, kernel, target, source, count):
    """Call the kernel at address `kernel`: ``void(void *target, void *source, intp count)``."""

    def build(context, builder, signature, arguments):
        word = ir.IntType(64)
        pointer = ir.FunctionType(ir.VoidType(), [word, word, word]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], pointer), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), build


_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))


@jit
def reduce_rows(rows, start, target, elements, combine, finish, by):
    """Fill `target` with the reduction of `rows` over the first axis, row `start` first.

    Rows ``start - 1, ..., 0, size - 1, ..., start + 1`` follow. That is rank order when `start` is
    this rank and row j comes from the rank j positions before it.

    Args:
        rows: uint8 of shape (size, nbytes), contiguous.
        start: index of the row to begin with.
        target: uint8 of shape (nbytes,), contiguous; outside of `rows`, or row `start` itself.
        elements: number of elements in nbytes.
        combine, finish: from `reduction` and `divide`; `finish` is 0 for none.
        by: uint8, the bytes of the one element that `finish` divides by.
    """
    memory = rows.ctypes.data
    to = target.ctypes.data
    size = rows.shape[0]
    if to != memory + start * target.size:
        _memcpy(to, memory + start * target.size, np.uint64(target.size))
    for rank in range(1, size):
        row = start - rank if start >= rank else start - rank + size
        call_kernel(combine, to, memory + row * target.size, elements)
    if finish != 0:
        call_kernel(finish, to, by.ctypes.data, elements)


@jit
def add_rows(target, positions, rows):
    """Add ``rows[i]`` to ``target[positions[i]]`` for each i, in order.

    Args:
        target: shape (n, width), contiguous, float32 or float64.
        positions: int64 of shape (m,), from 0 to n - 1; may repeat. Not checked.
        rows: shape (m, width), contiguous, of the same dtype.
    """
    for i in range(positions.size):
        to, of = target[positions[i]], rows[i]
        for j in range(of.size):
            to[j] += of[j]


QUANTIZED = 256  # values that share a scale, which adds 1.6 % to their bytes


# Loops run from 0 over slices: else numba checks indices, and no vector instructions result.
@jit
def quantize(values, residuals, scales, numbers):
    """Divide blocks of values by scales, and round.

    Args:
        values: float32 of shape (n,), contiguous.
        residuals: like `values`, which are added to it; gets what rounding takes.
        scales: float32, one for each block of `QUANTIZED`: filled; NaN or infinity for a block that
            has one.
        numbers: int8 of shape (n,): filled.
    """
    for block in range(scales.size):
        start = block * QUANTIZED
        given, left = values[start : start + QUANTIZED], residuals[start : start + QUANTIZED]
        written, bits = numbers[start : start + QUANTIZED], left.view(np.uint32)
        largest = np.uint32(0)  # as integers, since NaN is the largest then
        for i in range(given.size):
            left[i] += given[i]
            largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
        scale = np.uint32(largest).view(np.float32) / np.float32(127)
        if largest >= np.uint32(0x7F800000):
            written[:] = 1
        elif largest < np.uint32(0x04000000):
            # Below 1.5e-36, 2 ** -119, the scale is subnormal and may have no finite reciprocal.
            # Such values stay residuals.
            scale = np.float32(0)
            written[:] = 0
        else:
            factor = np.float32(1) / scale
            for i in range(given.size):
                number = np.rint(left[i] * factor)
                written[i] = np.int32(number)
                left[i] -= number * scale
        scales[block] = scale


@jit
def dequantize(scales, numbers, out):
    """Fill `out`, float32, with `numbers` times the scale of their block."""
    for block in range(scales.size):
        start, scale = block * QUANTIZED, scales[block]
        read, found = numbers[start : start + QUANTIZED], out[start : start + QUANTIZED]
        for i in range(found.size):
            found[i] = np.float32(read[i]) * scale


@intrinsic
def _from_half(typing, bits):
    """float32 value of a float16 given as its 16 bits (LLVM's half; F16C where the CPU has it)."""

    def build(context, builder, signature, arguments):
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint16), build


@intrinsic
def _to_half(typing, value):
    """16 bits of the float16 nearest to a float32, ties to even."""

    def build(context, builder, signature, arguments):
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.uint16(types.float32), build


@jit
def _widen_float16(source, target):
    for i in range(source.size):
        target[i] = _from_half(source[i])


@jit
def _narrow_float16(source, target):
    for i in range(source.size):
        target[i] = _to_half(source[i])


@jit
def _widen_bfloat16(source, target):
    bits = target.view(np.uint32)
    for i in range(source.size):
        bits[i] = np.uint32(source[i]) << np.uint32(16)


@jit
def _narrow_bfloat16(source, target):
    bits = source.view(np.uint32)
    for i in range(source.size):
        word = bits[i]
        if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            # NaN: keep the sign, set the quiet bit; rounding could turn it into infinity.
            target[i] = np.uint16((word >> np.uint32(16)) | np.uint32(0x40))
        else:
            odd = (word >> np.uint32(16)) & np.uint32(1)
            target[i] = np.uint16((word + np.uint32(0x7FFF) + odd) >> np.uint32(16))
