"""All-reduces whose float32 values travel as something shorter (`ringreduce.pure.encodings`).

They do not go round the ring: sums rounded at every hop would lose the small addends of a large
one. Each rank sends encoded chunks to those who add them up, in float32 and in rank order. The
results are encoded once more, and gathered:

    encode -> all-to-all -> decode, reduce, divide -> encode -> all-gather -> decode
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.pure import kernels
from ringreduce.pure.buckets import ALIGNMENT
from ringreduce.pure.encodings import Coding, Encoding, Half
from ringreduce.pure.payload import bounds_of
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.pure.wire import Kind
from ringreduce.transport.link_calls import Reduction
from ringreduce.vocabulary.types import ReduceOp, dtype_code, is_half

# Elements that are encoded at a time. What stays in the processor's cache takes a third of the time
# on 1 Gbit/s, where this many still fill the link (docs/performance.md).
BLOCK = 1 << 17
# Kind and dtype of the caller's call, elements, signature, operator: what ranks compare.
Said = tuple[Kind, np.dtype, int, int, int]


class EncodedReduction:
    """Those of group rank `rank` of `size`.

    Args:
        swap: sends each of some pieces to the rank of its place, and receives as many.
        gather: an all-gather.
        reduction: how the floats of all ranks become one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        swap: Callable[[Said, Sequence[np.ndarray], Sequence[np.ndarray]], None],
        gather: Callable[..., None],
        reduction: Callable[[ReduceOp, np.dtype], Reduction],
    ) -> None:
        self._rank, self._size, self._reduction = rank, size, reduction
        self._swap, self._gather = swap, gather
        # Kept, since the system takes longer to give new pages than encoding takes.
        self._memory = np.empty(0, np.uint8)

    def all_reduce(
        self,
        flat: np.ndarray,
        op: ReduceOp,
        signature: int,
        coding: Coding,
        kind: Kind,
        called: Any,
    ) -> None:
        """Reduce `flat`, float32 or of 16 bits, to what every rank decodes from the results."""
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK]
            residuals = None
            if coding.residuals is not None:
                residuals = [kept[start : start + BLOCK] for kept in coding.residuals]
            wide = kernels.widened(block) if is_half(dtype_code(flat.dtype)) else block
            said = kind, called, wide.size, signature, op
            self._all_reduce(wide, said, coding.encoding, residuals)
            if wide is not block:
                kernels.narrow(wide, block)

    def reduce_scatter(self, flat: np.ndarray, op: ReduceOp, signature: int) -> np.ndarray:
        """Reduce `flat`, of 16 bits; return the view of it that holds this rank's chunk."""
        encoding, wide = Half(flat.dtype.name), kernels.widened(flat)
        bounds = chunk_bounds(flat.size, self._size)
        own = cut(flat, bounds)[self._rank]
        said = Kind.REDUCE_SCATTER, flat.dtype, flat.size, signature, op
        # Not kept: it is as long as the array.
        nbytes = flat.nbytes, self._size * own.nbytes, self._size * own.size * 4
        memory = [np.empty(each, np.uint8) for each in nbytes]
        pieces = cut(memory[0], [bound * flat.itemsize for bound in bounds])
        chunks = cut(wide, bounds)
        self._reduce(said, encoding, chunks, [None] * self._size, pieces, *memory[1:])
        kernels.narrow(chunks[self._rank], own)
        return own

    def _all_reduce(
        self,
        flat: np.ndarray,
        said: Said,
        encoding: Encoding,
        residuals: Sequence[np.ndarray] | None,
    ) -> None:
        rank, bounds = self._rank, chunk_bounds(flat.size, self._size)
        chunks = cut(flat, bounds)
        own = chunks[rank]
        ends = bounds_of([encoding.nbytes(chunk.size) for chunk in chunks])
        memory = self._take(
            *(ends[-1], self._size * encoding.nbytes(own.size), self._size * own.nbytes),
            *(() if residuals is None else (flat.nbytes, own.nbytes)),
        )
        pieces = cut(memory[0], ends)
        # Copies of residuals, which stay as they were where a result is not finite.
        kept: Sequence[np.ndarray | None] = [None] * self._size
        last = None
        if residuals is not None:
            first, last = (each.view(np.float32) for each in memory[3:])
            first[:], last[:] = residuals[0], cut(residuals[1], bounds)[rank]
            kept = cut(first, bounds)
        self._reduce(said, encoding, chunks, kept, pieces, *memory[1:3])
        encoding.encode(own, pieces[rank], last)
        self._gather(said[0], memory[0], ends, said[3])
        for chunk, piece in zip(chunks, pieces, strict=True):
            encoding.decode(piece, chunk)
        sizes = [chunk.size for chunk in chunks]
        if residuals is not None and all(map(encoding.are_finite, pieces, sizes)):
            residuals[0][:] = first
            cut(residuals[1], bounds)[rank][:] = last

    def _reduce(
        self,
        said: Said,
        encoding: Encoding,
        chunks: Sequence[np.ndarray],
        residuals: Sequence[np.ndarray | None],
        pieces: Sequence[np.ndarray],
        arriving: np.ndarray,
        decoded: np.ndarray,
    ) -> None:
        """Reduce this rank's chunk of float32; `pieces` get all that it has, encoded.

        `arriving` and `decoded` are memory for what all ranks have of that chunk.
        """
        rank, size, own = self._rank, self._size, chunks[self._rank]
        for chunk, piece, left in zip(chunks, pieces, residuals, strict=True):
            encoding.encode(chunk, piece, left)
        came = list(arriving.reshape(size, -1))
        came[rank][:] = pieces[rank]
        self._swap(said, pieces, came)
        rows = decoded.view(np.float32).reshape(size, -1)
        for row, piece in zip(rows[::-1], came, strict=True):
            encoding.decode(piece, row)
        op = ReduceOp(said[-1])
        kernels.reduce_rows(
            *(rows.view(np.uint8), size - 1, own.view(np.uint8), own.size),
            *self._reduction(op, own.dtype),
        )

    def _take(self, *nbytes: int) -> list[np.ndarray]:
        """Memory until the next call, uint8."""
        ends = bounds_of([each + -each % ALIGNMENT for each in nbytes])
        if self._memory.size < ends[-1]:
            self._memory = np.empty(ends[-1], np.uint8)
        starts = ends[:-1]
        return [self._memory[s : s + each] for s, each in zip(starts, nbytes, strict=True)]


def cut(array: np.ndarray, bounds: Sequence[int]) -> list[np.ndarray]:
    """The parts of `array` between `bounds`."""
    return [array[start:end] for start, end in itertools.pairwise(bounds)]
