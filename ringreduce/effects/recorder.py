"""The flight recorder: reads the last calls of a session and its present state from its events."""

import time
from collections.abc import Callable
from typing import NamedTuple

from ringreduce.effects.events import Events
from ringreduce.effects.stacks import thread_names
from ringreduce.pure.flight import CallRecord, cut
from ringreduce.pure.membership import Membership
from ringreduce.pure.spans import Present
from ringreduce.pure.watcher_messages import Pending


class FirstError(NamedTuple):
    """The error that broke a communicator first, here or elsewhere, and this rank's call then."""

    error: BaseException
    call: Present
    when_s: float  # on `time.monotonic`


class Recorder:
    """Reads the present session of a communicator from its events."""

    def __init__(self, rank: int, size: int, events: Events, membership: Membership) -> None:
        self.rank, self.size = rank, size
        self.membership, self.transport = membership, "none"
        self.first_error: FirstError | None = None  # None while the communicator works
        # Set before the ring forms: returns the send or recv that this rank waits in, if any.
        self.pending: Callable[[], Pending | None] = lambda: None
        self.events = events  # calls of former sessions do not count
        before = events.current_call()
        self._calls_before, self._first = before.calls, before.number

    def fail(self, error: BaseException) -> None:
        """Record what has failed the running collective, or broken the ring between two."""
        if self.first_error is None:
            self.first_error = FirstError(error, self.current_call(), time.monotonic())
        self.events.fail(error)

    def current_call(self) -> Present:
        """This rank's present call; from any thread, takes no lock, never raises."""
        now = self.events.current_call()
        return now._replace(calls=now.calls - self._calls_before)

    def entries(self) -> list[CallRecord]:
        """The last calls, oldest first, the running one included; callable from any thread."""
        error, names = self.events.error, thread_names()
        # Turns times into seconds since the epoch: all agree, also if the clock was set meanwhile.
        wall = time.time() - time.monotonic()
        return [
            CallRecord(
                number=span.number - self._first,
                operation=span.operation,
                nbytes=span.nbytes,
                started=wall + span.began_s,
                seconds=None if span.ended_s is None else span.ended_s - span.began_s,
                thread=names(span.thread),
                error=None if (text := error(span.number)) is None else cut(text),
            )
            for span in self.events.calls()
            if span.number >= self._first
        ]
