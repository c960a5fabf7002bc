"""The calls that a collective hands to a link over sockets."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ringreduce.pure.schedule import FORWARD, Exchange, Schedule
from ringreduce.pure.wire import Header, encode
from ringreduce.transport import loop
from ringreduce.transport.records import EXCHANGE_STEP, PASS_STEP, ExchangeRecord, PassRecord


class Reduction(NamedTuple):
    """How to reduce elements: the last arguments of `pure.kernels.reduce_rows`."""

    combine: int  # address of the kernel that reduces an arriving segment into this rank's
    finish: int  # address of the kernel applied to each finished segment; 0 for none
    divisor: np.ndarray  # uint8, the bytes of the one element that `finish` divides by


NO_REDUCTION = Reduction(0, 0, np.zeros(1, np.uint8))


class _LinkCall:
    """One kind of call, reused: making one costs as much as sending a kilobyte.

    `header` is what agrees on all ranks, except the sequence number. `loop` is the compiled one for
    it; at `address` is the record with its parameters. `steps` counts the chunks, or frames of an
    exchange, received.
    """

    loop: Callable[[int, int, int], int]
    address: int

    def __init__(self, header: Header, schedule: Schedule | Exchange, steps: np.ndarray) -> None:
        self.header, self.schedule, self.sequence = header, schedule, 0
        self._steps, self.steps = steps, len(steps)


class RingCall(_LinkCall):
    """A pass around the ring, of chunks between `bounds` in elements of `itemsize` bytes."""

    def __init__(
        self,
        header: Header,
        schedule: Schedule,
        bounds: Sequence[int],
        *,
        size: int,
        itemsize: int,
        reduction: Reduction = NO_REDUCTION,
    ) -> None:
        chunks = [(itemsize * bounds[c], itemsize * bounds[c + 1]) for c in schedule.chunks]
        steps = [(*chunk, action) for chunk, action in zip(chunks, schedule.actions, strict=True)]
        super().__init__(header, schedule, np.array(steps, PASS_STEP))
        self.loop = loop.run
        self._actions, self._reduction = schedule.actions, reduction
        first = schedule.first
        self._record = PassRecord(
            steps=self._steps.ctypes.data,
            step_count=self.steps,
            first_start=-1 if first < 0 else itemsize * bounds[first],
            first_end=-1 if first < 0 else itemsize * bounds[first + 1],
            offset=schedule.offset,
            itemsize=itemsize,
            combine=reduction.combine,
            finish=reduction.finish,
            divisor=reduction.divisor.ctypes.data,
            # The loop fills in step, segment and length for each frame.
            outgoing=tuple(encode(header).tolist()),
            incoming=tuple(encode(replace(header, rank=(header.rank - 1) % size)).tolist()),
        )
        self.address = ctypes.addressof(self._record)

    def number(self, sequence: int) -> None:
        self.sequence = self._record.outgoing[3] = self._record.incoming[3] = sequence

    def expected(self, step: int) -> Any:
        """The 8 words of the header due in `step`; the loop has filled in segment and length."""
        return self._record.incoming

    def sends_to(self, step: int, started: int) -> tuple[int, ...]:
        """Distances to the ranks that still need a frame from this one, in or after `step`."""
        return (1,) if any(action & FORWARD for action in self._actions[step:]) else ()


class ExchangeCall(_LinkCall):
    """An exchange of rows, uint8 of shape (size, row_bytes), contiguous, row 0 filled.

    Afterwards row j is row 0 of the rank j positions before this one.
    """

    def __init__(self, header: Header, plan: Exchange, row_bytes: int, *, size: int) -> None:
        super().__init__(header, plan, np.zeros(len(plan.distances), EXCHANGE_STEP))
        self.loop = loop.exchange
        self._distances = plan.distances
        self._steps["distance"], self._steps["count"] = plan.distances, plan.counts
        for step, distance in enumerate(plan.distances):
            ours = replace(header, step=step, nbytes=plan.counts[step] * row_bytes)
            self._steps["outgoing"][step] = encode(ours)
            due = replace(ours, rank=(header.rank - distance) % size)
            self._steps["incoming"][step] = encode(due)
        self._sequences = self._steps["outgoing"][:, 3], self._steps["incoming"][:, 3]
        self._record = ExchangeRecord(self._steps.ctypes.data, self.steps, row_bytes)
        self.address = ctypes.addressof(self._record)

    def number(self, sequence: int) -> None:
        outgoing, incoming = self._sequences
        self.sequence = sequence
        outgoing[:] = incoming[:] = sequence

    def expected(self, step: int) -> Any:
        return self._steps["incoming"][step]

    def sends_to(self, step: int, started: int) -> tuple[int, ...]:
        """Distances to the ranks that still need a frame from this one; `started` are sent."""
        return self._distances[started:]


Call = RingCall | ExchangeCall


class Traffic(NamedTuple):
    """Payload that has crossed a link since it was opened, without headers."""

    frames_received: int
    bytes_sent: int
    bytes_received: int
