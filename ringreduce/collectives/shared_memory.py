"""The collectives of ranks that share memory: each rank reduces its chunk of all buffers.

Every rank reaches every other's memory, so a reduce-scatter or an all-gather takes one exchange
whatever the number of ranks (native/include/ringreduce.h has the steps). One rank adds each
element, in rank order, so results are bit-identical everywhere. 16-bit floats are added in float32
and rounded once.
"""

import mmap
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy import ndarray

from ringreduce.collectives.base import Bounds, Collectives, Said, Shared
from ringreduce.effects.handoff import MARK_BYTES
from ringreduce.pure.encodings import Coding
from ringreduce.pure.membership import Membership, whole
from ringreduce.pure.payload import cut
from ringreduce.pure.schedule import Action, chunk_bounds
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.transport.shm import HostCall, ShmLink
from ringreduce.transport.shm_pairs import ShmPairs
from ringreduce.transport.zmq_pairs import ZmqPairs
from ringreduce.vocabulary.types import ReduceOp, dtype_code

_CALLS_KEPT = 256  # distinct calls remembered; a model has as many as it has buckets
# Fewer of those that hold a matrix of counts, which may be another one each time.
_ALL_TO_ALLS_KEPT = 32
_ALONE = whole(1)


class SharedMemoryCollectives(Collectives):
    """The collectives of one rank among `size` that share memory.

    `rank` is this one's index among them. `link` is connected with all; None when `size` is 1.
    `job` and the group and epoch of `membership`, of which they may be a part, are in every header.
    """

    def __init__(
        self,
        link: ShmLink | None,
        *,
        rank: int = 0,
        size: int = 1,
        membership: Membership = _ALONE,
        job: int = 0,
    ) -> None:
        self._link = link
        self.links = () if link is None else (link,)
        self.small = None if link is None else link.small
        self._rank, self._size, self._job = rank, size, job
        self._membership = membership
        self._call = lru_cache(_CALLS_KEPT)(self._make_call)
        self._all_to_all = lru_cache(_ALL_TO_ALLS_KEPT)(self._make_all_to_all)

    def all_reduce(
        self, flat: ndarray, op: ReduceOp, signature: int = 0, coding: Coding | None = None
    ) -> None:
        """Reduce `flat`, shape (n,), over all ranks, in place; here nothing is encoded."""
        said = Kind.ALL_REDUCE, flat.dtype, flat.size, signature, op
        self._run(Action.ALL_REDUCE, flat, None, op, said)

    def teach(self, array: ndarray, option: Any, op: ReduceOp, signature: int = 0) -> None:
        assert self.small is not None
        said = Kind.ALL_REDUCE, array.dtype, array.size, signature, op
        call = self._call(Action.ALL_REDUCE, array.dtype, None, op, said)
        self.small.teach(array, option, call.address, call)

    def reduce_scatter(self, flat: ndarray, op: ReduceOp, signature: int = 0) -> ndarray:
        bounds = chunk_bounds(flat.size, self._size)
        said = Kind.REDUCE_SCATTER, flat.dtype, flat.size, signature, op
        self.reduce_chunks(flat, bounds, op, said)
        return cut(flat, bounds)[self._rank]

    def reduce_chunks(self, flat: ndarray, bounds: Bounds, op: ReduceOp, said: Said) -> None:
        """Reduce ``flat[bounds[r]:bounds[r + 1]]`` on rank r; the rest of `flat` is unchanged."""
        self._run(Action.REDUCE_SCATTER, flat, bounds, op, said)

    def all_gather(self, kind: Kind, flat: ndarray, bounds: Bounds, signature: int = 0) -> None:
        self._run(Action.ALL_GATHER, flat, bounds, 0, (kind, flat.dtype, flat.size, signature, 0))

    def _run(
        self, action: Action, flat: ndarray, bounds: Bounds | None, op: int, said: Said
    ) -> None:
        if self._link is not None:
            self._link.run(self._call(action, flat.dtype, bounds, op, said), flat)

    def broadcast(self, kind: Kind, flat: ndarray, root: int, signature: int = 0) -> None:
        """Fill `flat` on every rank with that of `root`: an all-gather of one chunk, root's."""
        bounds = (0,) * (root + 1) + (flat.size,) * (self._size - root)
        self.all_gather(kind, flat, bounds, signature_of("root", root, signature))

    def all_to_all(
        self, kind: Kind, source: ndarray, target: ndarray, counts: ndarray, signature: int = 0
    ) -> None:
        # One copy of each element where a rank's `source` is registered memory, else two.
        if self._link is None:
            target[:] = source
            return
        call, sent, received = self._all_to_all(kind, source.dtype, counts.tobytes(), signature)
        assert (source.size, target.size) == (sent, received), "arrays must fit their counts"
        self._link.run(call, source, target)

    def pairs_with(self, group_rank: int) -> tuple[ZmqPairs | ShmPairs, int]:
        assert self._link is not None
        assert self._link.pairs is not None
        return self._link.pairs, group_rank

    def barrier(self) -> None:
        """Return once every rank has called it: an all-gather of nothing."""
        self.all_gather(Kind.BARRIER, _NOTHING, (0,) * (self._size + 1))

    def share(self, sizes: Sequence[int]) -> list[Shared] | None:
        if self._link is None:
            return None
        # The first rank has all of it in its heap: for each size the marks, then the memory.
        marks = self._size * MARK_BYTES
        ends = [*accumulate(_pages(part) for size in sizes for part in (marks, size))]
        own = self._link.empty(ends[-1]) if self._rank == 0 else None
        place = np.array([self._link.offset_of(own), ends[-1]])
        if own is not None:
            for start in (0, *ends[1:-1:2]):
                _marks(own, start, self._size).view(np.uint32)[:, 1] = 1
        self.broadcast(Kind.BROADCAST, place, 0)
        if place[0] < 0 or place[1] != ends[-1]:
            return None
        whole = self._link.view(0, int(place[0]), ends[-1]) if own is None else own
        return [
            Shared(whole[begin : begin + size], _marks(whole, start, self._size), self._rank)
            for start, begin, size in zip((0, *ends[1:-1:2]), ends[::2], sizes, strict=True)
        ]

    def empty(self, nbytes: int) -> ndarray | None:
        return None if self._link is None else self._link.empty(nbytes)

    # The calls are cached: a training loop repeats the same few.

    def _make_call(
        self, action: Action, dtype: np.dtype, bounds: Bounds | None, op: int, said: Said
    ) -> HostCall:
        header, code = self._header(*said), dtype_code(dtype)
        chunks = chunk_bounds(said[2], self._size) if bounds is None else bounds
        return HostCall(header, action, chunks, divisor=self._size, dtype=code, op=op)

    def _make_all_to_all(
        self, kind: Kind, dtype: np.dtype, matrix: bytes, signature: int
    ) -> tuple[HostCall, int, int]:
        """The call, and the elements that this rank sends and receives."""
        counts = np.frombuffer(matrix, np.int64).reshape(self._size, self._size)
        header = self._header(kind, dtype, int(counts.sum()), signature)
        call = HostCall(header, Action.ALL_TO_ALL, counts)
        rank = self._rank
        return call, int(counts[rank].sum()), int(counts[:, rank].sum())


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _marks(memory: ndarray, start: int, ranks: int) -> ndarray:
    return memory[start : start + ranks * MARK_BYTES].reshape(ranks, MARK_BYTES)


_NOTHING = np.empty(0, np.uint8)
