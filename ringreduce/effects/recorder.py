"""The flight recorder: reads the last calls of a session and its present state from its events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringreduce.effects.events import Events
from ringreduce.pure.flight import NAME_MAX, Call, cut
from ringreduce.pure.liveness import Standing
from ringreduce.pure.membership import Membership
from ringreduce.pure.messages import Pending
from ringreduce.pure.spans import CALLS_KEPT


@dataclass(frozen=True)
class FirstError:
    """What broke a communicator first, here or on another rank, and this rank's call then.

    `when_s` is on `time.monotonic`.
    """

    error: BaseException
    standing: Standing
    when_s: float


class Recorder:
    """What the events of one communicator say.

    Attributes:
        events: which it reads.
        membership: who is in the communicator.
        transport: how they reach each other, once that is known.
        first_error: None while the communicator works.
        peers: set once there is a watcher: returns what was last known of each rank, a dictionary
            with ``rank`` and, where known, ``calls``, ``operation`` (None: in user code),
            ``since_s`` (seconds it had been there), ``pending`` (the send or recv that it waited
            in) and ``age_s`` (age of that in seconds).
        pending: set with `peers`: returns the send or recv that this rank waits in; None for none.
    """

    def __init__(self, rank: int, size: int, events: Events, membership: Membership) -> None:
        self.rank, self.size = rank, size
        self.membership, self.transport = membership, "none"
        self.first_error: FirstError | None = None
        self.peers: Callable[[], list[dict[str, Any]]] | None = None
        self.pending: Callable[[], Pending | None] | None = None
        self.events = events

    @property
    def calls(self) -> int:
        """Collectives completed so far."""
        return self.events.standing().calls

    @property
    def seconds(self) -> float:
        """Wall time spent in completed collectives."""
        return self.events.standing().seconds

    @property
    def elapsed_s(self) -> float:
        """Wall time of the last completed one."""
        return self.events.standing().elapsed_s

    def fail(self, error: BaseException) -> None:
        """Record that the running collective failed, or that the ring broke between two calls.

        The first error is kept as `first_error`; later ones are consequences.
        """
        if self.first_error is None:
            self.first_error = FirstError(error, self.standing(), time.monotonic())
        self.events.fail(error)

    def standing(self) -> Standing:
        """This rank's present call; from any thread, takes no lock, never raises."""
        now = self.events.standing()
        return Standing(now.calls, now.operation, now.nbytes, now.since_s)

    def entries(self) -> list[Call]:
        """The last calls, oldest first, the running one included; callable from any thread."""
        running, ended = self.events.calls()
        # All times agree with the present wall clock, even if that was set meanwhile.
        wall = time.time() - time.monotonic()
        entries = [
            self._call(
                span.number,
                span.operation,
                span.nbytes,
                span.thread,
                wall + span.began_s,
                span.ended_s - span.began_s,
            )
            for span in ended
        ]
        # A call that ends now has its span first.
        is_seen = bool(ended) and ended[-1].number == running.number
        if running.operation is not None and not is_seen:
            entries.append(
                self._call(
                    running.number,
                    running.operation,
                    running.nbytes,
                    running.thread,
                    wall + running.since_s,
                    None,
                )
            )
        return entries[-CALLS_KEPT:]

    def _call(
        self,
        number: int,
        operation: str,
        nbytes: int,
        thread: int,
        started: float,
        seconds: float | None,
    ) -> Call:
        error = self.events.error(number)
        return Call(
            number=number,
            operation=operation,
            nbytes=nbytes,
            started=started,
            seconds=seconds,
            thread=cut(self.events.thread_name(thread), NAME_MAX),
            error=None if error is None else cut(error),
        )
