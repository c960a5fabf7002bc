"""What every link needs when a call is stuck: measure the wait, and build the error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ringreduce.effects.events import Events
from ringreduce.pure import wire
from ringreduce.pure.patience import Limit, Patience
from ringreduce.pure.spans import SpanKind
from ringreduce.pure.wire import Header
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import (
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    RingReduceError,
)


class Interruption:
    """Ends a call in another thread, when that thread next checks the clock."""

    def __init__(self) -> None:
        self.is_set = False
        self._cause: RingReduceError | None = None

    def set(self, cause: RingReduceError | None) -> None:
        """Make the call raise `cause`; None: that this rank closed."""
        self._cause = cause
        self.is_set = True

    def error(self, **where: Any) -> RingReduceError:
        """The error to raise; `where` has the fields of this call's errors."""
        return self._cause or PeerLostError(
            "closed its communicator in the middle of a collective", **where
        )


class Stall:
    """For how long a call has made no progress.

    Attributes:
        waited_s: that time, less what this thread did not see: the process was stopped, or another
            thread kept Python's lock, and progress may have been made meanwhile.
        lost: a peer that was lost meanwhile. Its last frames still count, so the call runs once
            more before it fails; progress clears this.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._progress: object = None
        self._looked_s = 0.0
        self._idle_s = self.waited_s = 0.0
        self.lost: int | None = None

    def look(self, progress: object) -> Limit | None:
        """Note `progress`, which changes while the call advances; return the limit reached."""
        now = time.monotonic()
        self._patience.look()
        passed_s = min(now - self._looked_s, TIMES.looked_s)
        self._looked_s = now
        if progress != self._progress:
            self._progress, self.lost = progress, None
            self._idle_s = self.waited_s = 0.0
        else:
            self.waited_s += passed_s
            self._idle_s = 0.0 if self._patience.is_busy else self._idle_s + passed_s
        return self._patience.reached(self.waited_s, self._idle_s)


class WaitSpans:
    """Records which ranks a link's calls wait for, and when, if for longer than one check.

    Attributes:
        events: where; None: nowhere.
    """

    def __init__(self, check_s: float) -> None:
        self.events: Events | None = None
        self._check_s = check_s
        self._progress: object = None
        self._rank: int | None = None
        self._began_s = 0.0

    def look(self, rank: int, progress: object) -> None:
        """Note that the call waits for `rank` now, and its `progress`, at the end of a check."""
        if (rank, progress) == (self._rank, self._progress) or self.events is None:
            return
        self.end()
        self._rank, self._progress = rank, progress
        call_s = self.events.standing().since_s
        self._began_s = max(call_s, time.monotonic() - self._check_s)

    def end(self) -> None:
        """Note that the call does not wait any more."""
        if self._rank is not None and self.events is not None:
            now = time.monotonic()
            self.events.part(SpanKind.WAIT, self._began_s, now, other=self._rank)
        self._rank = self._progress = None


def timeout_error(due: str, waited_s: float, limit: Limit, **where: Any) -> PeerTimeoutError:
    """The error of a call that has waited for `due` up to `limit`; `where` names the peer."""
    return PeerTimeoutError(
        f"waited {waited_s:.1f} s for {due}",
        **where,
        remedy=f"Read rank {where['peer']}'s log first; raise {limit.variable} "
        f"(now {limit.seconds:g}) only if it is merely slow.",
    )


def mismatch_error(
    received: Header, expected: Header, name: Callable[[int], str], **where: Any
) -> MismatchError:
    """The error of a call that met another; `name` gives the name of the rank in a header."""
    remedy = wire.advice(received, expected)
    error = MismatchError(wire.disagreement(received, expected, name), remedy=remedy, **where)
    error.signatures = expected.signature, received.signature
    return error
