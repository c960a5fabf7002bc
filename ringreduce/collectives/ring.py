"""The collectives as passes around a ring: a schedule, a link and kernels put together.

Small messages are exchanged instead: each rank gets all ranks' whole buffers in a few steps
(`schedule.exchange`) and reduces them itself, in rank order. Each pass and each exchange has the
next sequence number.

What travels encoded, 16-bit floats among it, does not go round (`ringreduce.collectives.encoded`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from ringreduce.collectives.base import Bounds, Collectives, Said, parts_of
from ringreduce.collectives.encoded import EncodedReduction
from ringreduce.pure import kernels, schedule
from ringreduce.pure.encodings import Coding, Half
from ringreduce.pure.membership import Membership
from ringreduce.pure.payload import cut
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.transport.link_calls import NO_REDUCTION, ExchangeCall, Reduction, RingCall
from ringreduce.transport.loop import EXCHANGE_BYTES_MAX
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.transport.zmq_pairs import ZmqPairs
from ringreduce.vocabulary.types import ReduceOp, dtype_code, is_half

# Rows up to this many bytes are exchanged: log2(size) steps instead of the ring's 2 (size - 1), and
# size / 2 times its bytes. With 3 and 4 ranks that is faster up to 256 KiB over loopback, and up to
# 16 KiB on a link of 1 Gbit/s. Between two ranks it moves the same bytes, so it is never slower on
# the link; beyond 256 KiB it gains little (docs/performance.md).
SMALL_BYTES_MAX = 1 << 14
SMALL_BYTES_MAX_OF_TWO = 1 << 18
# Distinct calls remembered; a model has as many as it has buckets. Exchanges own rows, so fewer of
# them are kept.
_CALLS_KEPT, _EXCHANGES_KEPT = 256, 64


class _ExchangeMemory(NamedTuple):
    """Memory and call of one kind of exchange; the ring owns and reuses it."""

    call: ExchangeCall
    rows: ndarray  # (size, n): the buffers of all ranks, row j from the rank j before this one
    bytes: ndarray  # the same as uint8
    wide: ndarray | None  # float32 copy of `rows` for 16-bit floats that are to be reduced
    reduction: Reduction


class Ring(Collectives):
    """The collectives of one rank over one link, numbered from 0.

    `rank` is this rank's index among the two or more of the ring; `job` and the group and epoch of
    `membership`, of which the ring may be a part, are in every header. A mean is over all its
    members. `pairs` are of these, and the ring's ranks have the `places` among them.
    """

    def __init__(
        self,
        link: ZmqLink,
        *,
        rank: int,
        size: int,
        membership: Membership,
        pairs: ZmqPairs,
        places: Sequence[int],
        job: int = 0,
    ) -> None:
        self._link, self.links, self.pairs, self._places = link, (link,), pairs, places
        self._rank, self._size, self._job = rank, size, job
        self._membership = membership
        self._sequence = 0
        self._encoded = EncodedReduction(
            rank, size, self._exchange_parts, self.all_gather, self._reduction
        )
        self._most_rows = max(schedule.exchange(size).counts)
        self._reducing = lru_cache(_CALLS_KEPT)(self._make_reducing)
        self._moving = lru_cache(_CALLS_KEPT)(self._make_moving)
        self._exchanging = lru_cache(_EXCHANGES_KEPT)(self._make_exchanging)
        place = places[rank]
        self._parting = lru_cache(_CALLS_KEPT)(
            lambda *said: replace(self._header(*said), rank=place)
        )

    def all_reduce(
        self,
        flat: ndarray,
        op: ReduceOp,
        signature: int = 0,
        coding: Coding | None = None,
        called: tuple[Kind, np.dtype] | None = None,
    ) -> None:
        """Reduce `flat`, shape (n,), over all ranks, in place.

        Ranks compare `called`, the caller's kind and dtype, if this is a part of another call.
        """
        kind, dtype = (Kind.ALL_REDUCE, flat.dtype) if called is None else called
        said = kind, dtype, flat.size, signature, op
        is_exact = coding is None or flat.nbytes <= SMALL_BYTES_MAX
        if self._is_small(flat.nbytes) and is_exact:
            self._all_reduce_small(flat, said)
        elif coding is not None or is_half(dtype_code(flat.dtype)):
            self._encoded.all_reduce(flat, said, coding or Coding(Half(flat.dtype.name)))
        else:
            self._run(self._reducing(schedule.all_reduce, flat.dtype, said), flat)

    def _all_reduce_small(self, flat: ndarray, said: Said) -> None:
        """Give every rank all ranks' buffers and let it reduce them, in rank order."""
        memory = self._exchanging(flat.dtype, flat.size, said, reduces=True)
        memory.rows[0] = flat
        self._exchange(memory)
        rows, target = memory.bytes, flat.view(np.uint8)
        if memory.wide is not None:
            kernels.widen(memory.rows.reshape(-1), memory.wide.reshape(-1))
            rows = memory.wide.view(np.uint8)
            target = rows[self._rank]
        kernels.reduce_rows(rows, self._rank, target, flat.size, *memory.reduction)
        if memory.wide is not None:
            kernels.narrow(memory.wide[self._rank], flat)

    def reduce_scatter(self, flat: ndarray, op: ReduceOp, signature: int = 0) -> ndarray:
        if is_half(dtype_code(flat.dtype)):
            return self._encoded.reduce_scatter(flat, op, signature)
        said = Kind.REDUCE_SCATTER, flat.dtype, flat.size, signature, op
        if self._is_small(flat.nbytes):  # Added in the order of an all-reduce's.
            self._all_reduce_small(flat, said)
        else:
            self._run(self._reducing(schedule.reduce_scatter, flat.dtype, said), flat)
        return cut(flat, schedule.chunk_bounds(flat.size, self._size))[self._rank]

    def all_gather(self, kind: Kind, flat: ndarray, bounds: Bounds, signature: int = 0) -> None:
        count, said = bounds[1], (kind, flat.dtype, flat.size, signature, 0)
        is_even = all(bound == count * rank for rank, bound in enumerate(bounds))
        if is_even and self._is_small(count * flat.itemsize):
            memory = self._exchanging(flat.dtype, count, said)
            memory.rows[0] = flat[count * self._rank : count * (self._rank + 1)]
            self._exchange(memory)
            # Row j is from the rank j positions before this one.
            order = (self._rank - np.arange(self._size)) % self._size
            flat.reshape(self._size, count)[order] = memory.rows
            return
        self._run(self._moving(bounds, None, said), flat)

    def broadcast(self, kind: Kind, flat: ndarray, root: int, signature: int = 0) -> None:
        said = kind, flat.dtype, flat.size, signature_of("root", root, signature), 0
        self._run(self._moving((0, flat.size), root, said), flat)

    def all_to_all(
        self, kind: Kind, source: ndarray, target: ndarray, counts: ndarray, signature: int = 0
    ) -> None:
        rank, size, count = self._rank, self._size, int(counts[0, 0])
        if (
            source.nbytes <= SMALL_BYTES_MAX
            and self._is_small(source.nbytes)
            and (counts == count).all()
        ):
            # Fewer messages, though each rank gets the parts of all.
            said = kind, source.dtype, size * source.size, signature, 0
            memory = self._exchanging(source.dtype, source.size, said)
            memory.rows[0] = source
            self._exchange(memory)
            rows = memory.rows.reshape(size, size, count)
            target.reshape(size, count)[(rank - np.arange(size)) % size] = rows[:, rank]
            return
        sent, received = parts_of(rank, counts, source, target)
        received[rank][:] = sent[rank]
        self._exchange_parts((kind, source.dtype, 0, signature, 0), sent, received)

    def _exchange_parts(
        self, said: Said, sent: Sequence[ndarray], received: Sequence[ndarray]
    ) -> None:
        """Send each part in `sent` to its rank, and receive as many; see `ZmqPairs.exchange`."""
        # By places: those of other ranks than the ring's stay empty.
        to, of = ([_NOTHING] * self._membership.size for _ in range(2))
        for place, ahead, behind in zip(self._places, sent, received, strict=True):
            to[place], of[place] = ahead, behind
        self._sequence += 1
        compare = partial(self.compare, said)
        assert self.pairs is not None
        self.pairs.exchange(self._parting(*said), self._sequence - 1, to, of, compare)

    def compare(self, said: Said) -> None:
        """Return once every rank has made the same call: an exchange of nothing."""
        self._exchange(self._exchanging(_NOTHING.dtype, 0, said))

    def barrier(self) -> None:
        self.compare((Kind.BARRIER, _NOTHING.dtype, 0, 0, 0))

    def _run(self, call: RingCall, flat: ndarray) -> None:
        self._sequence += 1  # Counted before the first byte is sent: a failed pass keeps its number
        self._link.run(call, flat, self._sequence - 1)

    def _exchange(self, memory: _ExchangeMemory) -> None:
        self._sequence += 1
        self._link.run(memory.call, memory.bytes, self._sequence - 1)

    def _is_small(self, nbytes: int) -> bool:
        """Whether rows of this length are exchanged; equal on all ranks."""
        limit = SMALL_BYTES_MAX_OF_TWO if self._size == 2 else SMALL_BYTES_MAX
        return nbytes <= limit and nbytes * self._most_rows <= EXCHANGE_BYTES_MAX

    # The calls below are cached: a training loop repeats the same few.

    def _make_reducing(
        self, steps: Callable[[int, int], schedule.Schedule], computed: np.dtype, said: Said
    ) -> RingCall:
        return RingCall(
            self._header(*said),
            steps(self._rank, self._size),
            schedule.chunk_bounds(said[2], self._size),
            size=self._size,
            itemsize=computed.itemsize,
            reduction=self._reduction(ReduceOp(said[-1]), computed),
        )

    def _make_moving(self, bounds: Bounds, root: int | None, said: Said) -> RingCall:
        """The pass of a broadcast from `root`, or of an all-gather."""
        if root is None:
            steps = schedule.all_gather(self._rank, self._size)
        else:
            steps = schedule.broadcast(self._rank, self._size, root)
        header = self._header(*said)
        return RingCall(header, steps, bounds, size=self._size, itemsize=said[1].itemsize)

    def _make_exchanging(
        self, dtype: np.dtype, count: int, said: Said, reduces: bool = False
    ) -> _ExchangeMemory:
        """An exchange of rows of `count` elements, to be reduced or gathered."""
        rows = np.empty((self._size, count), dtype)
        wide, reduction = None, NO_REDUCTION
        if reduces:
            wide = np.empty(rows.shape, np.float32) if is_half(dtype_code(dtype)) else None
            reduction = self._reduction(ReduceOp(said[-1]), dtype if wide is None else wide.dtype)
        plan, row_bytes = schedule.exchange(self._size), count * dtype.itemsize
        call = ExchangeCall(self._header(*said), plan, row_bytes, size=self._size)
        return _ExchangeMemory(call, rows, rows.view(np.uint8), wide, reduction)

    def _reduction(self, op: ReduceOp, computed: np.dtype) -> Reduction:
        combine = kernels.reduction(op, computed)
        if op is not ReduceOp.MEAN:
            return NO_REDUCTION._replace(combine=combine)
        divisor = np.array([self._membership.size], computed).view(np.uint8)
        return Reduction(combine, kernels.divide(computed), divisor)


_NOTHING = np.empty(0, np.uint8)
