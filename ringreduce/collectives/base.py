"""The interface of all implementations of the collectives."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy import ndarray

from ringreduce.pure.encodings import Coding
from ringreduce.pure.liveness import Flow
from ringreduce.pure.membership import Membership
from ringreduce.pure.payload import bounds_of, cut
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.pure.wire import Header, Kind
from ringreduce.transport.link_calls import Traffic
from ringreduce.transport.shm import ShmLink
from ringreduce.transport.shm_pairs import ShmPairs
from ringreduce.transport.small_calls import SmallCalls
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.transport.zmq_pairs import ZmqPairs
from ringreduce.vocabulary.types import ReduceOp, dtype_code

Bounds = tuple[int, ...]  # where chunks of an array begin, and where the last one ends
# Kind and dtype of the caller's call, elements, signature, operator or 0: what ranks compare.
Said = tuple[Kind, np.dtype, int, int, int]


class Shared(NamedTuple):
    """Memory of a host's ranks, of which this is number `rank`, with what `Area` needs for it."""

    array: ndarray
    marks: ndarray
    rank: int


class Collectives(Protocol):
    """The collectives of one rank, on arrays that the caller has checked.

    Arrays are one-dimensional, contiguous, and equal on all ranks where they must be. Every rank
    makes the same calls in the same order. After any exception the object is broken: `abort`, then
    `close`. `signature` is 64 bits that must agree on all ranks, besides kind, dtype, length and
    op.

    Attributes:
        links: what they communicate over, within the host first; none in a world of one.
        pairs: what single ranks communicate over; None in a world of one, and where this is a part
            of other collectives.
        small: all-reduces wholly in C, by array and operator; None where there are none.
    """

    links: tuple[ShmLink | ZmqLink, ...]
    pairs: ZmqPairs | None = None
    small: SmallCalls | None = None
    _rank: int
    _size: int  # of the ranks among which these are
    _job: int
    _membership: Membership

    def all_reduce(
        self, flat: ndarray, op: ReduceOp, signature: int = 0, coding: Coding | None = None
    ) -> None:
        """Reduce `flat`, shape (n,), over all ranks, in place.

        With `coding` it is float32, and encoded where it travels between hosts.
        """

    def teach(self, array: ndarray, option: Any, op: ReduceOp, signature: int = 0) -> None:
        """Have `small` all-reduce arrays like this one when called with `option`.

        That means `op` and `signature`. Not while a call runs.
        """
        return  # No such calls here.

    def reduce_scatter(self, flat: ndarray, op: ReduceOp, signature: int = 0) -> ndarray:
        """Reduce `flat`, shape (n,); return the view of it that holds this rank's chunk."""

    def shares(self, count: int, itemsize: int) -> list[tuple[int, int]]:
        """Where the share of each rank of an array of `count` elements begins and ends.

        That is what `reduce_shares` leaves with it. Some may be empty; together they are all.
        """
        return list(pairwise(chunk_bounds(count, self._membership.size)))

    @property
    def share_count(self) -> int:
        """Shares are equal where this divides the number of elements."""
        return self._membership.size

    def reduce_shares(self, flat: ndarray, op: ReduceOp, signature: int = 0) -> None:
        """Reduce each rank's share of `flat`, shape (n,), in place, to what `all_reduce` gives."""
        self.reduce_scatter(flat, op, signature)

    def gather_shares(self, flat: ndarray, signature: int = 0) -> None:
        """Fill `flat` with all ranks' shares of it."""
        self.all_gather(Kind.ALL_GATHER, flat, chunk_bounds(flat.size, self._size), signature)

    def share(self, sizes: Sequence[int]) -> list[Shared] | None:
        """Return zeros of these `sizes` in bytes, the same memory on all ranks of a host.

        None: there are none. Collective.
        """
        return None

    def all_gather(self, kind: Kind, flat: ndarray, bounds: Bounds, signature: int = 0) -> None:
        """Fill `flat` with every rank's chunk; ``flat[bounds[r]:bounds[r + 1]]`` is rank r's."""

    def broadcast(self, kind: Kind, flat: ndarray, root: int, signature: int = 0) -> None:
        """Fill `flat` on every rank with that of `root`."""

    def all_to_all(
        self, kind: Kind, source: ndarray, target: ndarray, counts: ndarray, signature: int = 0
    ) -> None:
        """Send a part of `source` to each rank, and fill `target` with the parts that it is sent.

        `counts`, shape (size, size), dtype int64, C-contiguous, is equal on all ranks: rank i sends
        ``counts[i, j]`` elements to rank j. Parts lie end to end, in rank order, in `source` and in
        `target`, which do not overlap. `kind` is the caller's: also gather and scatter are this.
        """

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def empty(self, nbytes: int) -> ndarray | None:
        """Registered memory, dtype uint8, that is reduced without a copy; None for none."""
        return None

    def abort(self) -> None:
        """Give up: nothing is sent any more from memory that the caller may overwrite now.

        The watcher tells the other ranks why. Never raises.
        """
        for way in self._ways():
            way.abort()

    def close(self) -> None:
        """Free everything, after about a second at most, in which what was sent is written.

        Never raises.
        """
        for way in reversed(self._ways()):
            way.close()

    def traffic(self) -> Traffic:
        counts = [Traffic(0, 0, 0), *(way.traffic() for way in self._ways())]
        return Traffic(*map(sum, zip(*counts, strict=True)))

    def pairs_with(self, group_rank: int) -> tuple[ZmqPairs | ShmPairs, int]:
        """The pairs that send to `group_rank` and receive from it, and its place there."""
        assert self.pairs is not None
        return self.pairs, group_rank

    def _header(
        self, kind: Kind, dtype: np.dtype, count: int, signature: int, op: int = 0
    ) -> Header:
        """The header of this rank's frames; each call fills in the sequence number."""
        return Header(
            kind=kind,
            job=self._job,
            group=self._membership.group,
            epoch=self._membership.epoch,
            rank=self._rank,
            dtype=dtype_code(dtype),
            op=op,
            count=count,
            signature=signature,
        )

    def _ways(self) -> tuple[ShmLink | ZmqLink | ZmqPairs, ...]:
        return self.links if self.pairs is None else (*self.links, self.pairs)

    def flow(self) -> Flow:
        """All connections over sockets; from any thread."""
        link = self.links[-1] if self.links else None
        flow = link.flow() if isinstance(link, ZmqLink) else Flow()
        if self.pairs is None:
            return flow
        pairs = self.pairs.flow()
        return flow._replace(sent=flow.sent + pairs.sent, overdue=flow.overdue + pairs.overdue)


def parts_of(
    rank: int, counts: ndarray, source: ndarray, target: ndarray
) -> tuple[list[ndarray], list[ndarray]]:
    """Cut the parts that group rank `rank` sends in an all-to-all, and those that it receives."""
    sent, received = bounds_of(counts[rank].tolist()), bounds_of(counts[:, rank].tolist())
    return cut(source, sent), cut(target, received)
