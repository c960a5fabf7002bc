"""The processes of a host: its workers, and the guard that ends them if their parent is killed.

Each worker leads a process group, so that Ctrl-C in the terminal reaches only the launcher (which
passes it on), and a worker's children end with it. It stays in the launcher's session, unless it
gets its standard input: Linux shares processor time among sessions, and a rank that yields to
others while it waits yields only within its own. No worker outlives its parent, the launcher or an
agent: the guard then kills its group.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from ringreduce.commands.launch import guard
from ringreduce.commands.launch.exchange import Event
from ringreduce.vocabulary.worker_environment import environment_without_secret

_PIECE_BYTES = 1 << 16


class Process:
    """A started worker, with descriptors that it has `inherited`.

    It may get this process's standard input (`has_stdin`). The signals `asking` are for its flight
    record. It ignores them until it has a communicator, which sets a handler; its children do not
    get them, since they would die. It runs on `cores` alone, if any are given. Its `returncode`, as
    subprocess has it, is None until `reap`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        has_stdin: bool = False,
        inherited: Collection[int],
        asking: Sequence[int],
        cores: Collection[int] | None = None,
    ) -> None:
        self._asking = asking
        self.returncode: int | None = None
        self._process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=None if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A group in the background could not read from the launcher's terminal.
            start_new_session=has_stdin,
            pass_fds=inherited,
            preexec_fn=partial(_prepare, asking, has_stdin, cores),
        )
        self.pid = self._process.pid  # of the process and of its group
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.outputs: tuple[IO[bytes], IO[bytes]] = (self._process.stdout, self._process.stderr)

    @property
    def is_suspended(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, so that it does nothing by itself."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
        return False

    def send(self, number: int, *, is_notice: bool = False) -> None:
        """Send a signal to its group; does nothing if it has ended.

        With `is_notice` to itself alone: its children, such as workers that load data, go on.
        """
        is_alone = is_notice or number in self._asking
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.kill if is_alone else os.killpg)(self.pid, number)

    def reap(self) -> bool:
        """If it has ended, record how and kill the children that it left; return whether."""
        # Not reaped yet, so that its number is not given to another process.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.send(signal.SIGKILL)
        self.returncode = self._process.wait()
        return True


class Pipe:
    """Reads what a process writes; `take` makes events of pieces of bytes, the last one empty."""

    def __init__(
        self,
        file: IO[bytes],
        selector: selectors.BaseSelector,
        take: Callable[[bytes], Sequence[Event]],
    ) -> None:
        self._file, self._selector, self._take = file, selector, take
        os.set_blocking(file.fileno(), False)
        selector.register(file, selectors.EVENT_READ, self.read)

    def read(self) -> Sequence[Event] | None:
        """The events of what has arrived; None: nothing has."""
        if self._file.closed:
            return None
        data = self._file.read(_PIECE_BYTES)
        if data is None:
            return None
        if not data:
            self._selector.unregister(self._file)
            self.close()
        return self._take(data)

    def drain(self) -> list[Event]:
        """The events of all that the process has left, which has ended."""
        events: list[Event] = []
        while (some := self.read()) is not None:
            events += some
        return events

    def close(self) -> None:
        self._file.close()


class Guard:
    """A process that kills the workers if this one dies; runs within this context."""

    def __enter__(self) -> Guard:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            env=environment_without_secret(),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def add(self, pid: int) -> None:
        """Add the leader of a process group to those that the guard kills."""
        self._write(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Remove one that has ended, whose number the system may give to another process."""
        self._write(f"-{pid}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _prepare(ignored: Sequence[int], leads_session: bool, cores: Collection[int] | None) -> None:
    """Set up group, signals and cores, in the child, before it runs its program."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if not leads_session:
        os.setpgid(0, 0)
        # To use the terminal is an error then, instead of that the worker is stopped.
        ignored = (*ignored, signal.SIGTTIN, signal.SIGTTOU)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
