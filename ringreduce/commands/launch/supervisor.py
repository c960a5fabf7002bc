"""Runs N workers on this host, shows their output, and stops all when one fails.

One loop in one thread waits for output, signals and exits together.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from ringreduce.commands.launch.failure import Failure, first_cause
from ringreduce.commands.launch.processes import Guard, Stream, Worker
from ringreduce.commands.launch.screen import Screen
from ringreduce.vocabulary.config import TIMES, Config, configured_secret, worker_environment

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    command: Sequence[str],
    size: int,
    *,
    threads: int | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    **choices: Any,
) -> int:
    """Run `command` as `size` local workers of one job; return the job's exit code.

    0 when all workers ended with 0, 128 plus its number after a signal that ends the job, else
    the code of the first failure, as a shell shows it. No worker is left then.

    Must be called from the main thread, which gets the signals.

    Args:
        command: program and arguments, the same for all.
        size: number of workers.
        threads: compute threads for each; by default `default_threads(size)`.
        stdout, stderr: where lines go; the process's own by default.
        choices: fields of `Config` for the workers; None: as the environment has it. With
            `log_dir`, their lines are also written there, to ``rank-0.log`` and so on.

    Raises:
        ConfigError: `log_dir` cannot be written to, or a setting is out of range.
    """
    choices = {name: value for name, value in choices.items() if value is not None}
    if "timeout_s" in choices:
        choices.setdefault("join_timeout_s", choices["timeout_s"])
    # Workers read the user's own secret from the environment.
    if not configured_secret():
        choices["secret"] = secrets.token_hex(32)
    screen = Screen(size, stdout or sys.stdout, stderr or sys.stderr)
    guard = Guard()
    job = _Job(screen, guard, keeps_records="log_dir" in choices)
    with job.signals(), guard:
        try:
            if "log_dir" in choices:
                folder = Path(choices["log_dir"])
                choices["log_dir"] = str(folder.absolute())
                screen.keep(folder)
            job.start(command, size, threads or default_threads(size), choices)
            job.watch()
        finally:
            job.stop(grace_s=0.0)
            screen.close()
    return job.conclude()


def default_threads(size: int) -> int:
    """Compute threads for each of `size` workers: this process's cores shared out, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = psutil.cpu_count() or 1
    return max(1, cores // size)


class _Job:
    """All workers of one run."""

    def __init__(self, screen: Screen, guard: Guard, *, keeps_records: bool) -> None:
        self._screen, self._guard = screen, guard
        # They ask workers for flight records, and must not kill one that has no communicator yet,
        # and so no handler.
        self._record_signals = (signal.SIGUSR1,) if keeps_records else ()
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._signals: deque[int] = deque()
        self._ended_by: int | None = None
        self._stop_s: float | None = None
        self._asked_s: float | None = None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within this context, signals are queued for `watch` to pass on."""
        before = {
            number: signal.signal(number, lambda number, frame: self._signals.append(number))
            for number in _PASSED_ON
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(
        self, command: Sequence[str], size: int, threads: int, choices: Mapping[str, Any]
    ) -> None:
        """Start all workers."""
        # Rank 0 inherits the listening socket, so that no other program can take the port, and a
        # rank that connects early waits instead of being refused.
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, size)) as listener:
            listener.setblocking(False)
            job_id = secrets.token_hex(8)
            for rank in range(size):
                inherited = (listener.fileno(),) if rank == 0 else ()
                config = Config(
                    rank=rank,
                    size=size,
                    local_rank=rank,
                    local_size=size,
                    rendezvous=f"127.0.0.1:{listener.getsockname()[1]}",
                    rendezvous_fd=inherited[0] if inherited else None,
                    job_id=job_id,
                    **choices,
                )
                environment = worker_environment(config, threads, decided=choices)
                worker = Worker(
                    rank, command, environment, inherited=inherited, ignored=self._record_signals
                )
                self._workers.append(worker)
                self._guard.add(worker)
                for stream in worker.streams:
                    self._selector.register(stream.file, selectors.EVENT_READ, stream)

    def watch(self) -> None:
        """Until every worker has ended: show output, pass on signals, stop after a failure."""
        while self._running():
            self._read_all()
            while self._signals:
                self._pass_on(self._signals.popleft())
            self._reap()
            if self._stop_s is None and self._is_doomed() and self._have_recorded():
                self.stop(TIMES.grace_s)
            elif self._stop_s is not None and time.monotonic() >= self._stop_s:
                self._end(signal.SIGKILL)
        deadline = time.monotonic() + TIMES.drain_s
        while self._selector.get_map() and time.monotonic() < deadline:
            self._read_all()

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.alive]

    def _read_all(self) -> None:
        for key, _ in self._selector.select(TIMES.poll_s):
            self._read(key.data)

    def _read(self, stream: Stream) -> bool:
        """Show what has arrived on a stream; return whether there may be more now."""
        lines = stream.read()
        if lines:
            self._screen.show(stream.worker.rank, lines, is_error=stream.is_error)
        if stream.has_ended and not stream.file.closed:
            self._selector.unregister(stream.file)
            stream.file.close()
        return lines is not None and not stream.has_ended

    def _pass_on(self, number: int) -> None:
        repeated = self._ended_by is not None and number in _STOPPING
        for worker in self._running():
            if number in self._record_signals:
                worker.ask_for_record()
            else:
                worker.send(signal.SIGKILL if repeated else number)
        if number in _STOPPING and not repeated:
            self._ended_by = number
            self._stop_s = time.monotonic() + TIMES.grace_s

    def _reap(self) -> None:
        for worker in self._running():
            if worker.reap():
                for stream in worker.streams:
                    # Its last lines decide whether its failure is the cause.
                    while self._read(stream):
                        pass
                self._guard.remove(worker)

    def _failures(self) -> list[Failure]:
        return [failure for worker in self._workers if (failure := worker.failure())]

    def _is_doomed(self) -> bool:
        """Whether a worker has failed and the cause is known, or has had time to show."""
        cause = first_cause(self._failures())
        if cause is None:
            return False
        if not cause.is_consequence:
            return True
        first_exit = min(w.exit_s for w in self._workers if w.failure() and w.exit_s is not None)
        return time.monotonic() - first_exit >= TIMES.cause_s

    def _have_recorded(self) -> bool:
        """Whether the running workers have had time to write flight records."""
        if not self._record_signals:
            return True
        now = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now
            # One in user code may not notice the failure, but its stack may explain it.
            for worker in self._running():
                worker.ask_for_record()
        return now - self._asked_s >= TIMES.record_s

    def stop(self, grace_s: float) -> None:
        """Ask the workers that still run to end; `watch` kills them after `grace_s`."""
        self._stop_s = time.monotonic() + grace_s
        self._reap()  # Workers that have ended were not stopped by the launcher.
        self._end(signal.SIGTERM)
        if grace_s == 0:
            self._end(signal.SIGKILL)
            while self._running():
                self._reap()
                time.sleep(0.01)

    def _end(self, number: int) -> None:
        for worker in self._running():
            worker.stop(number)

    def conclude(self) -> int:
        """Print what failed, the cause first; return the job's exit code."""
        say = self._screen.say
        failures = self._failures()
        cause = first_cause(failures)
        if self._ended_by is not None:
            say(f"stopped by {signal.Signals(self._ended_by).name}")
            return 128 + self._ended_by
        if cause is None:
            return 0
        say(f"rank {cause.rank} failed first ({cause.describe()}); all workers were stopped")
        for line in cause.traceback:
            say(f"  {line}")
        for failure in sorted(failures, key=lambda f: f.time_s):
            if failure is not cause:
                what = f": {failure.exception}" if failure.exception else ""
                say(f"then rank {failure.rank} ({failure.describe()}){what}")
        return cause.exit_code
