"""What a collective hands to a transport, and what every transport promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ringreduce.pure.schedule import FORWARD, Exchange, Schedule
from ringreduce.pure.wire import Header, Kind, encode
from ringreduce.vocabulary.errors import RingReduceError

__all__ = ["ExchangeCall", "Flow", "Link", "RingCall", "Traffic"]


@dataclass(frozen=True, eq=False)
class RingCall:
    """One kind of pass around the ring, made once and run for every call like it.

    Making one costs as much as sending a kilobyte, and a training loop makes the same few
    calls for ever: `ringreduce.collectives` keeps them.

    Attributes:
        header: what agrees on all ranks, but for the sequence number.
        schedule: this rank's steps.
        bounds: byte offset of each chunk in the buffer, and the end of the last.
        itemsize: bytes of one element, as the kernels count them.
        combine: address of the kernel that reduces an arriving segment into ours.
        finish: address of the kernel applied to each finished segment; 0 for none.
        divisor: uint8, the bytes of the one element that `finish` divides by.
        outgoing, incoming: uint64 of shape (8,), the headers this rank sends and expects;
            the transport fills in sequence, step, segment and length for each frame.
        bounds_array, chunks_array, actions_array: int64, the same as tuples above.
    """

    header: Header
    schedule: Schedule
    bounds: tuple[int, ...]
    itemsize: int
    combine: int
    finish: int
    divisor: np.ndarray
    outgoing: np.ndarray
    incoming: np.ndarray
    bounds_array: np.ndarray
    chunks_array: np.ndarray
    actions_array: np.ndarray

    @classmethod
    def make(
        cls,
        header: Header,
        schedule: Schedule,
        bounds: tuple[int, ...],
        *,
        size: int,
        itemsize: int,
        combine: int = 0,
        finish: int = 0,
        divisor: np.ndarray | None = None,
    ) -> RingCall:
        """A call of rank `header.rank` in a ring of `size`; `bounds` are in elements."""
        byte_bounds = tuple(itemsize * bound for bound in bounds)
        return cls(
            header=header,
            schedule=schedule,
            bounds=byte_bounds,
            itemsize=itemsize,
            combine=combine,
            finish=finish,
            divisor=(np.zeros(1) if divisor is None else divisor).view(np.uint8),
            outgoing=encode(header),
            incoming=encode(replace(header, rank=(header.rank - 1) % size)),
            bounds_array=np.array(byte_bounds, np.int64),
            chunks_array=np.array(schedule.chunks, np.int64),
            actions_array=np.array(schedule.actions, np.int64),
        )

    @property
    def operation(self) -> str:
        """Name of the collective for an error message."""
        return Kind(self.header.kind).label

    @property
    def steps(self) -> int:
        """How many chunks this rank receives."""
        return len(self.schedule.chunks)

    def segments(self, segment_bytes: int) -> int:
        """How many frames the longest chunk takes, at least 1."""
        longest = int(np.diff(self.bounds_array).max(initial=0))
        return max(1, -(-longest // segment_bytes))

    def number(self, sequence: int) -> None:
        """Make this the call `sequence` of the ring, in all headers."""
        self.outgoing[3] = self.incoming[3] = sequence

    def expected(self, step: int) -> np.ndarray:
        """The header due in `step`, with segment and length where the loop stands."""
        return self.incoming

    def describe_step(self, step: int) -> str:
        """Name of `step` for an error message."""
        return self.schedule.describe_step(step)

    def sends_to(self, step: int, started: int) -> tuple[int, ...]:
        """Distances to the ranks that still wait for a frame of ours, in or after `step`."""
        return (1,) if any(action & FORWARD for action in self.schedule.actions[step:]) else ()


@dataclass(frozen=True, eq=False)
class ExchangeCall:
    """One kind of exchange of rows, made once and run for every call like it.

    Attributes:
        header: what agrees on all ranks, but for the sequence number.
        plan: the steps.
        row_bytes: length of a row.
        outgoing, incoming: uint64 of shape (steps, 8), the headers this rank sends and
            expects, complete but for the sequence number.
        distances_array, counts_array: int64, those of the plan.
    """

    header: Header
    plan: Exchange
    row_bytes: int
    outgoing: np.ndarray
    incoming: np.ndarray
    distances_array: np.ndarray
    counts_array: np.ndarray

    @classmethod
    def make(cls, header: Header, plan: Exchange, row_bytes: int, *, size: int) -> ExchangeCall:
        """A call of rank `header.rank` in a ring of `size`."""
        steps = range(len(plan.distances))
        frames = [
            replace(header, step=step, nbytes=plan.counts[step] * row_bytes) for step in steps
        ]
        sources = [(header.rank - distance) % size for distance in plan.distances]
        return cls(
            header=header,
            plan=plan,
            row_bytes=row_bytes,
            outgoing=np.array([encode(frames[step]) for step in steps]),
            incoming=np.array([encode(replace(frames[s], rank=sources[s])) for s in steps]),
            distances_array=np.array(plan.distances, np.int64),
            counts_array=np.array(plan.counts, np.int64),
        )

    @property
    def operation(self) -> str:
        """Name of the collective for an error message."""
        return Kind(self.header.kind).label

    @property
    def steps(self) -> int:
        """How many frames this rank receives."""
        return len(self.plan.distances)

    def segments(self, segment_bytes: int) -> int:
        """How many frames a step takes: one."""
        return 1

    def number(self, sequence: int) -> None:
        """Make this the call `sequence` of the ring, in all headers."""
        self.outgoing[:, 3] = self.incoming[:, 3] = sequence

    def expected(self, step: int) -> np.ndarray:
        """The header due in `step`."""
        header: np.ndarray = self.incoming[step]
        return header

    def describe_step(self, step: int) -> str:
        """Name of `step` for an error message."""
        return self.plan.describe_step(step)

    def sends_to(self, step: int, started: int) -> tuple[int, ...]:
        """Distances to the ranks that still wait for a frame of ours, `started` being sent."""
        return self.plan.distances[started:]


@dataclass(frozen=True)
class Traffic:
    """Payload that has crossed a link since it was opened, headers not counted."""

    frames_received: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class Flow:
    """Where a link stands, as any thread may ask while a call runs; for the watcher.

    Attributes:
        done: the part of its present pass that is done, 0 to 1.
        sent: of each outgoing connection: receiver, channel, and frames sent, ever.
        waits: of the connection on which a frame is due and has not come for a while: sender,
            channel, frames received, ever, and for how many seconds not one byte has come.
    """

    done: float = 0.0
    sent: tuple[tuple[int, int, int], ...] = ()
    waits: tuple[int, int, int, float] | None = None


class Link(Protocol):
    """The one-way channels of a rank: to the next ranks and from the previous ones."""

    def run(self, call: RingCall, buffer: np.ndarray, sequence: int) -> None:
        """Run `call` on `buffer`, contiguous, which is the caller's own again afterwards.

        Raises:
            PeerTimeoutError: a neighbour made no progress within the time limit.
            PeerLostError: a neighbour's connection ended, or another rank reported that.
            MismatchError: the previous rank sent a frame of another call.
            ProtocolError: what arrived is not a frame of this ring.

        After any exception the link is broken: `abort`, then `close`.
        """

    def exchange(self, call: ExchangeCall, rows: np.ndarray, sequence: int) -> None:
        """Run `call` on `rows`, uint8 of shape (size, row_bytes), contiguous, row 0 filled.

        Afterwards row j is what the rank j places before this one has put in its row 0.

        Raises:
            As `run`.
        """

    def abort(self, cause: RingReduceError) -> None:
        """Tell the next ranks why this one gives up; at most about a second. Never raises."""

    def interrupt(self, cause: RingReduceError | None = None) -> None:
        """Have a call that runs in another thread raise soon: `cause`, or that this rank closed."""

    def close(self, word: bytes = b"") -> None:
        """Say goodbye and free sockets and threads; at most about a second. Never raises.

        Args:
            word: what the others read of it (`ringreduce.transport.news.write_goodbye`).
        """

    def traffic(self) -> Traffic:
        """What has crossed the link so far."""

    def flow(self) -> Flow:
        """Where it stands; from any thread."""
