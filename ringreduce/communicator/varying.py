"""Collectives to which ranks may give different amounts: first the lengths go round, then data."""

from __future__ import annotations

import math

import numpy as np

from ringreduce.collectives.base import Collectives
from ringreduce.pure.payload import bounds_of, checked_lengths
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.vocabulary.errors import ArrayError, MismatchError
from ringreduce.vocabulary.types import dtype_code


def all_gather(
    collectives: Collectives, array: np.ndarray, flat: np.ndarray, rank: int, size: int, given: int
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
    rows = _gather_counts(collectives, Kind.ALL_GATHER, count, rank, size, signature)
    bounds = bounds_of([row * width for row in rows])
    try:
        gathered = np.empty(bounds[-1], array.dtype)
    except (MemoryError, ValueError) as error:
        raise ArrayError(
            f"cannot hold the {bounds[-1]} elements that the ranks gathered", rank=rank, size=size
        ) from error
    gathered[bounds[rank] : bounds[rank + 1]] = flat
    collectives.all_gather(Kind.ALL_GATHER, gathered, bounds, signature)
    return gathered.reshape(sum(rows), *rest)


def broadcast_object(
    collectives: Collectives, payload: np.ndarray, rank: int, root: int
) -> np.ndarray:
    """The payload that rank `root` passed, dtype uint8; other ranks' payloads are ignored."""
    length = np.array([payload.size], np.int64)
    collectives.broadcast(Kind.BROADCAST_OBJECT, length, root)
    received = payload if rank == root else np.empty(checked_lengths(length)[0], np.uint8)
    collectives.broadcast(Kind.BROADCAST_OBJECT, received, root)
    return received


def all_gather_object(
    collectives: Collectives, payload: np.ndarray, rank: int, size: int, signature: int
) -> list[np.ndarray]:
    """The payloads of all ranks, dtype uint8, in rank order."""
    kind = Kind.ALL_GATHER_OBJECT
    lengths = _gather_counts(collectives, kind, payload.size, rank, size, signature)
    bounds = bounds_of(checked_lengths(lengths))
    gathered = np.empty(bounds[-1], np.uint8)
    gathered[bounds[rank] : bounds[rank + 1]] = payload
    collectives.all_gather(kind, gathered, bounds)
    return [gathered[bounds[each] : bounds[each + 1]] for each in range(size)]


def _gather_counts(
    collectives: Collectives, kind: Kind, count: int, rank: int, size: int, signature: int
) -> list[int]:
    """One number from each rank, in rank order, none negative."""
    counts = np.zeros(size, np.int64)
    counts[rank] = count
    collectives.all_gather(kind, counts, tuple(range(size + 1)), signature)
    if counts.min() < 0:
        raise MismatchError(f"received the lengths {counts.tolist()}", rank=rank, size=size)
    return [int(number) for number in counts]
