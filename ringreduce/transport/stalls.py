"""What every link does when a call does not go on: count the time, and name what ended it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ringreduce.pure import wire
from ringreduce.pure.wire import Header
from ringreduce.vocabulary.errors import (
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    RingReduceError,
)

__all__ = ["Interruption", "Stall", "mismatch_error", "timeout_error"]


class Interruption:
    """Ends a call that runs in another thread, when that thread looks at the clock next.

    Attributes:
        is_set: whether it is to end.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._cause: RingReduceError | None = None

    def set(self, cause: RingReduceError | None) -> None:
        """Have the call raise `cause`, or that this rank closed."""
        self._cause = cause
        self.is_set = True

    def error(self, **where: Any) -> RingReduceError:
        """What the call raises; `where` are the fields of its errors."""
        return self._cause or PeerLostError(
            "closed its communicator in the middle of a collective", **where
        )


class Stall:
    """For how long a call has made no progress.

    Attributes:
        lost: the peer that has gone since then, if one has. What it sent before that still
            counts, so the call runs once more before it fails; progress clears this.
    """

    def __init__(self) -> None:
        self._progress: object = None
        self._since_s = 0.0
        self.lost: int | None = None

    def seconds(self, progress: object) -> float:
        """Since when `progress` has been what it is; 0 when it has just changed."""
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._since_s, self.lost = progress, now, None
        return now - self._since_s


def timeout_error(due: str, waited_s: float, timeout_s: float, **where: Any) -> PeerTimeoutError:
    """The error of a call that has waited too long for `due`; `where` says for which peer."""
    return PeerTimeoutError(
        f"waited {waited_s:.1f} s for {due}",
        **where,
        remedy=f"Read rank {where['peer']}'s log first; raise RINGREDUCE_TIMEOUT_S "
        f"(now {timeout_s:g}) only if it is merely slow.",
    )


def mismatch_error(
    received: Header, expected: Header, name: Callable[[int], str], **where: Any
) -> MismatchError:
    """The error of a call that met another; `name` says what to call a header's rank."""
    error = MismatchError(wire.disagreement(received, expected, name), **where)
    error.signatures = expected.signature, received.signature
    return error
