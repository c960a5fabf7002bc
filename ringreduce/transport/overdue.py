"""A connection on which a frame is due and nothing comes, as other threads see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ringreduce.vocabulary.config import TIMES


class _Seen(NamedTuple):
    arrived: int
    since_s: float
    looked_s: float


class Silence:
    """For how long no byte has come on a connection while a thread waits for a frame of it.

    `arrived_bytes` returns how many have come in all; None where the system does not count them.
    """

    def __init__(self, arrived_bytes: Callable[[], int | None]) -> None:
        self._arrived_bytes = arrived_bytes
        self._seen: _Seen | None = None

    def look(self) -> None:
        """Note what has arrived; at each check of the thread that waits."""
        now, seen, arrived = time.monotonic(), self._seen, self._arrived_bytes()
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

    def dry_s(self) -> float | None:
        """For how long; None: no frame is due. From any thread."""
        seen, now = self._seen, time.monotonic()
        # A thread that waits for the GIL, not for a frame, has not checked for long, and frames may
        # have arrived meanwhile.
        if (
            seen is None
            or now - seen.looked_s > TIMES.looked_s
            or seen.arrived != self._arrived_bytes()
        ):
            return None
        return now - seen.since_s
