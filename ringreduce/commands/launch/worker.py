"""What the launcher knows of a worker, on whichever host that runs: its lines, and its end."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ringreduce.commands.launch.exchange import Event, Output
from ringreduce.commands.launch.failure import Failure
from ringreduce.commands.launch.output import LineBuffer
from ringreduce.commands.launch.screen import Source
from ringreduce.commands.launch.tracebacks import is_traceback_start, last_traceback

_TAIL_LINES = 400


class Host(Protocol):
    """Where ranks run: this host or another one."""

    @property
    def ranks(self) -> range:
        """The ranks that run there."""

    def poll(self) -> Sequence[Event]:
        """What has happened besides what its files in the selector bring."""

    def send(self, rank: int, number: int, *, alone: bool = False) -> None:
        """Send a signal to a rank's processes, or to the rank `alone`."""

    def leave(self) -> None:
        """Begin to close; the ranks have ended."""

    def close(self) -> None:
        """Leave no process behind."""


class Worker:
    """One rank.

    Args:
        host_name: empty where all ranks are on this host.
        is_raw: whether its standard output is a terminal of its own.

    Attributes:
        exit_s: when it ended, on `time.monotonic`; None until then.
    """

    def __init__(self, rank: int, host: Host, host_name: str = "", *, is_raw: bool = False) -> None:
        self.rank, self._host, self._host_name = rank, host, host_name
        self.exit_s: float | None = None
        self._returncode = 0
        self._lost = ""
        self._stopped_s: float | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._traceback_s: float | None = None
        self._sources = (Source(rank, is_error=False, is_raw=is_raw), Source(rank, is_error=True))
        self._lines = (LineBuffer(is_raw=is_raw), LineBuffer())

    @property
    def alive(self) -> bool:
        """Whether it is not known to have ended."""
        return self.exit_s is None

    def take(self, output: Output) -> tuple[Source, list[str], str]:
        """What it wrote, as whole lines, and the line that is not whole yet."""
        buffer = self._lines[output.is_error]
        lines = buffer.feed(output.data)
        if output.is_error:
            self._tail.extend(lines)
            if any(map(is_traceback_start, lines)):
                self._traceback_s = time.monotonic()
        return self._sources[output.is_error], lines, buffer.partial

    def end(self, returncode: int, lost: str = "") -> None:
        """Note that it has ended; `lost` says how its host was lost, if it was."""
        self.exit_s = time.monotonic()
        self._returncode, self._lost = returncode, lost

    @property
    def has_ended_well(self) -> bool:
        """Whether it has ended by itself, with exit code 0."""
        return not self.alive and self._returncode == 0 and self._stopped_s is None

    def send(self, number: int) -> None:
        """Send a signal to its processes."""
        self._host.send(self.rank, number)

    def ask_for_record(self) -> None:
        """Have it write its flight record; the signal would kill its children."""
        self._host.send(self.rank, signal.SIGUSR1, alone=True)

    def stop(self, number: int) -> None:
        """End it; its exit code then is not a failure."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
        self.send(number)

    def failure(self) -> Failure | None:
        """How it failed; None if it did not, or was stopped by the launcher."""
        code = self._returncode
        if self.exit_s is None or code == 0 or self._stopped_s is not None:
            return None
        # A process that was killed had only logged its traceback.
        when_s = self.exit_s if self._traceback_s is None or code < 0 else self._traceback_s
        return self._failure(code, when_s)

    def unfinished_failure(self) -> Failure | None:
        """How it was failing when the launcher stopped it: Python may take long to end."""
        when_s = self._traceback_s
        if self._stopped_s is None or when_s is None or when_s > self._stopped_s:
            return None
        return self._failure(1, when_s, was_stopped=True)

    def _failure(self, code: int, when_s: float, *, was_stopped: bool = False) -> Failure:
        return Failure(
            self.rank,
            code,
            when_s,
            last_traceback(list(self._tail)),
            was_stopped=was_stopped,
            host=self._host_name,
            lost=self._lost,
        )
