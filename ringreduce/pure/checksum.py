"""CRC-32C of memory, at memory speed: detects changed bytes. Pure.

The Castagnoli polynomial, as iSCSI and ext4 use it (RFC 3720, appendix B.4), because processors
have an instruction for it. Every error burst of up to 32 bits is found, and any other change but
one in 2^32. Three methods have the same results; the best one this processor has is used:

- ``folding``: carry-less multiplication of whole vectors, four at a time, folds the message
  into a last few bytes with the same remainder (Gopal et al., "Fast CRC computation for
  generic polynomials using PCLMULQDQ", Intel 2009). Needs VPCLMULQDQ with AVX2 or AVX-512.
- ``instruction``: the CRC-32C instruction of x86 or ARM. Each takes three cycles, but one can begin
  in each cycle, so three parts of a block are computed at once, and tables move the first two sums
  to the end of the block.
- ``tables``: eight bytes at a time by eight tables, on any processor (slicing by 8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.core.typing import Signature
from numba.extending import intrinsic


def is_wanted(integrity: str, *, encrypted: bool, loopback: bool) -> bool:
    """Whether a ring's frames carry checksums; `integrity` is ``auto``, ``crc32`` or ``off``.

    With ``auto`` they do not if each message is authenticated already, or never leaves this host.
    """
    if integrity == "auto":
        return not encrypted and not loopback
    return integrity == "crc32"


# The polynomial with its bits reversed, as the bytes of a message come: lowest bit first.
_POLYNOMIAL = 0x82F63B78
_ALL_ONES = np.uint64(0xFFFFFFFF)
_8, _BYTE = np.uint64(8), np.uint64(0xFF)

# Bytes of each of the three parts that are computed at once.
_LONG_BYTES, _SHORT_BYTES = 2048, 256
# Below this, folding costs more than it saves.
_FOLDED_BYTES_MIN = 1024
_ACCUMULATORS = 4


def _power(exponent: int) -> int:
    """The remainder of x to the power of `exponent` by the polynomial, bits reversed."""
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result


def _times(one: int, other: int) -> int:
    """Product of two remainders modulo the polynomial, bits reversed."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


def _linear(images: list[int]) -> np.ndarray:
    """Table of 256 values: entry b is the sum (without carry) of ``images[i]`` for b's bits i."""
    table = np.zeros(256, np.uint64)
    index = np.arange(256)
    for bit, image in enumerate(images):
        table[index >> bit & 1 == 1] ^= np.uint64(image)
    return table


def _moving(nbytes: int) -> np.ndarray:
    """Shape (4, 256): for each byte of a sum, what it becomes `nbytes` further on."""
    factor = _power(8 * nbytes)
    return np.array(
        [_linear([_times(factor, 1 << 8 * byte + bit) for bit in range(8)]) for byte in range(4)]
    )


_LONG, _SHORT = _moving(_LONG_BYTES), _moving(_SHORT_BYTES)
# Entry [k, b]: what byte b becomes k + 1 bytes further on.
_SLICES = np.array([_moving(k + 1)[0] for k in range(8)])


def _load_word(typing: Any, address: Any) -> tuple[Signature, Callable[..., Any]]:
    """The 8 bytes at `address`, aligned or not, first byte lowest."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        return builder.load(builder.inttoptr(arguments[0], word.as_pointer()), align=1)

    return types.uint64(types.intp), build


def _load_byte(typing: Any, address: Any) -> tuple[Signature, Callable[..., Any]]:
    """The byte at `address`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = builder.load(builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))
        return builder.zext(byte, ir.IntType(64))

    return types.uint64(types.intp), build


def _advance(typing: Any, crc: Any, word: Any) -> tuple[Signature, Callable[..., Any]]:
    """`crc` after 8 more bytes, by the processor's instruction."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, narrow = ir.IntType(64), ir.IntType(32)
        crc, word = arguments
        if _IS_ARM:
            kind = ir.FunctionType(narrow, [narrow, wide])
            step = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.crc32cx")
            return builder.zext(builder.call(step, [builder.trunc(crc, narrow), word]), wide)
        kind = ir.FunctionType(wide, [wide, wide])
        step = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse42.crc32.64.64")
        return builder.call(step, [crc, word])

    return types.uint64(types.uint64, types.uint64), build


def _fold(
    typing: Any, crc: Any, address: Any, turns: Any, remainder: Any
) -> tuple[Signature, Callable[..., Any]]:
    """Fold ``turns + 1`` times `_FOLD_BYTES` at `address` into as many bytes at `remainder`.

    Their CRC, begun at zero, is that of all that was folded, begun at `crc`.
    """
    distance = 8 * _FOLD_BYTES
    # What bits move by: the lower half of 128 bits is 64 bits further from the end. The
    # product of two reversed numbers comes out one bit lower than that of the numbers.
    factors = [_power(distance + 32) << 1, _power(distance - 32) << 1] * (_FOLD_LANES // 2)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        crc, address, turns, remainder = arguments
        word, immediate = ir.IntType(64), ir.IntType(8)
        vector = ir.VectorType(word, _FOLD_LANES)
        kind = ir.FunctionType(vector, [vector, vector, immediate])
        name = f"llvm.x86.pclmulqdq.{64 * _FOLD_LANES}"
        multiply = cgutils.get_or_insert_function(builder.module, kind, name)
        by = ir.Constant(vector, factors)
        accumulators = [cgutils.alloca_once(builder, vector) for _ in range(_ACCUMULATORS)]

        def at(base: Any, offset: Any, place: int) -> Any:
            offset = builder.add(offset, ir.Constant(word, place * 8 * _FOLD_LANES))
            return builder.inttoptr(builder.add(base, offset), vector.as_pointer())

        zero = ir.Constant(word, 0)
        for place, accumulator in enumerate(accumulators):
            first = builder.load(at(address, zero, place), align=1)
            if place == 0:
                begun = ir.Constant(vector, [0] * _FOLD_LANES)
                begun = builder.insert_element(begun, crc, ir.Constant(ir.IntType(32), 0))
                first = builder.xor(first, begun)
            builder.store(first, accumulator)
        with cgutils.for_range(builder, turns) as loop:
            turn = builder.add(loop.index, ir.Constant(word, 1))
            offset = builder.mul(turn, ir.Constant(word, _FOLD_BYTES))
            for place, accumulator in enumerate(accumulators):
                held = builder.load(accumulator)
                low = builder.call(multiply, [held, by, ir.Constant(immediate, 0x00)])
                high = builder.call(multiply, [held, by, ir.Constant(immediate, 0x11)])
                arriving = builder.load(at(address, offset, place), align=1)
                builder.store(builder.xor(builder.xor(low, high), arriving), accumulator)
        for place, accumulator in enumerate(accumulators):
            builder.store(builder.load(accumulator), at(remainder, zero, place), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.intp, types.intp, types.intp), build


_word_at, _byte_at = intrinsic(_load_word), intrinsic(_load_byte)
_advanced, _folded = intrinsic(_advance), intrinsic(_fold)


@numba.njit(nogil=True, cache=True)
def _moved(table: Any, crc: Any) -> Any:
    """`crc` as it counts at the end of a part of the length that `table` is for."""
    return (
        table[0, crc & _BYTE]
        ^ table[1, (crc >> np.uint64(8)) & _BYTE]
        ^ table[2, (crc >> np.uint64(16)) & _BYTE]
        ^ table[3, (crc >> np.uint64(24)) & _BYTE]
    )


@numba.njit(nogil=True, cache=True)
def _in_bytes(crc: Any, address: Any, nbytes: Any) -> Any:
    """`crc` after `nbytes` more, one by one: for the last few."""
    for place in range(nbytes):
        crc = _SLICES[0, (crc ^ _byte_at(address + place)) & _BYTE] ^ (crc >> _8)
    return crc


@numba.njit(nogil=True, cache=True)
def _in_three_parts(crc: Any, address: Any, part_bytes: Any, table: Any) -> Any:
    """`crc` after three times `part_bytes` more."""
    second, third = np.uint64(0), np.uint64(0)
    for place in range(address, address + part_bytes, 8):
        crc = _advanced(crc, _word_at(place))
        second = _advanced(second, _word_at(place + part_bytes))
        third = _advanced(third, _word_at(place + 2 * part_bytes))
    return _moved(table, _moved(table, crc) ^ second) ^ third


@numba.njit(nogil=True, cache=True)
def _by_tables(crc: Any, address: Any, nbytes: Any) -> Any:
    whole = nbytes // 8 * 8
    for place in range(address, address + whole, 8):
        word = crc ^ _word_at(place)
        crc = np.uint64(0)
        for byte in range(8):
            crc ^= _SLICES[7 - byte, (word >> np.uint64(8 * byte)) & _BYTE]
    return _in_bytes(crc, address + whole, nbytes - whole)


@numba.njit(nogil=True, cache=True)
def _by_instruction(crc: Any, address: Any, nbytes: Any) -> Any:
    while nbytes >= 3 * _LONG_BYTES:
        crc = _in_three_parts(crc, address, _LONG_BYTES, _LONG)
        address += 3 * _LONG_BYTES
        nbytes -= 3 * _LONG_BYTES
    while nbytes >= 3 * _SHORT_BYTES:
        crc = _in_three_parts(crc, address, _SHORT_BYTES, _SHORT)
        address += 3 * _SHORT_BYTES
        nbytes -= 3 * _SHORT_BYTES
    whole = nbytes // 8 * 8
    for place in range(address, address + whole, 8):
        crc = _advanced(crc, _word_at(place))
    return _in_bytes(crc, address + whole, nbytes - whole)


@numba.njit(nogil=True, cache=True)
def _by_folding(crc: Any, address: Any, nbytes: Any) -> Any:
    if nbytes >= _FOLDED_BYTES_MIN:
        remainder = np.empty(_FOLD_BYTES, np.uint8)
        blocks = nbytes // _FOLD_BYTES
        _folded(crc, address, blocks - 1, remainder.ctypes.data)
        crc = _by_instruction(np.uint64(0), remainder.ctypes.data, _FOLD_BYTES)
        address += blocks * _FOLD_BYTES
        nbytes -= blocks * _FOLD_BYTES
    return _by_instruction(crc, address, nbytes)


# What numba compiles for: less than this processor has, where the user says so (NUMBA_CPU_NAME).
# Compiled code is cached under these names, so what is chosen by them may be built into it.
_target, _, _features = cpu_target.target_context.codegen().magic_tuple()
_has = frozenset(_features.split(","))
_IS_ARM = _target.startswith(("aarch64", "arm64"))
_IS_X86 = _target.startswith("x86_64")
_has_instruction = "+crc" in _has if _IS_ARM else _IS_X86 and "+sse4.2" in _has
_has_wide = "+avx512f" in _has
_has_folding = _IS_X86 and _has_instruction and {"+vpclmulqdq", "+avx2"} <= _has
_FOLD_LANES = 8 if _has_wide else 4
_FOLD_BYTES = _ACCUMULATORS * 8 * _FOLD_LANES

# The ways this processor has, the best one last. Each takes and returns the state between
# bytes; `crc32c` is what they are for.
METHODS = {"tables": _by_tables}
if _has_instruction:
    METHODS["instruction"] = _by_instruction
if _has_folding:
    METHODS["folding"] = _by_folding
_best = list(METHODS.values())[-1]


@numba.njit(nogil=True, cache=True)
def crc32c(address: Any, nbytes: Any) -> Any:
    """The CRC-32C of `nbytes` at `address`, uint64 below 2^32."""
    return _best(_ALL_ONES, np.int64(address), np.int64(nbytes)) ^ _ALL_ONES
