"""Progress of a call over ZeroMQ, for other threads: what is done, and which channel is silent."""

from __future__ import annotations

import time
from typing import NamedTuple

from ringreduce.pure.liveness import Flow
from ringreduce.pure.messages import Wait
from ringreduce.transport.connections import Connections
from ringreduce.transport.records import LinkRecord
from ringreduce.vocabulary.config import TIMES


class _Dry(NamedTuple):
    """A channel on which a frame is due; `arrived` counts its bytes, unchanged since `since_s`."""

    channel: int
    arrived: int
    since_s: float
    looked_s: float


class FlowMeter:
    """Measures the calls of one link that their loop does not complete at the first attempt."""

    def __init__(self, connections: Connections, record: LinkRecord) -> None:
        self._connections, self._record = connections, record
        self._dry: _Dry | None = None
        self._steps, self._segments = 0, 1

    def begin(self, steps: int, segments: int) -> None:
        """A call of `steps` steps, with at most `segments` segments in each, waits."""
        self._steps, self._segments = steps, segments

    def end(self) -> None:
        """The call has ended."""
        self._dry = None

    def note(self, *, is_waiting: bool) -> None:
        """Note whether bytes have arrived on the channel used last, if the loop waits there."""
        now = time.monotonic()
        channel, arrived = self._record.channel, None
        if is_waiting:
            self._connections.incoming[channel].read_events()
            arrived = self._connections.arrived_bytes(channel)
        if arrived is None:
            # Unknown counts as progress: a link that is merely slow must not look dead.
            self._dry = None
        elif (
            self._dry is None
            or (channel, arrived) != self._dry[:2]
            or now - self._dry.looked_s > TIMES.looked_s  # stood still itself
        ):
            self._dry = _Dry(channel, arrived, now, now)
        else:
            self._dry = self._dry._replace(looked_s=now)

    def flow(self) -> Flow:
        """Progress of the present call; from any thread."""
        steps = self._record.step + self._record.segment / self._segments
        return Flow(
            done=min(1.0, steps / max(1, self._steps)),
            sent=tuple(
                (pushing.peer, channel, self._connections.records[channel].sent)
                for channel, pushing in enumerate(self._connections.outgoing)
            ),
            waits=self._waits(),
            sending=self._connections.sending(),
        )

    def _waits(self) -> Wait | None:
        dry, now = self._dry, time.monotonic()
        # A thread that waits for the GIL, not for a frame, has not checked for long, and frames may
        # have arrived meanwhile.
        if (
            dry is None
            or now - dry.looked_s > TIMES.looked_s
            or dry.arrived != self._connections.arrived_bytes(dry.channel)
        ):
            return None
        taken = self._connections.records[dry.channel].taken
        sender = self._connections.behind(dry.channel)[0]
        return Wait(sender, dry.channel, taken, now - dry.since_s)
