"""A thread that runs work in the order in which it was given, beside the collectives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ringreduce.engine.engine import Work
from ringreduce.vocabulary.errors import ClosedError

_Result = TypeVar("_Result")


class Executor:
    """The thread, named `name`; it ends in `close`. From any thread.

    Attributes:
        dropped: number of calls that had not ended when it was closed, and never will.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished, self._is_closed = 0, False
        self.dropped = 0
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], _Result]) -> Work[_Result]:
        """Have the thread call `run`, after all work submitted before.

        Raises:
            ClosedError: `close` was called.
        """
        work = Work(run)
        with self._changed:
            if self._is_closed:
                raise ClosedError("called a send or recv after close()")
            self._unfinished += 1
            self._queue.put(work)
        return work

    def drain(self) -> None:
        """Return once all work is done; at once in the thread itself."""
        if threading.current_thread() is not self._thread:
            with self._changed:
                self._changed.wait_for(lambda: not self._unfinished)

    def close(self) -> None:
        """End the thread once the work that runs has ended; work not begun fails."""
        with self._changed:
            self._is_closed = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._is_closed:
                work.fail(ClosedError("was closed before this call had begun"))
            else:
                work.do()
            self.dropped += self._is_closed and work.has_failed
            del work
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()
