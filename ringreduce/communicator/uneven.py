"""Collectives to which ranks may give different amounts: first the lengths go round, then data."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ringreduce.collectives.base import Collectives
from ringreduce.pure.payload import bounds_of, checked_lengths, decode, encode
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.vocabulary.errors import ArrayError, MismatchError
from ringreduce.vocabulary.types import dtype_code, dtype_named

# Of the all-to-alls of equal parts; a model has a few.
_KEPT = 16
# Of each object, sent along with its length: most need no second exchange then.
_FIRST_BYTES = 504
_LENGTH_BYTES = 8


class Identity(NamedTuple):
    """This rank and the number of ranks in a communicator; `who`: in the job, for errors."""

    rank: int
    size: int
    who: dict[str, Any]


def all_gather(
    collectives: Collectives, array: np.ndarray, flat: np.ndarray, own: Identity, given: int
) -> np.ndarray:
    """The C-contiguous arrays of all ranks, joined along the first dimension; a new array.

    `flat` is a flat view of `array`, `given` the caller's signature.

    Raises:
        ArrayError: the result does not fit in memory.
    """
    rest = array.shape[1:]
    width = math.prod(rest)
    # The signature makes ranks compare the dtype and the other dimensions.
    signature = signature_of("all_gather", dtype_code(array.dtype), rest, given)
    count = array.shape[0] if array.shape else 1
    rows = _gather_counts(collectives, Kind.ALL_GATHER, count, own, signature)
    bounds = bounds_of([row * width for row in rows])
    gathered = _new((bounds[-1],), array.dtype, own)
    gathered[bounds[own.rank] : bounds[own.rank + 1]] = flat
    collectives.all_gather(Kind.ALL_GATHER, gathered, bounds, signature)
    return gathered.reshape(sum(rows), *rest)


def all_to_all(
    collectives: Collectives,
    array: np.ndarray,
    flat: np.ndarray,
    out: np.ndarray | None,
    size: int,
    given: int,
) -> np.ndarray:
    """The parts of all ranks' arrays for this one, where all are cut into equal parts."""
    signature, elements = _equal_parts(dtype_code(array.dtype), array.shape, size, given)
    result = np.empty_like(array) if out is None else out
    collectives.all_to_all(Kind.ALL_TO_ALL, flat, result.reshape(-1), elements, signature)
    return result


# Remembered, since they cost as much as the call of a small array.
@lru_cache(_KEPT)
def _equal_parts(
    dtype: int, shape: tuple[int, ...], size: int, given: int
) -> tuple[int, np.ndarray]:
    """The signature and counts of an all-to-all of equal parts."""
    counts = np.full((size, size), math.prod(shape) // size, np.int64)
    counts.flags.writeable = False
    return signature_of("all_to_all", dtype, shape, given), counts


def all_to_all_uneven(
    collectives: Collectives,
    array: np.ndarray,
    flat: np.ndarray,
    out: np.ndarray | None,
    counts: list[int] | np.ndarray,
    own: Identity,
    given: int,
) -> tuple[np.ndarray, list[int]]:
    """The parts of all ranks' arrays for this one, and the rows of each.

    `counts` are this rank's, or of all ranks, shape (size, size), which are not exchanged then.

    Raises:
        ArrayError: the result does not fit in memory or in `out`.
    """
    rank, size, who = own
    rest = array.shape[1:]
    signature = signature_of("all_to_all", "uneven", dtype_code(array.dtype), rest, given)
    if isinstance(counts, np.ndarray):
        rows = counts
        signature = signature_of("all_to_all", "known", signature, rows.tobytes())
    else:
        rows = np.zeros((size, size), np.int64)
        rows[rank] = counts
        bounds = tuple(range(0, size * size + 1, size))
        collectives.all_gather(Kind.ALL_TO_ALL_COUNTS, rows.reshape(-1), bounds, signature)
        _check_received(rows, own)
    received = [int(number) for number in rows[:, rank]]
    if out is not None and len(out) != sum(received):
        raise ArrayError(
            f"all_to_all got `out` of {len(out)} rows and received {sum(received)}",
            **who,
            remedy="Let it make the result, or exchange the counts first.",
        )
    result = _new((sum(received), *rest), array.dtype, own) if out is None else out
    elements = rows * math.prod(rest)
    collectives.all_to_all(Kind.ALL_TO_ALL, flat, result.reshape(-1), elements, signature)
    return result, received


def gather(
    collectives: Collectives,
    array: np.ndarray,
    flat: np.ndarray,
    root: int,
    own: Identity,
    given: int,
) -> np.ndarray:
    """The arrays of all ranks, joined along the first dimension, on `root`; elsewhere no rows."""
    rest = array.shape[1:]
    signature = signature_of("gather", dtype_code(array.dtype), rest, root, given)
    count = array.shape[0] if array.shape else 1
    rows = _gather_counts(collectives, Kind.GATHER, count, own, signature)
    total = sum(rows) if own.rank == root else 0
    result = _new((total, *rest), array.dtype, own)
    elements = np.zeros((own.size, own.size), np.int64)
    elements[:, root] = np.array(rows) * math.prod(rest)
    collectives.all_to_all(Kind.GATHER, flat, result.reshape(-1), elements, signature)
    return result


def scatter(
    collectives: Collectives,
    array: np.ndarray,
    flat: np.ndarray,
    counts: list[int],
    root: int,
    own: Identity,
    given: int,
) -> np.ndarray:
    """This rank's part of the array of `root`, which cuts it into `counts` rows."""
    rank, size, _ = own
    described = encode([array.dtype.name, array.shape[1:], counts])
    name, rest, rows = decode(_broadcast(collectives, Kind.SCATTER, described, rank, root, given))
    result = _new((rows[rank], *rest), dtype_named(name), own)
    elements = np.zeros((size, size), np.int64)
    elements[root] = np.array(rows) * math.prod(rest)
    source = flat if rank == root else result[:0].reshape(-1)
    signature = signature_of("scatter", root, given)
    collectives.all_to_all(Kind.SCATTER, source, result.reshape(-1), elements, signature)
    return result


def broadcast_object(
    collectives: Collectives, payload: np.ndarray, rank: int, root: int
) -> np.ndarray:
    """The payload that rank `root` passed, dtype uint8; other ranks' payloads are ignored."""
    return _broadcast(collectives, Kind.BROADCAST_OBJECT, payload, rank, root, 0)


def gather_object(
    collectives: Collectives, payload: np.ndarray, root: int, own: Identity
) -> list[np.ndarray]:
    """The payloads of all ranks, dtype uint8, in rank order, on `root`; empty ones elsewhere."""
    kind, signature = Kind.GATHER_OBJECT, signature_of("root", root)
    lengths = _gather_counts(collectives, kind, payload.size, own, signature)
    size = own.size
    elements = np.zeros((size, size), np.int64)
    elements[:, root] = checked_lengths(lengths)
    bounds = bounds_of(elements[:, own.rank].tolist())
    gathered = np.empty(bounds[-1], np.uint8)
    collectives.all_to_all(kind, payload, gathered, elements, signature)
    return [gathered[bounds[each] : bounds[each + 1]] for each in range(size)]


def scatter_object(
    collectives: Collectives, payloads: list[np.ndarray], root: int, rank: int, size: int
) -> np.ndarray:
    """This rank's one of the payloads of `root`, dtype uint8."""
    kind, signature = Kind.SCATTER_OBJECT, signature_of("root", root)
    elements = np.zeros((size, size), np.int64)
    if rank == root:
        elements[root] = [payload.size for payload in payloads]
    collectives.broadcast(kind, elements[root], root, signature)
    source = np.concatenate(payloads) if rank == root else np.empty(0, np.uint8)
    own = np.empty(checked_lengths(elements[root])[rank], np.uint8)
    collectives.all_to_all(kind, source, own, elements, signature)
    return own


def all_gather_object(
    collectives: Collectives, kind: Kind, payload: np.ndarray, own: Identity, signature: int
) -> list[np.ndarray]:
    """The payloads of all ranks, dtype uint8, in rank order; `kind` is the caller's call."""
    rows = np.zeros((own.size, _LENGTH_BYTES + _FIRST_BYTES), np.uint8)
    lengths, firsts = rows[:, :_LENGTH_BYTES].view(np.int64)[:, 0], rows[:, _LENGTH_BYTES:]
    lengths[own.rank] = payload.size
    first = payload[:_FIRST_BYTES]
    firsts[own.rank, : first.size] = first
    bounds = tuple(range(0, rows.size + 1, rows.shape[1]))
    collectives.all_gather(kind, rows.reshape(-1), bounds, signature)
    _check_received(lengths, own)
    if lengths.max() <= _FIRST_BYTES:
        return [each[:length] for each, length in zip(firsts, lengths, strict=True)]
    bounds = bounds_of(checked_lengths(lengths))
    gathered = np.empty(bounds[-1], np.uint8)
    gathered[bounds[own.rank] : bounds[own.rank + 1]] = payload
    collectives.all_gather(kind, gathered, bounds)
    return [gathered[bounds[each] : bounds[each + 1]] for each in range(own.size)]


def _gather_counts(
    collectives: Collectives, kind: Kind, count: int, own: Identity, signature: int
) -> list[int]:
    """One number from each rank, in rank order, none negative."""
    counts = np.zeros(own.size, np.int64)
    counts[own.rank] = count
    collectives.all_gather(kind, counts, tuple(range(own.size + 1)), signature)
    _check_received(counts, own)
    return [int(number) for number in counts]


def _check_received(counts: np.ndarray, own: Identity) -> None:
    if counts.min() < 0:
        raise MismatchError(f"received the lengths {counts.tolist()}", **own.who)


def _broadcast(
    collectives: Collectives, kind: Kind, payload: np.ndarray, rank: int, root: int, signature: int
) -> np.ndarray:
    """The payload of rank `root`, dtype uint8, whose length the others do not know."""
    length = np.array([payload.size], np.int64)
    collectives.broadcast(kind, length, root, signature)
    received = payload if rank == root else np.empty(checked_lengths(length)[0], np.uint8)
    collectives.broadcast(kind, received, root, signature)
    return received


def _new(shape: tuple[int, ...], dtype: np.dtype, own: Identity) -> np.ndarray:
    """An array for what other ranks send; ArrayError when it does not fit in memory."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise ArrayError(
            f"cannot hold the {math.prod(shape)} elements that the ranks send", **own.who
        ) from error
