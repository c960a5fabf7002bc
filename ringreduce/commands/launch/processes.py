"""The processes of a job: its workers, and the guard that ends them if the launcher is killed.

Each worker leads a session, so that Ctrl-C in the terminal reaches only the launcher (which passes
it on), and a worker's children end with it.

No worker outlives the launcher: on Linux the kernel kills it (PR_SET_PDEATHSIG), and on every
system a guard process kills the workers' groups, with their children.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from ringreduce.commands.launch import guard
from ringreduce.commands.launch.failure import Failure
from ringreduce.commands.launch.output import LineBuffer
from ringreduce.commands.launch.screen import Source
from ringreduce.commands.launch.terminal import Terminal
from ringreduce.commands.launch.tracebacks import is_traceback_start, last_traceback

_TAIL_LINES = 400
_PR_SET_PDEATHSIG = 1


class Stream:
    """Standard output or error of one worker; `file` is nonblocking."""

    def __init__(self, worker: Worker, file: IO[bytes] | None, source: Source) -> None:
        assert file is not None
        os.set_blocking(file.fileno(), False)
        self.worker, self.file, self.source, self.has_ended = worker, file, source, False
        self._lines = LineBuffer(is_raw=source.is_raw)

    @property
    def partial(self) -> str:
        """The line that is not whole yet."""
        return self._lines.partial

    def read(self) -> list[str] | None:
        """The whole lines that have arrived; None: there is nothing to read now."""
        try:
            data = None if self.has_ended else self.file.read(1 << 16)
        except OSError:
            data = b""  # So a terminal ends that no process has open.
        if data is None:
            return None
        self.has_ended = not data
        lines = self._lines.feed(data)
        if self.source.is_error:
            self.worker.note(lines)
        return lines


class Worker:
    """A started worker process.

    Args:
        has_stdin: whether it gets the launcher's standard input.
        terminal: its own, for standard input and output instead.
        inherited: descriptors that it gets.
        ignored: signals that it ignores until it sets a handler.

    Attributes:
        exit_s: when it ended, on `time.monotonic`; None while it runs.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        has_stdin: bool = False,
        terminal: Terminal | None = None,
        inherited: Collection[int],
        ignored: Sequence[int],
    ) -> None:
        self.rank = rank
        self.exit_s: float | None = None
        self._stopped_s: float | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._traceback_s: float | None = None
        self._process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=terminal.tty if terminal else None if has_stdin else subprocess.DEVNULL,
            stdout=terminal.tty if terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=inherited,
            preexec_fn=_prepare(os.getpid(), ignored=ignored, has_terminal=terminal is not None),
        )
        output = self._process.stdout
        if terminal is not None:
            # Else its output would not end with the worker.
            os.close(terminal.tty)
            output = terminal.output
        self.streams = (
            Stream(self, output, Source(rank, is_error=False, is_raw=terminal is not None)),
            Stream(self, self._process.stderr, Source(rank, is_error=True)),
        )

    @property
    def pid(self) -> int:
        """Number of the process and of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped."""
        return self.exit_s is None

    def send(self, number: int) -> None:
        """Send a signal to the worker's group; does nothing if that has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def ask_for_record(self) -> None:
        """Have the worker write its flight record; the signal would kill its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGUSR1)

    def stop(self, number: int) -> None:
        """End it; its exit code then is not a failure."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
        self.send(number)

    def reap(self) -> bool:
        """If it has ended, record that and kill the children that it left; return whether."""
        # Not reaped yet, so that its number is not given to another process.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.send(signal.SIGKILL)
        self._process.wait()
        self.exit_s = time.monotonic()
        return True

    def note(self, lines: Sequence[str]) -> None:
        """Keep lines that it wrote to standard error."""
        self._tail.extend(lines)
        if any(map(is_traceback_start, lines)):
            self._traceback_s = time.monotonic()

    def failure(self) -> Failure | None:
        """How it failed; None if it did not, or was stopped by the launcher."""
        code = self._process.returncode
        if self.exit_s is None or code == 0 or self._stopped_s is not None:
            return None
        # A process that was killed had only logged its traceback.
        when_s = self.exit_s if self._traceback_s is None or code < 0 else self._traceback_s
        return Failure(self.rank, code, when_s, last_traceback(list(self._tail)))

    def unfinished_failure(self) -> Failure | None:
        """How it was failing when the launcher stopped it: Python may take long to end."""
        when_s = self._traceback_s
        if self._stopped_s is None or when_s is None or when_s > self._stopped_s:
            return None
        return Failure(self.rank, 1, when_s, last_traceback(list(self._tail)), was_stopped=True)


class Guard:
    """A process that kills the workers if the launcher dies; runs within this context."""

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def add(self, worker: Worker) -> None:
        """Add a worker to those that the guard kills."""
        self._write(f"+{worker.pid}\n")

    def remove(self, worker: Worker) -> None:
        """Remove an ended worker, whose number the system may give to another process."""
        self._write(f"-{worker.pid}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _prepare(
    parent: int, *, ignored: Sequence[int], has_terminal: bool
) -> Callable[[], None] | None:
    """The function that the child runs first: signals, terminal, death with the launcher."""
    on_linux = sys.platform == "linux"
    if not on_linux and not ignored and not has_terminal:
        return None
    prctl = ctypes.CDLL(None).prctl if on_linux else None

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if has_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if prctl is None:
            return
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before the call of prctl.
            os._exit(1)

    return prepare
