"""The collectives as passes around a ring: a schedule, a link and kernels put together.

Arguments are taken as checked (`ringreduce.communicator` does that): one-dimensional,
contiguous, equal on all ranks where they must be. Every method is one or a few passes
around the ring; each pass has the next sequence number.

16-bit floats are summed in float32: the reduce-scatter runs on a float32 copy and only its
finished chunk is rounded, once, before the all-gather. Rounding at every hop instead would
halve the bytes of the reduce-scatter and lose the small addends of a large ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringreduce import kernels, schedule
from ringreduce.errors import RingReduceError
from ringreduce.transport.base import Link, RingCall, Traffic
from ringreduce.types import ReduceOp, dtype_code, is_half
from ringreduce.wire import Header, Kind, signature_of

__all__ = ["Ring"]

# Elements of a half-precision buffer that are widened at a time: a 16 MiB copy stays a small
# part of memory and is long enough to fill the pipeline.
_HALF_BLOCK = 1 << 22
# An all-reduce up to this size exchanges whole buffers: latency rules there, and that has half
# the steps. The limit is that of payloads which travel in one message (transport/loop.py).
_SMALL_BYTES_MAX = 16384
# Distinct calls remembered; a model has as many as it has buckets.
_CALLS_KEPT = 256


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Memory and call of a small all-reduce of one kind; the ring's own, used again each time.

    `rows` holds every rank's buffer, shape (size, n); `flat` and `bytes` are views of it;
    `wide` is its float32 copy for 16-bit floats. In `call` only the reduction is not the
    all-gather's: it is applied afterwards.
    """

    call: RingCall
    rows: np.ndarray
    flat: np.ndarray
    bytes: np.ndarray
    wide: np.ndarray | None


class Ring:
    """The collectives of one rank over one link, numbered from 0.

    Args:
        link: both neighbours; None when `size` is 1, where nothing needs to travel.
        rank, size: place in the ring.
        job, epoch: which ring this is; part of every header.
        mean_over: what a mean divides by, where this ring is part of a larger whole; by
            default `size`.
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
        self._rank, self._size = rank, size
        self._mean_over = size if mean_over is None else mean_over
        self._job, self._epoch = job, epoch
        self._sequence = 0
        self._reducing = lru_cache(_CALLS_KEPT)(self._make_reducing)
        self._exchanging = lru_cache(_CALLS_KEPT)(self._make_exchanging)
        self._gathering = lru_cache(_CALLS_KEPT)(self._make_gathering)
        self._broadcasting = lru_cache(_CALLS_KEPT)(self._make_broadcasting)

    @property
    def sequence(self) -> int:
        """Number of the next pass around the ring."""
        return self._sequence

    def all_reduce(self, flat: np.ndarray, op: ReduceOp, signature: int = 0) -> None:
        """Reduce `flat`, shape (n,), over all ranks, in place."""
        if flat.nbytes <= _SMALL_BYTES_MAX:
            self._all_reduce_small(flat, op, signature)
            return
        if not is_half(dtype_code(flat.dtype)):
            self._reduce(Kind.ALL_REDUCE, flat, flat.dtype, op, signature)
            return
        for start in range(0, flat.size, _HALF_BLOCK):
            self._all_reduce_half(flat[start : start + _HALF_BLOCK], op, signature)

    def _all_reduce_small(self, flat: np.ndarray, op: ReduceOp, signature: int) -> None:
        """Pass the whole buffers round and let every rank reduce them all, in rank order.

        Half the steps of the ring at size / 2 times its bytes: what counts here is the steps.
        """
        if self._size == 1:
            self._sequence += 1
            return
        exchange = self._exchanging(flat.dtype, flat.size, op, signature)
        exchange.rows[self._rank] = flat
        self._run(exchange.call, exchange.flat)
        call = exchange.call
        rows, target = exchange.bytes, flat.view(np.uint8)
        if exchange.wide is not None:
            kernels.widen(exchange.flat, exchange.wide.reshape(-1))
            rows = exchange.wide.view(np.uint8)
            target = rows[0]
        kernels.reduce_rows(rows, target, flat.size, call.combine, call.finish, call.divisor)
        if exchange.wide is not None:
            kernels.narrow(exchange.wide[0], flat)

    def _all_reduce_half(self, flat: np.ndarray, op: ReduceOp, signature: int) -> None:
        wide = np.empty(flat.size, np.float32)
        kernels.widen(flat, wide)
        self._reduce(Kind.REDUCE_SCATTER, wide, flat.dtype, op, signature)
        bounds = schedule.chunk_bounds(flat.size, self._size)
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        kernels.narrow(wide[own], flat[own])
        self.all_gather(Kind.ALL_REDUCE, flat, bounds, signature)

    def reduce_scatter(self, flat: np.ndarray, op: ReduceOp, signature: int = 0) -> np.ndarray:
        """Reduce `flat`, shape (n,); return the view of it that holds this rank's chunk."""
        bounds = schedule.chunk_bounds(flat.size, self._size)
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        if is_half(dtype_code(flat.dtype)):
            wide = np.empty(flat.size, np.float32)
            kernels.widen(flat, wide)
            self._reduce(Kind.REDUCE_SCATTER, wide, flat.dtype, op, signature)
            kernels.narrow(wide[own], flat[own])
        else:
            self._reduce(Kind.REDUCE_SCATTER, flat, flat.dtype, op, signature)
        return flat[own]

    def all_gather(
        self, kind: Kind, flat: np.ndarray, bounds: tuple[int, ...], signature: int = 0
    ) -> None:
        """Fill `flat` with every rank's chunk; ``flat[bounds[r]:bounds[r + 1]]`` is rank r's."""
        if self._size > 1:
            self._run(self._gathering(kind, flat.dtype, bounds, signature), flat)

    def broadcast(self, kind: Kind, flat: np.ndarray, root: int) -> None:
        """Fill `flat` on every rank with that of `root`."""
        if self._size > 1:
            self._run(self._broadcasting(kind, flat.dtype, flat.size, root), flat)

    def barrier(self) -> None:
        """Return once every rank has called it: an all-gather of nothing."""
        self.all_gather(Kind.BARRIER, _NOTHING, (0,) * (self._size + 1))

    def empty(self, nbytes: int) -> np.ndarray | None:
        """None: libzmq sends from any memory."""
        return None

    def abort(self, cause: RingReduceError) -> None:
        """Tell the next rank why this one gives up; it passes that on."""
        if self._link is not None:
            self._link.abort(cause)

    def close(self) -> None:
        """Close the link."""
        if self._link is not None:
            self._link.close()

    def traffic(self) -> Traffic:
        """What has crossed the link so far."""
        return Traffic(0, 0, 0) if self._link is None else self._link.traffic()

    def _reduce(
        self, kind: Kind, flat: np.ndarray, dtype: np.dtype, op: ReduceOp, signature: int
    ) -> None:
        """Reduce `flat`; `dtype` is the caller's, which differs where halves are widened."""
        if self._size > 1:
            call = self._reducing(kind, flat.dtype, dtype, flat.size, op, signature)
            self._run(call, flat)

    def _run(self, call: RingCall, flat: np.ndarray) -> None:
        assert self._link is not None
        # Taken before the first byte moves: a failed pass keeps its number.
        self._sequence += 1
        self._link.run(call, flat, self._sequence - 1)

    # The four below are made once for each kind of call and kept: a training loop makes the
    # same few for ever, and making one costs more than sending a kilobyte.

    def _make_reducing(
        self,
        kind: Kind,
        computed: np.dtype,
        called: np.dtype,
        count: int,
        op: ReduceOp,
        signature: int,
    ) -> RingCall:
        steps = schedule.all_reduce if kind is Kind.ALL_REDUCE else schedule.reduce_scatter
        mean = op is ReduceOp.MEAN
        return RingCall.make(
            self._header(kind, called, count, op=op, signature=signature),
            steps(self._rank, self._size),
            schedule.chunk_bounds(count, self._size),
            size=self._size,
            itemsize=computed.itemsize,
            combine=kernels.reduction(op, computed),
            finish=kernels.divide(computed) if mean else 0,
            divisor=np.array([self._mean_over], computed) if mean else None,
        )

    def _make_exchanging(
        self, dtype: np.dtype, count: int, op: ReduceOp, signature: int
    ) -> _Exchange:
        half = is_half(dtype_code(dtype))
        computed = np.dtype(np.float32) if half else dtype
        mean = op is ReduceOp.MEAN
        call = RingCall.make(
            self._header(Kind.ALL_REDUCE, dtype, count, op=op, signature=signature),
            schedule.all_gather(self._rank, self._size),
            tuple(count * rank for rank in range(self._size + 1)),
            size=self._size,
            itemsize=dtype.itemsize,
            combine=kernels.reduction(op, computed),
            finish=kernels.divide(computed) if mean else 0,
            divisor=np.array([self._mean_over], computed) if mean else None,
        )
        rows = np.empty((self._size, count), dtype)
        wide = np.empty(rows.shape, np.float32) if half else None
        return _Exchange(call, rows, rows.reshape(-1), rows.view(np.uint8), wide)

    def _make_gathering(
        self, kind: Kind, dtype: np.dtype, bounds: tuple[int, ...], signature: int
    ) -> RingCall:
        return RingCall.make(
            self._header(kind, dtype, bounds[-1], signature=signature),
            schedule.all_gather(self._rank, self._size),
            bounds,
            size=self._size,
            itemsize=dtype.itemsize,
        )

    def _make_broadcasting(self, kind: Kind, dtype: np.dtype, count: int, root: int) -> RingCall:
        return RingCall.make(
            self._header(kind, dtype, count, signature=signature_of("root", root)),
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
