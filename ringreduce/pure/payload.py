"""Checks arguments of collectives: arrays as flat views, objects as bytes, roots, lengths."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ringreduce.pure.buckets import ALIGNMENT
from ringreduce.pure.decoding import UNREADABLE
from ringreduce.vocabulary.errors import ArrayError, MismatchError, ProtocolError
from ringreduce.vocabulary.types import dtype_code

# Objects are settings, file names, metrics; larger data travels as arrays.
OBJECT_BYTES_MAX = 64 << 20
TAG_MAX = (1 << 63) - 1
_REFUSAL = -82  # MessagePack's code of what travels in place of an object that cannot


def flat_view(array: np.ndarray, operation: str, *, writable: bool = True) -> np.ndarray:
    """`array` as a one-dimensional view, or an ArrayError that says what is wrong with it."""
    # The usual one first: a small collective takes microseconds.
    if type(array) is np.ndarray and array.flags.carray:
        dtype_code(array.dtype)
        return array if array.ndim == 1 else array.reshape(-1)
    if not isinstance(array, np.ndarray):
        raise ArrayError(
            f"{operation} got {type(array).__name__}, not a numpy array",
            remedy="Pass numpy.asarray(x); on tensors use ringreduce.keras.",
        )
    dtype_code(array.dtype)
    shape = f"shape {array.shape}, strides {array.strides}"
    if not array.flags.c_contiguous:
        raise ArrayError(
            f"{operation} got an array that is not C-contiguous ({shape})",
            remedy="Pass numpy.ascontiguousarray(x), and mind that it is a copy.",
        )
    if writable and not array.flags.writeable:
        raise ArrayError(
            f"{operation} got a read-only array ({shape})",
            remedy="The result is written in place: pass a copy.",
        )
    return array.reshape(-1)


def aligned(nbytes: int) -> np.ndarray:
    """New memory of that many bytes, zeros, that begins at a multiple of `ALIGNMENT`."""
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + nbytes]


def bounds_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where parts of these lengths begin when laid end to end, and where the last ends."""
    return tuple(itertools.accumulate(lengths, initial=0))


def cut(array: np.ndarray, bounds: Sequence[int]) -> list[np.ndarray]:
    """The parts of `array` between `bounds`."""
    return [array[start:end] for start, end in itertools.pairwise(bounds)]


def checked_lengths(lengths: Sequence[int] | np.ndarray) -> list[int]:
    """Check that lengths of objects from other ranks are within the limit, else MismatchError."""
    numbers = [int(length) for length in lengths]
    if not all(0 <= number <= OBJECT_BYTES_MAX for number in numbers):
        raise MismatchError(f"received objects of {numbers} bytes, over the limit")
    return numbers


def checked_root(root: Any, size: int, who: dict[str, Any]) -> int:
    """`root` as a plain int, to be hashed; ArrayError, on rank `who`, if it is no rank."""
    number = _whole(root)
    if not 0 <= number < size:
        group = f" in a group of {size}" if size != who["size"] else ""
        remedy = f"Roots are 0 to {size - 1}{group}."
        raise ArrayError(f"got root {root!r}{group}", **who, remedy=remedy)
    return number


def checked_peer(peer: Any, rank: int, size: int, who: dict[str, Any]) -> int:
    """`peer`, another rank than `rank`, as a plain int; errors are as for `checked_root`."""
    number = _whole(peer)
    if not 0 <= number < size or number == rank:
        others = f"0 to {size - 1}, apart from {rank}" if size > 1 else "none"
        group = f" in a group of {size}" if size != who["size"] else ""
        text = f"got rank {peer!r} to send to or receive from{group}"
        raise ArrayError(text, **who, remedy=f"The other ranks are {others}.")
    return number


def checked_tag(tag: Any, who: dict[str, Any]) -> int:
    """`tag`, a whole number that fits 63 bits, as a plain int; errors are as for `checked_root`."""
    number = _whole(tag)
    if not 0 <= number <= TAG_MAX:
        raise ArrayError(f"got tag {tag!r:.100}", **who, remedy="Tags are 0 to 2**63 - 1.")
    return number


def checked_counts(
    counts: Sequence[int] | None, rows: int, size: int, who: dict[str, Any]
) -> list[int]:
    """How many of `rows` are for each of `size` ranks: `counts`, or as many each; or ArrayError."""
    if counts is None:
        if rows % size:
            text = f"cannot divide {rows} rows evenly among {size} ranks"
            remedy = "Pass `counts`, the number of rows for each rank."
            raise ArrayError(text, **who, remedy=remedy)
        return [rows // size] * size
    try:
        numbers = [operator.index(count) for count in counts]
    except TypeError:
        numbers = []
    if len(numbers) != size or min(numbers) < 0 or sum(numbers) != rows:
        text = f"got the counts {counts!r:.200} for {rows} rows"
        remedy = f"Pass {size} whole numbers, one for each rank, that add up to {rows}."
        raise ArrayError(text, **who, remedy=remedy)
    return numbers


def _whole(value: Any) -> int:
    """`value` as a plain int; -1 if it is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        return -1


def encode(value: Any) -> np.ndarray:
    """Encode `value` as MessagePack, dtype uint8; ArrayError if it cannot be or is too large."""
    try:
        payload = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ArrayError(
            f"cannot send a {type(value).__name__} to other ranks: {error}",
            remedy="Objects travel as MessagePack: numbers, text, bytes, lists, dicts.",
        ) from error
    if len(payload) > OBJECT_BYTES_MAX:
        raise ArrayError(
            f"cannot send an object of {len(payload)} bytes; the limit is {OBJECT_BYTES_MAX}",
            remedy="Send large data as an array.",
        )
    return np.frombuffer(payload, np.uint8)


def encode_refusal(error: ArrayError, who: dict[str, Any]) -> np.ndarray:
    """Encode a refusal, sent for an object that rank `who` cannot send: no other rank need wait."""
    error.rank, error.size = who["rank"], who["size"]
    refusal = msgspec.msgpack.Ext(_REFUSAL, str(error).encode(errors="replace"))
    return np.frombuffer(msgspec.msgpack.encode(refusal), np.uint8)


def encode_or_refuse(value: Any, who: dict[str, Any]) -> tuple[np.ndarray, ArrayError | None]:
    """Encode `value`, with None; or a refusal, with the error that says why."""
    try:
        return encode(value), None
    except ArrayError as error:
        return encode_refusal(error, who), error


def decode(payload: np.ndarray, who: dict[str, Any] | None = None) -> Any:
    """Decode what `encode` encoded, into plain types, on rank `who`.

    Raises ArrayError for a refusal, ProtocolError for bytes that are no object.
    """
    try:
        value = msgspec.msgpack.decode(payload.tobytes())
    except UNREADABLE as error:
        text = f"received {payload.size} bytes that are no object of ringreduce: {error}"
        remedy = "All ranks must run the same ringreduce."
        raise ProtocolError(text, **(who or {}), remedy=remedy) from error
    if isinstance(value, msgspec.msgpack.Ext) and value.code == _REFUSAL:
        text = bytes(value.data).decode(errors="replace")
        raise ArrayError(f"got no object, since {text}", **(who or {}))
    return value
