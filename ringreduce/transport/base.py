"""What a collective hands to a transport, and what every transport promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ringreduce.errors import RingReduceError
from ringreduce.schedule import Schedule
from ringreduce.wire import Header, Kind, encode

__all__ = ["Link", "RingCall", "Traffic"]


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


@dataclass(frozen=True)
class Traffic:
    """Payload that has crossed a link since it was opened, headers not counted."""

    frames_received: int
    bytes_sent: int
    bytes_received: int


class Link(Protocol):
    """Both one-way channels of a rank: to the next rank and from the previous one."""

    def run(self, call: RingCall, buffer: np.ndarray, sequence: int) -> None:
        """Run `call` on `buffer`, contiguous, which is the caller's own again afterwards.

        Raises:
            PeerTimeoutError: a neighbour made no progress within the time limit.
            PeerLostError: a neighbour's connection ended, or another rank reported that.
            MismatchError: the previous rank sent a frame of another call.
            ProtocolError: what arrived is not a frame of this ring.

        After any exception the link is broken: `abort`, then `close`.
        """

    def abort(self, cause: RingReduceError) -> None:
        """Tell the next rank why this one gives up; at most about a second. Never raises."""

    def close(self) -> None:
        """Say goodbye and free sockets and threads; at most about a second. Never raises."""

    def traffic(self) -> Traffic:
        """What has crossed the link so far."""
