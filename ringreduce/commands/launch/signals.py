"""Signals to the launcher wait in a queue, in the order in which they came."""

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_QUEUED = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def queued_signals() -> Iterator[deque[int]]:
    """Within this context, the signals that have arrived: none in a thread other than main."""
    queue: deque[int] = deque()
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.signal(number, lambda number, frame: queue.append(number))
        for number in (_QUEUED if is_main else ())
    }
    try:
        yield queue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
