"""Signals to the launcher wait in a queue, in the order in which they came."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_QUEUED = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def queued_signals() -> Iterator[deque[int]]:
    """Within this context, which must be in the main thread, the signals that have arrived."""
    queue: deque[int] = deque()
    before = {
        number: signal.signal(number, lambda number, frame: queue.append(number))
        for number in _QUEUED
    }
    try:
        yield queue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
