"""The calls that a collective hands to a transport, and what every transport promises."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ringreduce.pure.liveness import Flow
from ringreduce.pure.schedule import FORWARD, Exchange, Schedule, segment_count
from ringreduce.pure.wire import Header, Kind, encode
from ringreduce.transport.records import (
    EXCHANGE_STEP,
    PASS_STEP,
    ExchangeRecord,
    PassRecord,
    words_of,
)
from ringreduce.vocabulary.errors import RingReduceError

__all__ = ["ExchangeCall", "Link", "Reach", "RingCall", "Traffic"]


class RingCall:
    """One kind of pass around the ring, reused: making one costs as much as sending a kilobyte.

    Attributes:
        header: what agrees on all ranks, except the sequence number.
        record: the parameters of the compiled loop, at `address`.
        outgoing, incoming: uint64 of shape (8,), views of the record: the headers this rank sends
            and expects. The loop fills in step, segment and length for each frame.

    Args:
        bounds: where the chunks begin, in elements, and where the last ends.
        itemsize: bytes of one element, as the kernels count them.
        combine: address of the kernel that reduces an arriving segment into this rank's.
        finish: address of the kernel applied to each finished segment; 0 for none.
        divisor: the one element that `finish` divides by.
    """

    def __init__(
        self,
        header: Header,
        schedule: Schedule,
        bounds: Sequence[int],
        *,
        size: int,
        itemsize: int,
        combine: int = 0,
        finish: int = 0,
        divisor: np.ndarray | None = None,
    ) -> None:
        self.header, self.schedule, self.sequence = header, schedule, 0
        chunks = [(itemsize * bounds[c], itemsize * bounds[c + 1]) for c in schedule.chunks]
        self._steps = np.array(
            [(*chunk, action) for chunk, action in zip(chunks, schedule.actions, strict=True)],
            PASS_STEP,
        )
        self._divisor = np.zeros(1) if divisor is None else divisor
        self._longest = itemsize * max(
            (end - start for start, end in itertools.pairwise(bounds)), default=0
        )
        first = schedule.first
        self.record = PassRecord(
            steps=self._steps.ctypes.data,
            step_count=len(schedule.chunks),
            first_start=-1 if first < 0 else itemsize * bounds[first],
            first_end=-1 if first < 0 else itemsize * bounds[first + 1],
            offset=schedule.offset,
            itemsize=itemsize,
            combine=combine,
            finish=finish,
            divisor=self._divisor.ctypes.data,
        )
        self.address = ctypes.addressof(self.record)
        self.outgoing = words_of(self.record.outgoing)
        self.incoming = words_of(self.record.incoming)
        self.outgoing[:] = encode(header)
        self.incoming[:] = encode(replace(header, rank=(header.rank - 1) % size))

    @property
    def operation(self) -> str:
        """Name of the collective, for an error message."""
        return Kind(self.header.kind).label

    @property
    def steps(self) -> int:
        """Number of chunks this rank receives."""
        return len(self._steps)

    def segments(self, segment_bytes: int) -> int:
        """Number of frames of the longest chunk, at least 1."""
        return segment_count(self._longest, segment_bytes)

    def number(self, sequence: int) -> None:
        """Write the call's `sequence` number into all headers."""
        self.sequence = self.record.outgoing[3] = self.record.incoming[3] = sequence

    def expected(self, step: int) -> np.ndarray:
        """The header due in `step`; the loop has filled in segment and length."""
        return self.incoming

    def describe_step(self, step: int) -> str:
        """Name of `step`, for an error message."""
        return self.schedule.describe_step(step)

    def sends_to(self, step: int, started: int) -> tuple[int, ...]:
        """Distances to the ranks that still need a frame from this one, in or after `step`."""
        return (1,) if any(action & FORWARD for action in self.schedule.actions[step:]) else ()


class ExchangeCall:
    """One kind of exchange of rows, made once and reused; attributes as in `RingCall`."""

    def __init__(self, header: Header, plan: Exchange, row_bytes: int, *, size: int) -> None:
        self.header, self.plan, self.sequence = header, plan, 0
        self._steps = np.zeros(len(plan.distances), EXCHANGE_STEP)
        self._steps["distance"], self._steps["count"] = plan.distances, plan.counts
        for step, distance in enumerate(plan.distances):
            ours = replace(header, step=step, nbytes=plan.counts[step] * row_bytes)
            self._steps["outgoing"][step] = encode(ours)
            theirs = replace(ours, rank=(header.rank - distance) % size)
            self._steps["incoming"][step] = encode(theirs)
        self._sequences = self._steps["outgoing"][:, 3], self._steps["incoming"][:, 3]
        self._record = ExchangeRecord(self._steps.ctypes.data, len(self._steps), row_bytes)
        self.address = ctypes.addressof(self._record)

    @property
    def operation(self) -> str:
        """Name of the collective, for an error message."""
        return Kind(self.header.kind).label

    @property
    def steps(self) -> int:
        """Number of frames this rank receives."""
        return len(self._steps)

    def segments(self, segment_bytes: int) -> int:
        """Number of frames of a step: one."""
        return 1

    def number(self, sequence: int) -> None:
        """Write the call's `sequence` number into all headers."""
        outgoing, incoming = self._sequences
        self.sequence = sequence
        outgoing[:] = incoming[:] = sequence

    def expected(self, step: int) -> np.ndarray:
        """The header due in `step`."""
        header: np.ndarray = self._steps["incoming"][step]
        return header

    def describe_step(self, step: int) -> str:
        """Name of `step`, for an error message."""
        return self.plan.describe_step(step)

    def sends_to(self, step: int, started: int) -> tuple[int, ...]:
        """Distances to the ranks that still need a frame from this one; `started` are sent."""
        return self.plan.distances[started:]


@dataclass(frozen=True)
class Traffic:
    """Payload that has crossed a link since it was opened, without headers."""

    frames_received: int
    bytes_sent: int
    bytes_received: int


class Reach(Protocol):
    """A way to communicate with other ranks, over any medium."""

    def abort(self, cause: RingReduceError) -> None:
        """Notify the next ranks why this one gives up; at most about a second. Never raises."""

    def interrupt(self, cause: RingReduceError | None = None) -> None:
        """Make a call in another thread raise soon: `cause`, or that this rank closed."""

    def close(self, goodbye: bytes = b"") -> None:
        """Say `goodbye`, from `pure.notification.encode_goodbye`, and free sockets and threads.

        Takes at most about a second. Never raises.
        """

    def traffic(self) -> Traffic:
        """What has crossed the link so far."""

    def flow(self) -> Flow:
        """Progress of the present call; from any thread."""


class Link(Reach, Protocol):
    """The one-way channels of a rank: to the next ranks and from the previous ones."""

    def run(self, call: RingCall, buffer: np.ndarray, sequence: int) -> None:
        """Run `call` on `buffer`, contiguous; the caller owns it again afterwards.

        Raises:
            PeerTimeoutError: a neighbour made no progress within the time limit.
            PeerLostError: a neighbour's connection ended, or another rank reported that.
            MismatchError: the previous rank sent a frame of another call.
            ProtocolError: what arrived is not a frame of this ring.

        After any exception the link is broken: `abort`, then `close`.
        """

    def exchange(self, call: ExchangeCall, rows: np.ndarray, sequence: int) -> None:
        """Run `call` on `rows`, uint8 of shape (size, row_bytes), contiguous, row 0 filled.

        Afterwards row j is row 0 of the rank j positions before this one. Raises as `run` does.
        """
