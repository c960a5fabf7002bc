"""A connection on which a frame is due and nothing comes, as other threads see it."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from ringreduce.pure.watcher_messages import Overdue
from ringreduce.vocabulary.config import TIMES


class Source(Protocol):
    """The receiving end of a connection."""

    @property
    def peer(self) -> int:
        """The rank that sends."""

    @property
    def number(self) -> int:
        """Of the channel."""

    @property
    def taken(self) -> int:
        """Frames received in all."""

    def arrived_bytes(self) -> int | None:
        """Bytes that have come in all; None where the system does not count them."""


class _Seen(NamedTuple):
    arrived: int
    since_s: float
    looked_s: float


class Silence:
    """For how long no byte has come from `source` while a thread waits for a frame of it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._seen: _Seen | None = None

    def look(self) -> None:
        """Note what has arrived; at each check of the thread that waits."""
        now, seen, arrived = time.monotonic(), self._seen, self._source.arrived_bytes()
        if arrived is None:
            # Unknown counts as progress: a link that is merely slow must not look dead.
            self._seen = None
        elif (
            seen is None
            or arrived != seen.arrived
            or now - seen.looked_s > TIMES.looked_s  # stood still itself
        ):
            self._seen = _Seen(arrived, now, now)
        else:
            self._seen = seen._replace(looked_s=now)

    def end(self) -> None:
        """No frame is due any more."""
        self._seen = None

    def overdue(self) -> Overdue | None:
        """What other ranks may know of it; from any thread."""
        seen, now, source = self._seen, time.monotonic(), self._source
        # A thread that waits for the GIL, not for a frame, has not checked for long, and frames may
        # have arrived meanwhile.
        if (
            seen is None
            or now - seen.looked_s > TIMES.looked_s
            or seen.arrived != source.arrived_bytes()
        ):
            return None
        return Overdue(source.peer, source.number, source.taken, now - seen.since_s)
