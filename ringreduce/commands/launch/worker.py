"""A worker as its launcher knows it, on whichever host: what it told, and how it ended."""

import signal
import time

from ringreduce.commands.launch.failure import Failure
from ringreduce.commands.launch.local import LocalHost
from ringreduce.commands.launch.remote import RemoteHost
from ringreduce.commands.launch.signals import STOPPING
from ringreduce.commands.launch.worker_records import (
    Exits,
    Goes,
    ImportedKeras,
    Joins,
    Notices,
    Raised,
)

Host = LocalHost | RemoteHost
_ENDING = *STOPPING, signal.SIGKILL, signal.SIGUSR2


class Worker:
    """One process of a rank, on the host of that name; empty where all ranks are on this host.

    `host` starts it; None: another launcher does, and tells what becomes of it. `life` is its
    number, if the rank was lost before, and started again.
    """

    def __init__(self, rank: int, host: Host | None, host_name: str = "", life: int = 0) -> None:
        self.rank, self._host, self._host_name, self.life = rank, host, host_name, life
        self.started_s = time.monotonic()
        self.exit_s: float | None = None  # when it ended, on `time.monotonic`; None until then
        self._returncode = 0
        self.how, self._is_final = "", False
        self.stopped_s: float | None = None  # when the launcher began to end it; None: it did not
        self.is_back = False  # whether it was said that it has taken a lost rank's place
        self.rings: dict[int, str] = {}  # the state of those that it has joined, by size
        self.keras_s: float | None = None  # when it has imported Keras; None: it has not
        self.notices = False  # whether a signal tells it to go, rather than to end at once
        self.goes: Goes | None = None  # that it ends in order, once it has said so
        self.exits: Exits | None = None  # what ends it with exit code 0, if it said so
        # The exception that ends it, once it has said so, and when that was.
        self.raised: Raised | None = None
        # is_shown: whether its traceback was shown.
        self.raised_s, self.is_shown = 0.0, False

    @property
    def alive(self) -> bool:
        """Whether it is not known to have ended."""
        return self.exit_s is None

    def note(self, record: Joins | Notices | Goes | ImportedKeras | Exits | Raised) -> None:
        if isinstance(record, Joins):
            self.rings[record.size] = record.state
        elif isinstance(record, Notices):
            self.notices = record.signal != 0
        elif isinstance(record, Goes):
            self.goes = record
        elif isinstance(record, ImportedKeras):
            self.keras_s = time.monotonic()
        elif isinstance(record, Exits):
            self.exits = record
        else:
            self.raised, self.raised_s = record, time.monotonic()

    @property
    def is_stopped(self) -> bool:
        return self.stopped_s is not None

    @property
    def goes_in_order(self) -> bool:
        """Whether it ends, or has ended, as it has said since ranks were told to go.

        Also by a further signal: what it had to do is done.
        """
        if self.goes is None:
            return False
        return self.alive or self._returncode in {self.goes.code, *(-each for each in _ENDING)}

    @property
    def was_told_to_end(self) -> bool:
        """Whether somebody wanted this one to end: by a signal, or since it has left in order."""
        is_interrupted = self.raised is not None and self.raised.kind == "KeyboardInterrupt"
        return self.goes is not None or is_interrupted or -self._returncode in STOPPING

    @property
    def is_working(self) -> bool:
        """Whether it lives, and has not said that it is about to end."""
        is_ending = self.exits is not None or self.raised is not None or self.goes is not None
        return self.alive and not is_ending

    @property
    def is_suspended(self) -> bool:
        """Whether its process, on this host, is stopped: it does nothing by itself."""
        return isinstance(self._host, LocalHost) and self._host.is_suspended(self.rank)

    @property
    def is_ours(self) -> bool:
        return self._host is not None

    def end(self, returncode: int, how: str = "", *, is_final: bool = False) -> None:
        """Note that it has ended; `how`, where more is known."""
        self.exit_s = time.monotonic()
        self._returncode, self.how, self._is_final = returncode, how or self.how, is_final

    @property
    def has_ended_well(self) -> bool:
        """Whether it has ended by itself, with exit code 0."""
        return not self.alive and self._returncode == 0 and self.stopped_s is None

    @property
    def ending(self) -> str:
        """What has ended a program that ended well."""
        if self.exits is None:
            return "its program has ended"
        return f"SystemExit in {self.exits.place}" if self.exits.place else "SystemExit"

    def send(self, number: int) -> None:
        """Send a signal to its processes; one that ends them also to those that are stopped."""
        # Where it has ended, another process may have its place.
        if self._host is None or not self.alive:
            return
        self._host.send(self.rank, number)
        if number in STOPPING:
            # A process that is stopped takes no other signal but SIGKILL.
            self._host.send(self.rank, signal.SIGCONT)

    def stop(self, number: int) -> None:
        """End it; its exit code then is not a failure."""
        if self.stopped_s is None:
            self.stopped_s = time.monotonic()
        self.send(number)

    def failure(self, ring_of: int = 0) -> Failure | None:
        """How it failed; None if it did not, or only after the launcher has stopped it.

        Others wait for a ring of `ring_of` ranks; 0: they do not.
        """
        if self.goes_in_order:
            return None
        code = 1 if self.raised is None else self.raised.code
        if self.stopped_s is not None:
            is_late = self.raised is None or self.raised_s > self.stopped_s
            return None if is_late else self._failure(code, was_stopped=True)
        if self._returncode or (self.raised is not None and self.alive):
            return self._failure(self._returncode or code)
        if not self.alive and ring_of > 1 and self.rings.get(ring_of, "waits") == "waits":
            return self._failure(1, has_left=True)
        return None

    def loss(self) -> Failure | None:
        """How it ended, well too: if others have lost it, that was too early."""
        failure = self.failure()
        is_ending = self.exits is not None and self.alive  # Leaving Python may take a while.
        if failure is not None or not (self.has_ended_well or is_ending):
            return failure
        return self._failure(0)._replace(how=self.how or f"exit code 0: {self.ending}")

    def _failure(self, code: int, *, was_stopped: bool = False, has_left: bool = False) -> Failure:
        return Failure(
            self.rank,
            code,
            self.raised_s if self.raised is not None else self.exit_s or 0.0,
            self.raised,
            has_ended=not self.alive,
            was_stopped=was_stopped,
            host=self._host_name,
            how=self.how,
            has_left=has_left,
            is_final=self._is_final,
        )
