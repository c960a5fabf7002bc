"""All-reduces whose float32 values travel as something shorter (`ringreduce.pure.encodings`).

They do not go round the ring: sums rounded at every hop would lose the small addends of a large
one. Each rank sends encoded chunks to those who add them up, in float32 and in rank order. The
results are encoded once more, and gathered:

    encode -> all-to-all -> decode, reduce, divide -> encode -> all-gather -> decode
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy import ndarray

from ringreduce.collectives.base import Said
from ringreduce.pure import kernels
from ringreduce.pure.buckets import ALIGNMENT
from ringreduce.pure.encodings import Coding, Encoding, Half
from ringreduce.pure.payload import bounds_of, cut
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.pure.wire import Kind
from ringreduce.transport.link_calls import Reduction
from ringreduce.vocabulary.types import ReduceOp, dtype_code, is_half

# Elements that are sent at a time, for which memory is kept. On long links fewer take longer.
SPAN = 1 << 19
# Of these, elements that are encoded at a time. What stays in the processor's cache takes a third
# of the time (docs/performance.md).
BLOCK = 1 << 15


class EncodedReduction:
    """The all-reduces that group rank `rank` of `size` makes of encoded floats.

    Args:
        swap: sends each of some pieces to the rank of its place, and receives as many.
        gather: an all-gather.
        reduction: how the floats of all ranks become one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        swap: Callable[[Said, Sequence[ndarray], Sequence[ndarray]], None],
        gather: Callable[..., None],
        reduction: Callable[[ReduceOp, np.dtype], Reduction],
    ) -> None:
        self._rank, self._size, self._reduction = rank, size, reduction
        self._swap, self._gather = swap, gather
        # Kept, since the system takes longer to give new pages than encoding takes.
        self._memory = np.empty(0, np.uint8)
        self._rows = np.empty(size * BLOCK, np.float32)

    def all_reduce(self, flat: ndarray, said: Said, coding: Coding) -> None:
        """Reduce `flat`, float32 or of 16 bits, to what every rank decodes from the results."""
        for start in range(0, flat.size, SPAN):
            part = slice(start, start + SPAN)
            span = flat[part]
            wide = kernels.widened(span) if is_half(dtype_code(flat.dtype)) else span
            self._all_reduce(wide, (*said[:2], wide.size, *said[3:]), coding.of(part))
            if wide is not span:
                kernels.narrow(wide, span)

    def reduce_scatter(self, flat: ndarray, op: ReduceOp, signature: int) -> ndarray:
        """Reduce `flat`, of 16 bits; return the view of it that holds this rank's chunk."""
        encoding, wide = Half(flat.dtype.name), kernels.widened(flat)
        bounds = chunk_bounds(flat.size, self._size)
        own_chunk = cut(flat, bounds)[self._rank]
        said = Kind.REDUCE_SCATTER, flat.dtype, flat.size, signature, op
        # Not kept: it is as long as the array.
        pieces = cut(np.empty(flat.nbytes, np.uint8), [bound * flat.itemsize for bound in bounds])
        arriving = np.empty(self._size * own_chunk.nbytes, np.uint8)
        chunks = cut(wide, bounds)
        for chunk, piece in zip(chunks, pieces, strict=True):
            _encode(encoding, chunk, piece, None)
        for _ in self._reduced(said, encoding, chunks[self._rank], pieces, arriving):
            pass
        kernels.narrow(chunks[self._rank], own_chunk)
        return own_chunk

    def _all_reduce(self, flat: ndarray, said: Said, coding: Coding) -> None:
        encoding, residuals = coding
        rank, bounds = self._rank, chunk_bounds(flat.size, self._size)
        chunks = cut(flat, bounds)
        own_chunk = chunks[rank]
        ends = bounds_of([_nbytes(encoding, chunk.size) for chunk in chunks])
        lefts: Sequence[ndarray | None] = [None] * self._size
        left_of_own, kept = None, list[ndarray]()
        if residuals is not None:
            lefts, left_of_own = cut(residuals[0], bounds), cut(residuals[1], bounds)[rank]
            kept = [residuals[0], left_of_own]
        came = self._size * _nbytes(encoding, own_chunk.size)
        encoded, arriving, *copies = self._take(ends[-1], came, *(memory.nbytes for memory in kept))
        for memory, copy in zip(kept, copies, strict=True):
            copy[:] = memory.view(np.uint8)
        pieces = cut(encoded, ends)
        for chunk, piece, left in zip(chunks, pieces, lefts, strict=True):
            _encode(encoding, chunk, piece, left)
        for part, place in self._reduced(said, encoding, own_chunk, pieces, arriving):
            left = None if left_of_own is None else left_of_own[part]
            _encode(encoding, own_chunk[part], pieces[rank][place], left)
        self._gather(said[0], encoded, ends, said[3])
        is_finite = True
        for chunk, piece in zip(chunks, pieces, strict=True):
            for part, place in _blocks(encoding, chunk.size):
                block = chunk[part]
                encoding.decode(piece[place], block)
                if residuals is not None:
                    is_finite = is_finite and encoding.are_finite(piece[place], block.size)
        if not is_finite:
            for memory, copy in zip(kept, copies, strict=True):
                memory.view(np.uint8)[:] = copy

    def _reduced(
        self,
        said: Said,
        encoding: Encoding,
        own_chunk: ndarray,
        pieces: Sequence[ndarray],
        arriving: ndarray,
    ) -> Iterator[tuple[slice, slice]]:
        """Reduce `own_chunk`, this rank's chunk of float32, to that of all ranks, block by block.

        `pieces` are all that this rank has, encoded; `arriving` is memory for what all have of that
        chunk. Yields each block that is done, and the place of its encoding in a piece.
        """
        rank, size = self._rank, self._size
        came = list(arriving.reshape(size, -1))
        came[rank][:] = pieces[rank]
        self._swap(said, pieces, came)
        op = ReduceOp(said[-1])
        reduction = self._reduction(op, own_chunk.dtype)
        for part, place in _blocks(encoding, own_chunk.size):
            block = own_chunk[part]
            rows = self._rows[: size * block.size].reshape(size, -1)
            for row, piece in zip(rows[::-1], came, strict=True):
                encoding.decode(piece[place], row)
            kernels.reduce_rows(
                rows.view(np.uint8), size - 1, block.view(np.uint8), block.size, *reduction
            )
            yield part, place

    def _take(self, *nbytes: int) -> list[ndarray]:
        """Memory until the next call, uint8."""
        ends = bounds_of([size + -size % ALIGNMENT for size in nbytes])
        if self._memory.size < ends[-1]:
            self._memory = np.empty(ends[-1], np.uint8)
        starts = ends[:-1]
        return [self._memory[s : s + size] for s, size in zip(starts, nbytes, strict=True)]


def _blocks(encoding: Encoding, count: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of so many values, and where each is in their encoding."""
    end = 0
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        begin, end = end, end + encoding.nbytes(size)
        yield slice(start, start + size), slice(begin, end)


def _nbytes(encoding: Encoding, count: int) -> int:
    return sum(place.stop - place.start for _, place in _blocks(encoding, count))


def _encode(encoding: Encoding, values: ndarray, out: ndarray, left: ndarray | None) -> None:
    """Encode with the residuals `left`, if there are some."""
    for part, place in _blocks(encoding, values.size):
        encoding.encode(values[part], out[place], None if left is None else left[part])
