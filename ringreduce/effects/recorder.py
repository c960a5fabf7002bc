"""The flight recorder: the last calls of one communicator, and its present state.

It must cost little beside a collective of a few microseconds: no lock, no formatting, only the
monotonic clock. Calls of one communicator exclude each other, so there is one writer at a time;
readers in other threads need no lock, since each record and the state are tuples, replaced whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringreduce.pure.flight import NAME_MAX, Call, cut
from ringreduce.pure.liveness import Standing
from ringreduce.pure.messages import Pending

# A training step makes a few calls, so these are twenty steps or more; a power of two, for masking.
CALLS_KEPT = 256

_MASK = CALLS_KEPT - 1
_NAMES_KEPT = 32

# number, operation, nbytes, identity of the thread, began, ended (both monotonic), error text
_Ended = tuple[int, str, int, int, float, float, "str | None"]
# number of the present or next call, calls completed, operation (None in user code), nbytes,
# identity of the thread, since when (monotonic)
_State = tuple[int, int, "str | None", int, int, float]

_monotonic = time.monotonic
_get_ident = threading.get_ident


@dataclass(frozen=True)
class FirstError:
    """What broke a communicator first, here or on another rank, and this rank's call then.

    `when_s` is on `time.monotonic`.
    """

    error: BaseException
    standing: Standing
    when_s: float


class Recorder:
    """Records the last calls of one communicator.

    Attributes:
        seconds: wall time spent in completed collectives.
        elapsed_s: wall time of the last completed one.
        first_error: None while the communicator works.
        group: what messages call the communicator.
        peers: set once there is a watcher: returns what was last known of each rank, a dictionary
            with ``rank`` and, where known, ``calls``, ``operation`` (None: in user code),
            ``since_s`` (seconds it had been there), ``pending`` (the send or recv that it waited
            in) and ``age_s`` (age of that in seconds).
        pending: set with `peers`: returns the send or recv that this rank waits in; None for none.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.seconds, self.elapsed_s = 0.0, 0.0
        self.first_error: FirstError | None = None
        self.group = ""
        self.peers: Callable[[], list[dict[str, Any]]] | None = None
        self.pending: Callable[[], Pending | None] | None = None
        self._slots: list[_Ended | None] = [None] * CALLS_KEPT
        # A plain tuple: a `Standing` would cost more than all the rest.
        self._state: _State = (0, 0, None, 0, 0, _monotonic())
        self._names: dict[int, str] = {}

    @property
    def calls(self) -> int:
        """Collectives completed so far."""
        return self._state[1]

    def begin(self, operation: str, nbytes: int) -> None:
        """Record that a collective starts now; its number is how many began before."""
        number, calls, _, _, _, _ = self._state
        thread = _get_ident()
        if thread not in self._names:
            self._learn_name(thread)
        self._state = (number, calls, operation, nbytes, thread, _monotonic())

    def end(self) -> None:
        """Record that the running collective has completed."""
        now = _monotonic()
        number, calls, operation, nbytes, thread, began = self._state
        if operation is None:  # Another thread has called `fail`.
            return
        self._slots[number & _MASK] = (number, operation, nbytes, thread, began, now, None)
        self.elapsed_s = elapsed = now - began
        self.seconds += elapsed
        self._state = (number + 1, calls + 1, None, 0, 0, now)

    def fail(self, error: BaseException) -> None:
        """Record that the running collective failed, or that the ring broke between two calls.

        The first error is kept as `first_error`; later ones are consequences.
        """
        now = _monotonic()
        if self.first_error is None:
            self.first_error = FirstError(error, self.standing(), now)
        number, calls, operation, nbytes, thread, began = self._state
        if operation is not None:
            text = f"{type(error).__name__}: {error}"
            self._slots[number & _MASK] = (number, operation, nbytes, thread, began, now, text)
            self._state = (number + 1, calls, None, 0, 0, now)

    def standing(self) -> Standing:
        """This rank's present call; from any thread, takes no lock, never raises."""
        _, calls, operation, nbytes, _, since_s = self._state
        return Standing(calls, operation, nbytes, since_s)

    def entries(self) -> list[Call]:
        """The last calls, oldest first, the running one included; callable from any thread."""
        # The running call is read first: if it ends now, it is seen twice rather than never.
        number, _, operation, nbytes, thread, began = self._state
        calls: dict[int, tuple[Any, ...]] = {}
        if operation is not None:
            calls[number] = (number, operation, nbytes, thread, began, None, None)
        # A snapshot: one C call under the GIL.
        for record in self._slots.copy():
            if record is not None:
                calls[record[0]] = record
        # All times agree with the present wall clock, even if that was set meanwhile.
        wall = time.time() - _monotonic()
        return [
            Call(
                number=number,
                operation=operation,
                nbytes=nbytes,
                started=wall + began,
                seconds=None if ended is None else ended - began,
                thread=cut(self._names.get(thread, str(thread)), NAME_MAX),
                error=None if error is None else cut(error),
            )
            for _, (number, operation, nbytes, thread, began, ended, error) in sorted(
                calls.items()
            )[-CALLS_KEPT:]
        ]

    def _learn_name(self, thread: int) -> None:
        # A program that makes a thread for each call must not fill memory.
        if len(self._names) >= _NAMES_KEPT:
            self._names = {}
        self._names[thread] = threading.current_thread().name
