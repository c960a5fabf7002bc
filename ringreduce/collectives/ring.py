"""The collectives as passes around a ring: a schedule, a link and kernels put together.

Small messages are exchanged instead: each rank gets all ranks' whole buffers in a few steps
(`schedule.exchange`) and reduces them itself, in rank order. Each pass and each exchange has the
next sequence number.

16-bit floats are summed in float32: the reduce-scatter runs on a float32 copy, and its finished
chunk is rounded once, before the all-gather. Rounding at every hop would halve the bytes of the
reduce-scatter, but lose the small addends of a large ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ringreduce.collectives.base import Collectives
from ringreduce.pure import kernels, schedule
from ringreduce.pure.wire import Header, Kind, signature_of
from ringreduce.transport.base import ExchangeCall, Link, RingCall
from ringreduce.transport.exchange import EXCHANGE_BYTES_MAX
from ringreduce.vocabulary.types import ReduceOp, dtype_code, is_half

__all__ = ["Ring"]

# Elements of a half-precision buffer that are widened at a time: a copy of 16 MiB takes little
# memory and is long enough to fill the pipeline.
_HALF_BLOCK = 1 << 22
# Rows up to this many bytes are exchanged: log2(size) steps instead of the ring's 2 (size - 1), and
# size / 2 times its bytes. With 3 and 4 ranks that is faster up to 256 KiB over loopback, and up to
# 16 KiB on a link of 1 Gbit/s. Between two ranks it moves the same bytes, so it is never slower on
# the link; beyond 256 KiB it gains little (docs/performance.md).
SMALL_BYTES_MAX = 1 << 14
SMALL_BYTES_MAX_OF_TWO = 1 << 18
# Distinct calls remembered; a model has as many as it has buckets. Exchanges own rows, so fewer of
# them are kept.
_CALLS_KEPT, _EXCHANGES_KEPT = 256, 64


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Memory and call of one kind of exchange; the ring owns and reuses it.

    Attributes:
        rows: shape (size, n), the buffers of all ranks; row j is from the rank j before this one.
        bytes: the same as uint8.
        wide: float32 copy of `rows` for 16-bit floats that are to be reduced.
        combine, finish, divisor: as in a `RingCall`.
    """

    call: ExchangeCall
    rows: np.ndarray
    bytes: np.ndarray
    wide: np.ndarray | None = None
    combine: int = 0
    finish: int = 0
    divisor: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint8))


class Ring(Collectives):
    """The collectives of one rank over one link, numbered from 0.

    `link` is None when `size` is 1. `rank` is this rank's index in the ring; `job` and `epoch` name
    the ring in every header. A mean divides by `mean_over`, if the ring is part of a larger whole.
    """

    def __init__(
        self,
        link: Link | None,
        *,
        rank: int,
        size: int,
        job: int = 0,
        epoch: int = 0,
        mean_over: int | None = None,
    ) -> None:
        self._link = link
        self.links = () if link is None else (link,)
        self._rank, self._size = rank, size
        self._mean_over = size if mean_over is None else mean_over
        self._job, self._epoch = job, epoch
        self.sequence = 0
        self._most_rows = max(schedule.exchange(size).counts, default=0)
        self._reducing = lru_cache(_CALLS_KEPT)(self._make_reducing)
        self._exchanging = lru_cache(_EXCHANGES_KEPT)(self._make_exchanging)
        self._gathering_small = lru_cache(_EXCHANGES_KEPT)(self._make_gathering_small)
        self._gathering = lru_cache(_CALLS_KEPT)(self._make_gathering)
        self._broadcasting = lru_cache(_CALLS_KEPT)(self._make_broadcasting)

    def all_reduce(
        self,
        flat: np.ndarray,
        op: ReduceOp,
        signature: int = 0,
        called: tuple[Kind, np.dtype] | None = None,
    ) -> None:
        """Reduce `flat`, shape (n,), over all ranks, in place.

        Ranks compare `called`, the caller's kind and dtype, if this is a part of another call.
        """
        named = (Kind.ALL_REDUCE, flat.dtype) if called is None else called
        if self._is_small(flat.nbytes):
            self._all_reduce_small(flat, op, signature, *named)
            return
        if not is_half(dtype_code(flat.dtype)):
            self._reduce(Kind.ALL_REDUCE, flat, named, op, signature)
            return
        for start in range(0, flat.size, _HALF_BLOCK):
            block = flat[start : start + _HALF_BLOCK]
            self.reduce_scatter(block, op, signature)
            bounds = schedule.chunk_bounds(block.size, self._size)
            self.all_gather(Kind.ALL_REDUCE, block, bounds, signature)

    def _all_reduce_small(
        self, flat: np.ndarray, op: ReduceOp, signature: int, kind: Kind, called: np.dtype
    ) -> None:
        """Give every rank all ranks' buffers and let it reduce them, in rank order."""
        if self._size == 1:
            self.sequence += 1
            return
        own = self._exchanging(kind, flat.dtype, called, flat.size, op, signature)
        own.rows[0] = flat
        self._exchange(own)
        rows, target = own.bytes, flat.view(np.uint8)
        if own.wide is not None:
            kernels.widen(own.rows.reshape(-1), own.wide.reshape(-1))
            rows = own.wide.view(np.uint8)
            target = rows[self._rank]
        kernels.reduce_rows(
            *(rows, self._rank, target, flat.size, own.combine, own.finish, own.divisor)
        )
        if own.wide is not None:
            kernels.narrow(own.wide[self._rank], flat)

    def reduce_scatter(self, flat: np.ndarray, op: ReduceOp, signature: int = 0) -> np.ndarray:
        """Reduce `flat`, shape (n,); return the view of it that holds this rank's chunk."""
        bounds = schedule.chunk_bounds(flat.size, self._size)
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        half, wide = is_half(dtype_code(flat.dtype)), flat
        if half:
            wide = np.empty(flat.size, np.float32)
            kernels.widen(flat, wide)
        self._reduce(Kind.REDUCE_SCATTER, wide, (Kind.REDUCE_SCATTER, flat.dtype), op, signature)
        if half:
            kernels.narrow(wide[own], flat[own])
        return flat[own]

    def all_gather(
        self, kind: Kind, flat: np.ndarray, bounds: tuple[int, ...], signature: int = 0
    ) -> None:
        """Fill `flat` with every rank's chunk; ``flat[bounds[r]:bounds[r + 1]]`` is rank r's."""
        if self._size == 1:
            return
        count = bounds[1]
        if self._is_small(count * flat.itemsize) and bounds == _even_bounds(count, self._size):
            own = self._gathering_small(kind, flat.dtype, count, signature)
            own.rows[0] = flat[count * self._rank : count * (self._rank + 1)]
            self._exchange(own)
            # Row j is from the rank j positions before this one.
            order = (self._rank - np.arange(self._size)) % self._size
            flat.reshape(self._size, count)[order] = own.rows
            return
        self._run(self._gathering(kind, flat.dtype, bounds, signature), flat)

    def broadcast(self, kind: Kind, flat: np.ndarray, root: int, signature: int = 0) -> None:
        """Fill `flat` on every rank with that of `root`."""
        if self._size > 1:
            self._run(self._broadcasting(kind, flat.dtype, flat.size, root, signature), flat)

    def barrier(self) -> None:
        """Return once every rank has called it: an exchange of nothing."""
        if self._size > 1:
            self._exchange(self._gathering_small(Kind.BARRIER, _NOTHING.dtype, 0, 0))

    def _reduce(
        self,
        kind: Kind,
        flat: np.ndarray,
        called: tuple[Kind, np.dtype],
        op: ReduceOp,
        signature: int,
    ) -> None:
        """Run the `kind` of reduction; ranks compare `called`."""
        if self._size > 1:
            call = self._reducing(kind, flat.dtype, *called, flat.size, op, signature)
            self._run(call, flat)

    def _run(self, call: RingCall, flat: np.ndarray) -> None:
        assert self._link is not None
        # Counted before the first byte is sent: a failed pass keeps its number.
        self.sequence += 1
        self._link.run(call, flat, self.sequence - 1)

    def _exchange(self, own: _Exchange) -> None:
        assert self._link is not None
        self.sequence += 1
        self._link.exchange(own.call, own.bytes, self.sequence - 1)

    def _is_small(self, nbytes: int) -> bool:
        """Whether rows of this length are exchanged; equal on all ranks."""
        limit = SMALL_BYTES_MAX_OF_TWO if self._size == 2 else SMALL_BYTES_MAX
        return nbytes <= limit and nbytes * self._most_rows <= EXCHANGE_BYTES_MAX

    # The calls below are cached: a training loop repeats the same few.

    def _make_reducing(
        self,
        kind: Kind,
        computed: np.dtype,
        called_kind: Kind,
        called: np.dtype,
        count: int,
        op: ReduceOp,
        signature: int,
    ) -> RingCall:
        steps = schedule.all_reduce if kind is Kind.ALL_REDUCE else schedule.reduce_scatter
        mean = op is ReduceOp.MEAN
        return RingCall(
            self._header(called_kind, called, count, op=op, signature=signature),
            steps(self._rank, self._size),
            schedule.chunk_bounds(count, self._size),
            size=self._size,
            itemsize=computed.itemsize,
            combine=kernels.reduction(op, computed),
            finish=kernels.divide(computed) if mean else 0,
            divisor=np.array([self._mean_over], computed) if mean else None,
        )

    def _make_exchanging(
        self,
        kind: Kind,
        dtype: np.dtype,
        called: np.dtype,
        count: int,
        op: ReduceOp,
        signature: int,
    ) -> _Exchange:
        half = is_half(dtype_code(dtype))
        computed = np.dtype(np.float32) if half else dtype
        mean = op is ReduceOp.MEAN
        header = self._header(kind, called, count, op=op, signature=signature)
        plain = self._rows(header, dtype, count)
        return replace(
            plain,
            wide=np.empty(plain.rows.shape, np.float32) if half else None,
            combine=kernels.reduction(op, computed),
            finish=kernels.divide(computed) if mean else 0,
            divisor=np.array([self._mean_over if mean else 0], computed).view(np.uint8),
        )

    def _make_gathering_small(
        self, kind: Kind, dtype: np.dtype, count: int, signature: int
    ) -> _Exchange:
        header = self._header(kind, dtype, count * self._size, signature=signature)
        return self._rows(header, dtype, count)

    def _rows(self, header: Header, dtype: np.dtype, count: int) -> _Exchange:
        """An exchange of rows of `count` elements."""
        plan = schedule.exchange(self._size)
        call = ExchangeCall(header, plan, count * dtype.itemsize, size=self._size)
        rows = np.empty((self._size, count), dtype)
        return _Exchange(call, rows, rows.view(np.uint8))

    def _make_gathering(
        self, kind: Kind, dtype: np.dtype, bounds: tuple[int, ...], signature: int
    ) -> RingCall:
        return RingCall(
            self._header(kind, dtype, bounds[-1], signature=signature),
            schedule.all_gather(self._rank, self._size),
            bounds,
            size=self._size,
            itemsize=dtype.itemsize,
        )

    def _make_broadcasting(
        self, kind: Kind, dtype: np.dtype, count: int, root: int, signature: int
    ) -> RingCall:
        return RingCall(
            self._header(kind, dtype, count, signature=signature_of("root", root, signature)),
            schedule.broadcast(self._rank, self._size, root),
            (0, count),
            size=self._size,
            itemsize=dtype.itemsize,
        )

    def _header(
        self, kind: Kind, dtype: np.dtype, count: int, *, op: int = 0, signature: int = 0
    ) -> Header:
        return Header(
            kind=kind,
            job=self._job,
            rank=self._rank,
            sequence=0,
            epoch=self._epoch,
            dtype=dtype_code(dtype),
            op=op,
            count=count,
            signature=signature,
        )


_NOTHING = np.empty(0, np.uint8)


def _even_bounds(count: int, size: int) -> tuple[int, ...]:
    """Bounds of `size` chunks of `count` elements each."""
    return tuple(range(0, count * size + 1, count)) if count else (0,) * (size + 1)
