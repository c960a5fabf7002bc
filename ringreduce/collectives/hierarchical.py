"""The collectives of several hosts with several ranks each: shared memory, ring, shared memory.

An all-reduce cuts the buffer into one slice for each lane:

    host A: rank 0, rank 1           host B: rank 2, rank 3
    1. each host reduces; its rank of lane l holds slice l of the host's sum
    2. ring of lane 0: slices 0 of ranks 0 and 2; ring of lane 1: slices 1 of ranks 1 and 3
    3. each host gathers its slices

Each byte crosses between hosts as often as with one rank per host, in several flows at once.

16-bit floats are widened to float32 first. Between hosts they travel in 16 bits: so a host's sum is
rounded once more.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy import ndarray

from ringreduce.collectives.base import Bounds, Collectives, Said, Shared, parts_of
from ringreduce.collectives.ring import Ring
from ringreduce.collectives.shared_memory import SharedMemoryCollectives
from ringreduce.pure import kernels
from ringreduce.pure.encodings import Coding, Half
from ringreduce.pure.membership import Membership
from ringreduce.pure.payload import bounds_of, cut
from ringreduce.pure.placement import Placement
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.transport.shm_pairs import ShmPairs
from ringreduce.transport.zmq_pairs import ZmqPairs
from ringreduce.vocabulary.types import ReduceOp, dtype_code, is_half

BLOCK = 1 << 22  # elements of a 16-bit buffer that are widened at a time
SLICE_BYTES_MIN = 16384  # a smaller buffer uses one lane: more would only add messages


class HierarchicalCollectives(Collectives):
    """The collectives of one rank of a job on several hosts.

    `host` has the ranks of this host. `ring` is this rank's lane, whose mean is over the whole job;
    None when it has none. `job` and the group and epoch of `membership` are in every header.
    """

    def __init__(
        self,
        host: SharedMemoryCollectives,
        ring: Ring | None,
        placement: Placement,
        rank: int,
        *,
        membership: Membership,
        job: int,
    ) -> None:
        self._host, self._ring = host, ring
        self.links = host.links + (() if ring is None else ring.links)
        self._hosts = placement.hosts
        self._lanes = placement.lanes
        self._here = placement.host_of(rank)
        self._members = self._hosts[self._here]
        self._host_rank = self._members.index(rank)
        self._rank, self._size = rank, sum(len(host) for host in self._hosts)
        self._membership, self._job = membership, job
        self._exchanges = 0  # number of all-to-alls so far

    def all_reduce(
        self,
        flat: ndarray,
        op: ReduceOp,
        signature: int = 0,
        coding: Coding | None = None,
        kind: Kind = Kind.ALL_REDUCE,
    ) -> None:
        """Reduce `flat`, shape (n,), over all ranks, in place; `kind` is the caller's call."""
        if not is_half(dtype_code(flat.dtype)):
            self._all_reduce(flat, (kind, flat.dtype, flat.size, signature, op), coding)
            return
        for start in range(0, max(1, flat.size), BLOCK):
            block = flat[start : start + BLOCK]
            wide = kernels.widened(block)
            said = kind, flat.dtype, wide.size, signature, op
            self._all_reduce(wide, said, Coding(Half(flat.dtype.name)))
            kernels.narrow(wide, block)

    def _all_reduce(self, flat: ndarray, said: Said, coding: Coding | None) -> None:
        kind, called, _, signature, op = *said[:4], ReduceOp(said[4])
        slices = self._slices(flat)
        # Divided once, in the ring: a mean of the hosts' means would be another number.
        local = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self._host.reduce_chunks(flat, slices, local, said)
        mine = slice(slices[self._host_rank], slices[self._host_rank + 1])
        coding = None if coding is None else coding.of(mine)
        if (own_slice := self._own_slice(flat, slices)) is not None:
            assert self._ring is not None
            self._ring.all_reduce(own_slice, op, signature, coding, (kind, called))
        self._host.all_gather(kind, flat, slices, signature)

    def reduce_scatter(self, flat: ndarray, op: ReduceOp, signature: int = 0) -> ndarray:
        # As an all-reduce: chunks of one host's ranks need not be adjacent, so that sending less
        # between hosts would require sorting them first.
        self.all_reduce(flat, op, signature, kind=Kind.REDUCE_SCATTER)
        return cut(flat, chunk_bounds(flat.size, self._size))[self._rank]

    # A rank's share is its host's chunk of its lane's slice: both calls together take no more bytes
    # between hosts than an all-reduce.

    def shares(self, count: int, itemsize: int) -> list[tuple[int, int]]:
        shares = [(0, 0)] * self._size
        lanes = 1 if self._is_small(count * itemsize) else self._lanes
        for lane, (begin, end) in enumerate(pairwise(chunk_bounds(count, lanes))):
            chunks = pairwise(chunk_bounds(end - begin, len(self._hosts)))
            for host, (first, last) in zip(self._hosts, chunks, strict=True):
                shares[host[lane]] = begin + first, begin + last
        return shares

    @property
    def share_count(self) -> int:
        return math.lcm(self._size, self._lanes * len(self._hosts))

    def reduce_shares(self, flat: ndarray, op: ReduceOp, signature: int = 0) -> None:
        kind, slices = Kind.REDUCE_SCATTER, self._slices(flat)
        local = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self._host.reduce_chunks(flat, slices, local, (kind, flat.dtype, flat.size, signature, op))
        if (own_slice := self._own_slice(flat, slices)) is not None:
            assert self._ring is not None
            self._ring.reduce_scatter(own_slice, op, signature)

    def gather_shares(self, flat: ndarray, signature: int = 0) -> None:
        slices = self._slices(flat)
        if (own_slice := self._own_slice(flat, slices)) is not None:
            assert self._ring is not None
            self._ring.gather_shares(own_slice, signature)
        self._host.all_gather(Kind.ALL_GATHER, flat, slices, signature)

    def share(self, sizes: Sequence[int]) -> list[Shared] | None:
        return self._host.share(sizes)

    def _own_slice(self, flat: ndarray, slices: Bounds) -> ndarray | None:
        """The slice of `flat` that this rank's lane carries; None for nothing."""
        carried = cut(flat, slices)[self._host_rank]
        is_empty = self._ring is None or (not carried.size and self._host_rank > 0)
        return None if is_empty else carried

    def all_gather(self, kind: Kind, flat: ndarray, bounds: Bounds, signature: int = 0) -> None:
        # Chunks travel sorted by host, since the ranks of one host need not be consecutive.
        chunks = cut(flat, bounds)
        within = [bounds_of([chunks[rank].size for rank in host]) for host in self._hosts]
        # 1. This host's block: its ranks' chunks, end to end.
        block = np.empty(within[self._here][-1], flat.dtype)
        cut(block, within[self._here])[self._host_rank][:] = chunks[self._rank]
        self._host.all_gather(kind, block, within[self._here], signature)
        # 2. Lane l carries slice l of every host's block.
        slices = [chunk_bounds(ends[-1], self._lanes) for ends in within]
        lanes = [bounds_of(lengths) for lengths in np.diff(slices).T.tolist()]
        starts = bounds_of([lane[-1] for lane in lanes])
        travelling = np.empty(starts[-1], flat.dtype)
        parts = [cut(part, ends) for part, ends in zip(cut(travelling, starts), lanes, strict=True)]
        if self._ring is not None:
            lane = self._host_rank
            parts[lane][self._here][:] = cut(block, slices[self._here])[lane]
            part = cut(travelling, starts)[lane]
            self._ring.all_gather(kind, part, lanes[lane], signature)
        # 3. Give the lanes' parts to all ranks here, and put the chunks in rank order.
        self._host.all_gather(kind, travelling, self._padded(starts), signature)
        for host, ends, *pieces in zip(self._hosts, within, *parts, strict=True):
            joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            for rank, chunk in zip(host, cut(joined, ends), strict=True):
                chunks[rank][:] = chunk

    def broadcast(self, kind: Kind, flat: ndarray, root: int, signature: int = 0) -> None:
        source = next(index for index, host in enumerate(self._hosts) if root in host)
        # Any rank of the source's host may be the root, so ranks compare it too.
        agreed = signature_of("root", root, signature)
        if self._here == source:
            self._host.broadcast(kind, flat, self._members.index(root), signature)
        slices = self._slices(flat)
        if self._ring is not None:
            own_slice = cut(flat, slices)[self._host_rank]
            self._ring.broadcast(kind, own_slice, source, agreed)
        if self._here != source:
            self._host.all_gather(kind, flat, slices, agreed)

    def all_to_all(
        self, kind: Kind, source: ndarray, target: ndarray, counts: ndarray, signature: int = 0
    ) -> None:
        """Send each rank its part of `source`: in shared memory, or over the pairs."""
        members = self._members
        sent, received = parts_of(self._rank, counts, source, target)
        here = np.concatenate([sent[group_rank] for group_rank in members])
        bounds = bounds_of([received[group_rank].size for group_rank in members])
        arrived = np.empty(bounds[-1], target.dtype)
        within = np.ascontiguousarray(counts[np.ix_(members, members)])
        self._host.all_to_all(kind, here, arrived, within, signature)
        for group_rank, part in zip(members, cut(arrived, bounds), strict=True):
            received[group_rank][:] = part
            sent[group_rank] = received[group_rank] = source[:0]
        header = self._header(kind, source.dtype, 0, signature)
        self._exchanges += 1
        assert self.pairs is not None

        def compare() -> None:
            if self._ring is not None and self._host_rank == 0:
                self._ring.compare((kind, source.dtype, 0, signature, 0))

        self.pairs.exchange(header, self._exchanges - 1, sent, received, compare)

    def pairs_with(self, group_rank: int) -> tuple[ZmqPairs | ShmPairs, int]:
        if group_rank in self._members:
            return self._host.pairs_with(self._members.index(group_rank))
        return super().pairs_with(group_rank)

    def barrier(self) -> None:
        self._host.barrier()
        if self._ring is not None and self._host_rank == 0:
            self._ring.barrier()
        self._host.barrier()

    def empty(self, nbytes: int) -> ndarray | None:
        return self._host.empty(nbytes)

    def _slices(self, flat: ndarray) -> Bounds:
        """Where the lanes' slices of `flat` begin; one chunk for each rank of this host."""
        lanes = 1 if self._is_small(flat.nbytes) else self._lanes
        return self._padded(chunk_bounds(flat.size, lanes))

    def _is_small(self, nbytes: int) -> bool:
        return nbytes < SLICE_BYTES_MIN * self._lanes

    def _padded(self, bounds: Bounds) -> Bounds:
        """`bounds` of the first ranks here, with empty chunks for the others."""
        return bounds + (bounds[-1],) * (len(self._members) + 1 - len(bounds))
