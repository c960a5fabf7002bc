"""Collectives to which ranks may give different amounts: first the lengths go round, then data."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy import ndarray

from ringreduce.collectives.base import Collectives
from ringreduce.pure.payload import bounds_of, checked_lengths, cut, decode, encode
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.vocabulary.errors import ArrayError, MismatchError
from ringreduce.vocabulary.types import dtype_code, dtype_named

_KEPT = 16  # of the all-to-alls of equal parts; a model has a few
_FIRST_BYTES = 504  # of each object, sent along with its length: most need no second exchange then
_LENGTH_BYTES = 8


class Uneven:
    """Such collectives of rank `rank` of `size`; `who` is that rank in the job, for errors.

    They are made of `collectives`. An `array` is C-contiguous, and `flat` a flat view of it;
    `call` is the caller's signature.
    Results are new arrays, or an ArrayError when they do not fit in memory.
    """

    def __init__(self, collectives: Collectives, rank: int, size: int, who: dict[str, Any]) -> None:
        self._collectives, self._rank, self._size, self._who = collectives, rank, size, who

    def all_gather(self, array: ndarray, flat: ndarray, call: int) -> ndarray:
        """The arrays of all ranks, joined along the first dimension."""
        rest = array.shape[1:]
        width = math.prod(rest)
        # The signature makes ranks compare the dtype and the other dimensions.
        signature = signature_of("all_gather", dtype_code(array.dtype), rest, call)
        count = array.shape[0] if array.shape else 1
        rows = self._gather_counts(Kind.ALL_GATHER, count, signature)
        bounds = bounds_of([row * width for row in rows])
        gathered = self._new((bounds[-1],), array.dtype)
        cut(gathered, bounds)[self._rank][:] = flat
        self._collectives.all_gather(Kind.ALL_GATHER, gathered, bounds, signature)
        return gathered.reshape(sum(rows), *rest)

    def all_to_all(self, array: ndarray, flat: ndarray, out: ndarray | None, call: int) -> ndarray:
        """The parts of all ranks' arrays for this one, where all are cut into equal parts."""
        code = dtype_code(array.dtype)
        signature, elements = _equal_parts(code, array.shape, self._size, call)
        result = np.empty_like(array) if out is None else out
        target = result.reshape(-1)
        self._collectives.all_to_all(Kind.ALL_TO_ALL, flat, target, elements, signature)
        return result

    def all_to_all_uneven(
        self,
        array: ndarray,
        flat: ndarray,
        out: ndarray | None,
        counts: list[int] | ndarray,
        call: int,
    ) -> tuple[ndarray, list[int]]:
        """The parts of all ranks' arrays for this one, and the rows of each.

        `counts` are this rank's, or of all ranks, shape (size, size), which are not exchanged then.
        Raises ArrayError if the result does not fit in `out`.
        """
        rank, size = self._rank, self._size
        rest = array.shape[1:]
        signature = signature_of("all_to_all", "uneven", dtype_code(array.dtype), rest, call)
        if isinstance(counts, ndarray):
            rows = counts
            signature = signature_of("all_to_all", "known", signature, rows.tobytes())
        else:
            rows = np.zeros((size, size), np.int64)
            rows[rank] = counts
            bounds = tuple(range(0, size * size + 1, size))
            flat_rows = rows.reshape(-1)
            self._collectives.all_gather(Kind.ALL_TO_ALL_COUNTS, flat_rows, bounds, signature)
            self._check_received(rows)
        received = [int(number) for number in rows[:, rank]]
        if out is not None and len(out) != sum(received):
            raise ArrayError(
                f"all_to_all got `out` of {len(out)} rows and received {sum(received)}",
                **self._who,
                remedy="Let it make the result, or exchange the counts first.",
            )
        result = self._new((sum(received), *rest), array.dtype) if out is None else out
        elements, target = rows * math.prod(rest), result.reshape(-1)
        self._collectives.all_to_all(Kind.ALL_TO_ALL, flat, target, elements, signature)
        return result, received

    def gather(self, array: ndarray, flat: ndarray, root: int, call: int) -> ndarray:
        """The arrays of all ranks, joined along the first dimension, on `root`; else no rows."""
        rest = array.shape[1:]
        signature = signature_of("gather", dtype_code(array.dtype), rest, root, call)
        count = array.shape[0] if array.shape else 1
        rows = self._gather_counts(Kind.GATHER, count, signature)
        result = self._new((sum(rows) if self._rank == root else 0, *rest), array.dtype)
        elements = np.zeros((self._size, self._size), np.int64)
        elements[:, root] = np.array(rows) * math.prod(rest)
        target = result.reshape(-1)
        self._collectives.all_to_all(Kind.GATHER, flat, target, elements, signature)
        return result

    def scatter(
        self, array: ndarray, flat: ndarray, counts: list[int], root: int, call: int
    ) -> ndarray:
        """This rank's part of the array of `root`, which cuts it into `counts` rows."""
        described = encode([array.dtype.name, array.shape[1:], counts])
        name, rest, rows = decode(self.broadcast(Kind.SCATTER, described, root, call), self._who)
        result = self._new((rows[self._rank], *rest), dtype_named(name))
        elements = np.zeros((self._size, self._size), np.int64)
        elements[root] = np.array(rows) * math.prod(rest)
        target = result.reshape(-1)
        source = flat if self._rank == root else target[:0]
        signature = signature_of("scatter", root, call)
        self._collectives.all_to_all(Kind.SCATTER, source, target, elements, signature)
        return result

    def broadcast(self, kind: Kind, payload: ndarray, root: int, signature: int) -> ndarray:
        """The payload of rank `root`, dtype uint8, whose length the others do not know."""
        length = np.array([payload.size], np.int64)
        self._collectives.broadcast(kind, length, root, signature)
        is_root = self._rank == root
        received = payload if is_root else np.empty(checked_lengths(length)[0], np.uint8)
        self._collectives.broadcast(kind, received, root, signature)
        return received

    def gather_object(self, kind: Kind, payload: ndarray, root: int) -> list[ndarray]:
        """The payloads of all ranks, dtype uint8, in rank order, on `root`; elsewhere empty."""
        signature = signature_of("root", root)
        lengths = self._gather_counts(kind, payload.size, signature)
        elements = np.zeros((self._size, self._size), np.int64)
        elements[:, root] = checked_lengths(lengths)
        bounds = bounds_of(elements[:, self._rank].tolist())
        gathered = np.empty(bounds[-1], np.uint8)
        self._collectives.all_to_all(kind, payload, gathered, elements, signature)
        return cut(gathered, bounds)

    def scatter_object(self, payloads: list[ndarray], root: int) -> ndarray:
        """This rank's one of the payloads of `root`, dtype uint8."""
        kind, signature = Kind.SCATTER_OBJECT, signature_of("root", root)
        elements = np.zeros((self._size, self._size), np.int64)
        source = np.empty(0, np.uint8)
        if self._rank == root:
            elements[root] = [payload.size for payload in payloads]
            source = np.concatenate(payloads)
        self._collectives.broadcast(kind, elements[root], root, signature)
        piece = np.empty(checked_lengths(elements[root])[self._rank], np.uint8)
        self._collectives.all_to_all(kind, source, piece, elements, signature)
        return piece

    def all_gather_object(self, kind: Kind, payload: ndarray, signature: int) -> list[ndarray]:
        """The payloads of all ranks, dtype uint8, in rank order; `kind` is the caller's call."""
        rank, size = self._rank, self._size
        rows = np.zeros((size, _LENGTH_BYTES + _FIRST_BYTES), np.uint8)
        lengths, firsts = rows[:, :_LENGTH_BYTES].view(np.int64)[:, 0], rows[:, _LENGTH_BYTES:]
        lengths[rank] = payload.size
        first = payload[:_FIRST_BYTES]
        firsts[rank, : first.size] = first
        bounds = tuple(range(0, rows.size + 1, rows.shape[1]))
        self._collectives.all_gather(kind, rows.reshape(-1), bounds, signature)
        self._check_received(lengths)
        if lengths.max() <= _FIRST_BYTES:
            return [first[:length] for first, length in zip(firsts, lengths, strict=True)]
        bounds = bounds_of(checked_lengths(lengths))
        gathered = np.empty(bounds[-1], np.uint8)
        parts = cut(gathered, bounds)
        parts[rank][:] = payload
        self._collectives.all_gather(kind, gathered, bounds)
        return parts

    def _gather_counts(self, kind: Kind, count: int, signature: int) -> list[int]:
        """One number from each rank, in rank order, none negative."""
        counts = np.zeros(self._size, np.int64)
        counts[self._rank] = count
        self._collectives.all_gather(kind, counts, tuple(range(self._size + 1)), signature)
        self._check_received(counts)
        return [int(number) for number in counts]

    def _check_received(self, counts: ndarray) -> None:
        if counts.min() < 0:
            raise MismatchError(f"received the lengths {counts.tolist()}", **self._who)

    def _new(self, shape: tuple[int, ...], dtype: np.dtype) -> ndarray:
        """An array for what other ranks send; ArrayError when it does not fit in memory."""
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise ArrayError(
                f"cannot hold the {math.prod(shape)} elements that the ranks send", **self._who
            ) from error


# Remembered, since they cost as much as the call of a small array.
@lru_cache(_KEPT)
def _equal_parts(dtype: int, shape: tuple[int, ...], size: int, call: int) -> tuple[int, ndarray]:
    """The signature and counts of an all-to-all of equal parts."""
    counts = np.full((size, size), math.prod(shape) // size, np.int64)
    counts.flags.writeable = False
    return signature_of("all_to_all", dtype, shape, call), counts
