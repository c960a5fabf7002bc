"""Systems that alternate: all are started first, then one at a time gets an order.

So a slow minute of the machine affects all systems alike. While one works, the others sleep:
every process waits for orders on its own connection to the driver, its line. Waiting in a
barrier of the measured system would burn a core (Open MPI polls), or wake up now and then.

    driver --order--> rank 0 of gloo            the driver's end: Turns
           --order--> rank 1 of gloo            a process's end: Line
           <-answer-- ...
           (ranks of the other systems: asleep in recv on their lines)

Each message is a JSON object on one line of text. Lines are Unix sockets, since every network
namespace can reach a path, but only its own loopback. A process whose line is closed exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

# Ranks import TensorFlow, and the ring loop may have to be compiled, all at once.
START_TIMEOUT_S = 180.0
TURN_TIMEOUT_S = 300.0
# From closing the line to SIGTERM, and from SIGTERM to SIGKILL.
END_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 5.0
_POLL_S = 0.2
_SHOWN_LINES = 60
_PATH, _NAME = "RINGREDUCE_BENCH_LINE", "RINGREDUCE_BENCH_SYSTEM"


@dataclass(frozen=True)
class Process:
    """A program to start: its command, variables on top of the driver's own, its cores, or all."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: Collection[int] | None = None


@dataclass(frozen=True)
class System:
    """A system that takes part.

    Attributes:
        name: unique among the systems of a run.
        processes: what the driver starts.
        lines: how many processes open a `Line`: the ranks, even if another process starts them.
    """

    name: str
    processes: Sequence[Process]
    lines: int


class SystemFailed(Exception):
    """A system ended, did not answer or did not start; `Turns` has shown its output."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name, self.reason = name, reason


class Line:
    """A process's end: it sends its name and rank, then receives orders and answers them.

    Args:
        rank: this process's number among those of its system with a line.
        facts: sent to the driver with the name and rank.
    """

    def __init__(self, rank: int, **facts: Any) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[_PATH])
            self._file = connection.makefile("rw", encoding="utf-8")  # Keeps it open.
        self.answer(system=os.environ[_NAME], rank=rank, **facts)

    def orders(self) -> Iterator[dict[str, Any]]:
        """Each order as it arrives, until the driver closes the line or ends."""
        with contextlib.suppress(ConnectionError):
            for text in self._file:
                yield json.loads(text)

    def answer(self, **values: Any) -> None:
        """Send an answer to the driver."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    @staticmethod
    def folder() -> Path:
        """A directory that all processes of this run share; removed afterwards."""
        return Path(os.environ[_PATH]).parent


class Turns:
    """The driver's end. A context manager, whose exit ends all processes."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> Turns:
        # Not in TMPDIR, which may be too long for the address of a Unix socket.
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rr", dir="/tmp"))
        self._path = str(Path(folder, "line"))
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(self._path)
        self._listener.listen(128)
        self._listener.settimeout(_POLL_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Close all lines before waiting for any process, so that all end at the same time.
        for running in self._running.values():
            running.hang_up()
        for running in self._running.values():
            running.end(END_TIMEOUT_S if kind is None else 0.0)
        self._stack.close()

    def start(
        self, systems: Sequence[System], timeout_s: float = START_TIMEOUT_S
    ) -> dict[str, SystemFailed | list[dict[str, Any]]]:
        """Start all; return once each is ready or has failed.

        Returns:
            For each system the first messages of its processes, in rank order, or how it
            failed; then its output has been shown.
        """
        deadline = time.monotonic() + timeout_s
        for system in systems:
            self._running[system.name] = _Running(system, self._path)
        waiting = {system.name for system in systems}
        result: dict[str, SystemFailed | list[dict[str, Any]]] = {}
        while waiting:
            self._accept(max(0.1, deadline - time.monotonic()))
            for name in sorted(waiting):
                running = self._running[name]
                if len(running.lines) == running.system.lines:
                    result[name] = running.introductions()
                elif (code := running.exit_code()) is not None:
                    result[name] = self._failed(name, f"ended with {code} before its first turn")
                elif time.monotonic() >= deadline:
                    result[name] = self._failed(name, f"was not ready after {timeout_s:g} s")
            waiting -= set(result)
        return result

    def ask(
        self, name: str, order: Mapping[str, Any], timeout_s: float = TURN_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Send all ranks of one system an order; return their answers, in rank order.

        Raises:
            SystemFailed: a rank closed its line, or not all answered in time.
        """
        running = self._running[name]
        try:
            return running.ask(order, timeout_s)
        except (EOFError, OSError) as error:
            raise self._failed(name, str(error)) from None

    def drop(self, name: str) -> None:
        """End one system before the others."""
        running = self._running.pop(name)
        running.hang_up()
        running.end(END_TIMEOUT_S)

    def _accept(self, timeout_s: float) -> None:
        """Accept one process, if one connects within `_POLL_S`."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        end = _End(connection)
        try:
            end.introduction = end.receive(timeout_s)
            self._running[end.introduction["system"]].lines[end.introduction["rank"]] = end
        except (EOFError, OSError, KeyError):
            # It died during this message, and its exit code is checked; or its system has failed.
            connection.close()

    def _failed(self, name: str, reason: str) -> SystemFailed:
        running = self._running.pop(name)
        running.hang_up()
        last_lines = running.end(0.0)
        print(f"--- {name} {reason}. The end of its output:", file=sys.stderr)
        sys.stderr.writelines(last_lines)
        sys.stderr.flush()
        return SystemFailed(name, reason)


class _End:
    """The driver's end of one line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.introduction: dict[str, Any] = {}
        self._data = bytearray()

    def send(self, order: Mapping[str, Any]) -> None:
        self.connection.settimeout(TURN_TIMEOUT_S)
        self.connection.sendall(json.dumps(order).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """The next answer, or None if it is incomplete. Waits for the first byte."""
        data = self.connection.recv(1 << 16)
        if not data:
            raise EOFError
        self._data += data
        text, newline, rest = self._data.partition(b"\n")
        if not newline:
            return None
        self._data = rest
        return json.loads(text)  # type: ignore[no-any-return]

    def receive(self, timeout_s: float) -> dict[str, Any]:
        self.connection.settimeout(timeout_s)
        while (answer := self.read()) is None:
            pass
        return answer


class _Running:
    """The processes of one system, their lines by rank, and their output."""

    def __init__(self, system: System, path: str) -> None:
        self.system = system
        self.lines: dict[int, _End] = {}
        # Shown only when something fails: TensorFlow, for one, prints much at the start.
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        common = {**os.environ, _PATH: path, _NAME: system.name}
        self._processes = [
            subprocess.Popen(
                list(process.command),
                env={**common, **process.environment},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Ctrl-C reaches the driver only, and the group can be killed as a whole. All stay
                # in one session: Linux shares processor time among sessions, not processes.
                preexec_fn=partial(_prepare, process.cores),
            )
            for process in system.processes
        ]

    def introductions(self) -> list[dict[str, Any]]:
        return [self.lines[rank].introduction for rank in sorted(self.lines)]

    def exit_code(self) -> int | None:
        """The exit code of an ended process, a failed one first; None if all are running."""
        codes = [code for process in self._processes if (code := process.poll()) is not None]
        return next((code for code in codes if code), codes[0] if codes else None)

    def ask(self, order: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, end in self.lines.items():
                selector.register(end.connection, selectors.EVENT_READ, (rank, end))
            for rank, end in self.lines.items():
                try:
                    end.send(order)
                except ConnectionError:
                    raise EOFError(f"lost rank {rank}, which ended before its turn") from None
            # From all at once, since a rank that dies leaves the others waiting for it.
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    silent = sorted(set(self.lines) - set(answers))
                    raise TimeoutError(f"did not answer in {timeout_s:g} s: ranks {silent}")
                for key, _ in ready:
                    rank, end = key.data
                    try:
                        answer = end.read()
                    except (EOFError, ConnectionError):
                        raise EOFError(f"lost rank {rank}, which ended in its turn") from None
                    if answer is not None:
                        answers[rank] = answer
                        selector.unregister(end.connection)
        return [answers[rank] for rank in sorted(answers)]

    def hang_up(self) -> None:
        for end in self.lines.values():
            end.connection.close()

    def end(self, timeout_s: float) -> Sequence[str]:
        """Wait `timeout_s` for the processes to exit, then send SIGTERM, then SIGKILL.

        Returns:
            The last lines of their output.
        """
        for number, wait_s in ((None, timeout_s), (signal.SIGTERM, KILL_TIMEOUT_S)):
            deadline = time.monotonic() + wait_s
            for process in self._processes:
                if number is not None and process.poll() is None:
                    process.send_signal(number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            # Also kills what a launcher that was killed, or failed, has left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with self._log:
            self._log.seek(0)
            return deque(self._log, maxlen=_SHOWN_LINES)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end the program as Ctrl-C does, running every `finally`."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare(cores: Collection[int] | None) -> None:
    os.setpgrp()
    if cores is not None:
        os.sched_setaffinity(0, cores)
