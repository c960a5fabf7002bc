"""Start N workers on this host, pass on what they say, stop all when one fails.

One thread, one loop: it waits for output, signals and exits together. Each worker is the
leader of a session of its own, so that a Ctrl-C in the terminal reaches the launcher alone
(which passes it on) and so that a worker's own children end with it.

No worker outlives the launcher, however it ends: the kernel kills a worker whose launcher
died (PR_SET_PDEATHSIG, Linux), and a guard process kills the workers' groups with their
children, on every system.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

import psutil

from ringreduce.commands.launch import guard
from ringreduce.commands.launch.failure import (
    Failure,
    first_cause,
    is_traceback_start,
    last_traceback,
)
from ringreduce.commands.launch.output import LineBuffer
from ringreduce.vocabulary.config import (
    TIMES,
    Config,
    color_wanted,
    configured_secret,
    worker_environment,
)
from ringreduce.vocabulary.errors import ConfigError

__all__ = ["default_threads", "run"]

_TAIL_LINES = 400
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLORS = (36, 33, 32, 35, 34, 31)
_PR_SET_PDEATHSIG = 1


def run(
    command: Sequence[str],
    size: int,
    *,
    threads: int | None = None,
    timeout_s: float | None = None,
    transport: str | None = None,
    encryption: str | None = None,
    log_dir: str | None = None,
    prefix: bool = True,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run `command` as `size` local workers of one job; return the job's exit code.

    0 when all workers ended with 0. Otherwise the code of the first failure in time, as a
    shell shows it; every other worker has been stopped by then. After a signal that ends
    the job, 128 plus its number.

    Must be called from the main thread, since it receives the signals.

    Args:
        command: program and arguments, the same for all.
        size: number of workers.
        threads: compute threads for each; by default the cores shared out, at least one.
        timeout_s: their ``RINGREDUCE_TIMEOUT_S``.
        transport: their ``RINGREDUCE_TRANSPORT``.
        encryption: their ``RINGREDUCE_ENCRYPTION``.
        log_dir: their ``RINGREDUCE_LOG_DIR``, made when it is not there; what each worker
            prints is kept there too, in ``rank-0.log`` and so on.
        prefix: whether lines begin with the rank that wrote them.
        stdout, stderr: where lines go; the process's own by default.

    Raises:
        ConfigError: `log_dir` cannot be written to.
    """
    job = _Job(prefix=prefix, stdout=stdout or sys.stdout, stderr=stderr or sys.stderr)
    with job.signals(), job.guard():
        try:
            choices: dict[str, Any] = {}
            if timeout_s is not None:
                choices |= {"timeout_s": timeout_s, "join_timeout_s": timeout_s}
            if transport is not None:
                choices["transport"] = transport
            if encryption is not None:
                choices["encryption"] = encryption
            # The user's own goes to the workers by the variables that it came in.
            if not configured_secret():
                choices["secret"] = secrets.token_hex(32)
            if log_dir is not None:
                choices["log_dir"] = str(Path(log_dir).absolute())
                job.keep_output(Path(log_dir), size)
            job.start(command, size, threads or default_threads(size), choices)
            job.watch()
        finally:
            job.stop(grace_s=0.0)
            job.close_output()
    return job.conclude()


def default_threads(size: int) -> int:
    """Compute threads for each of `size` workers: this process's cores shared out, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = psutil.cpu_count() or 1
    return max(1, cores // size)


class _Worker:
    """A worker process and what is known of it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.traceback_s: float | None = None
        self.exit_s: float | None = None
        self.stopped_by_us = False
        self.readers: list[_Reader] = []

    @property
    def alive(self) -> bool:
        return self.exit_s is None

    def send(self, number: int) -> None:
        """Signal the worker and the children in its group; nothing if they are gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def ask_for_record(self) -> None:
        """Have the worker write its flight record; its children would die of the signal."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def has_exited(self) -> bool:
        """Whether it has ended; left unreaped, so that its number stays its own."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def failure(self) -> Failure | None:
        """How it failed, or None if it did not, or only because we stopped it."""
        code = self.process.returncode
        if self.alive or code == 0 or self.stopped_by_us:
            return None
        when = self.exit_s if self.traceback_s is None else self.traceback_s
        return Failure(self.rank, code, when or 0.0, last_traceback(list(self.tail)))


class _Job:
    """All workers of one run."""

    def __init__(self, *, prefix: bool, stdout: TextIO, stderr: TextIO) -> None:
        self._prefix, self._stdout, self._stderr = prefix, stdout, stderr
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._signals: deque[int] = deque()
        self._ended_by: int | None = None
        self._stop_s: float | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._kept: list[TextIO] = []
        self._keeps_records = False
        self._asked_s: float | None = None

    @contextlib.contextmanager
    def signals(self):  # type: ignore[no-untyped-def]
        """Within, signals are noted for `watch` to pass on."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def guard(self):  # type: ignore[no-untyped-def]
        """Within, a guard process stands by."""
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            yield
        finally:
            assert self._guard.stdin is not None
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
            self._guard.wait()

    def _tell_guard(self, change: str, worker: _Worker) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.write(f"{change}{worker.process.pid}\n".encode())
            self._guard.stdin.flush()

    def keep_output(self, folder: Path, size: int) -> None:
        """Write what each worker prints into a file of `folder` too, as it comes."""
        self._keeps_records = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(size):
                path = folder / f"rank-{rank}.log"
                self._kept.append(path.open("w", encoding="utf-8"))
        except OSError as error:
            self.close_output()
            raise ConfigError(
                f"cannot keep the workers' output in {folder}: {error}",
                remedy="Give --log-dir, or RINGREDUCE_LOG_DIR, a folder that can be written to.",
            ) from error

    def close_output(self) -> None:
        """Close the files of `keep_output`."""
        kept, self._kept = self._kept, []
        for file in kept:
            with contextlib.suppress(OSError):
                file.close()

    def start(
        self, command: Sequence[str], size: int, threads: int, choices: Mapping[str, Any]
    ) -> None:
        # The port is taken here and inherited by rank 0, so that nobody else can get it in
        # between, and a rank that connects early waits instead of being refused.
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
                self._spawn(command, rank, environment, inherited)

    def _spawn(
        self,
        command: Sequence[str],
        rank: int,
        environment: Mapping[str, str],
        inherited: tuple[int, ...],
    ) -> None:
        process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=inherited,
            preexec_fn=_prepare(os.getpid(), ignored=self._record_signals()),
        )
        worker = _Worker(rank, process)
        self._workers.append(worker)
        self._tell_guard("+", worker)
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, target in ((process.stdout, self._stdout), (process.stderr, self._stderr)):
            os.set_blocking(stream.fileno(), False)
            reader = _Reader(stream, worker, target, self)
            worker.readers.append(reader)
            self._selector.register(stream, selectors.EVENT_READ, reader)

    def watch(self) -> None:
        """Until every worker has ended: show output, pass on signals, stop after a failure."""
        while any(worker.alive for worker in self._workers):
            self._read(TIMES.poll_s)
            while self._signals:
                self._pass_on(self._signals.popleft())
            self._reap()
            if self._stop_s is None and self._is_doomed() and self._have_recorded():
                self.stop(TIMES.grace_s)
            elif self._stop_s is not None and time.monotonic() >= self._stop_s:
                self._kill()
        deadline = time.monotonic() + TIMES.drain_s
        while self._selector.get_map() and time.monotonic() < deadline:
            self._read(TIMES.poll_s)

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data.read()

    def finished(self, stream: IO[bytes]) -> None:
        """Forget a stream that has ended."""
        self._selector.unregister(stream)
        stream.close()

    def show(self, worker: _Worker, target: TextIO, lines: list[str]) -> None:
        """Write whole lines of one worker."""
        now = time.monotonic()
        for line in lines:
            if target is self._stderr:
                worker.tail.append(line)
                if is_traceback_start(line):
                    worker.traceback_s = now
        text = "".join(f"{self._mark(worker, target)}{line}\n" for line in lines)
        _write(target, text)
        if self._kept:
            self._keep(worker, lines)

    def _keep(self, worker: _Worker, lines: list[str]) -> None:
        try:
            self._kept[worker.rank].writelines(f"{line}\n" for line in lines)
            self._kept[worker.rank].flush()
        except OSError as error:
            # The job is worth more than its log; the lines were shown.
            self._say(f"no longer keeps the workers' output: {error}")
            self.close_output()

    def _mark(self, worker: _Worker, target: TextIO) -> str:
        if not self._prefix:
            return ""
        mark = f"[{worker.rank:>{len(str(len(self._workers) - 1))}}]"
        if target.isatty() and color_wanted():
            mark = f"\x1b[{_COLORS[worker.rank % len(_COLORS)]}m{mark}\x1b[0m"
        return mark + " "

    def _pass_on(self, number: int) -> None:
        repeated = self._ended_by is not None and number in _STOPPING
        for worker in self._workers:
            if worker.alive and number in self._record_signals():
                worker.ask_for_record()
            elif worker.alive:
                worker.send(signal.SIGKILL if repeated else number)
        if number in _STOPPING and not repeated:
            self._ended_by = number
            self._stop_s = time.monotonic() + TIMES.grace_s

    def _record_signals(self) -> tuple[int, ...]:
        """What asks workers for flight records in this job.

        Such a signal must not end one that has no communicator yet, and so no handler.
        """
        return (signal.SIGUSR1,) if self._keeps_records else ()

    def _reap(self) -> None:
        for worker in self._workers:
            if worker.alive and worker.has_exited():
                worker.send(signal.SIGKILL)  # its own children, if it left any
                worker.process.wait()
                for reader in worker.readers:
                    # What it said last decides what is made of its end.
                    while reader.read():
                        pass
                worker.exit_s = time.monotonic()
                self._tell_guard("-", worker)

    def _is_doomed(self) -> bool:
        """Whether a worker has failed and nothing more is to be learned by waiting."""
        failures = [failure for worker in self._workers if (failure := worker.failure())]
        cause = first_cause(failures)
        if cause is None:
            return False
        if not cause.is_consequence:
            return True
        first_exit = min(w.exit_s for w in self._workers if w.failure() and w.exit_s is not None)
        return time.monotonic() - first_exit >= TIMES.cause_s

    def _have_recorded(self) -> bool:
        """Whether the workers that still run have had the time to write flight records."""
        if not self._keeps_records:
            return True
        now = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now
            # One in user code may not notice by itself, and where it is may tell something.
            for worker in self._workers:
                if worker.alive:
                    worker.ask_for_record()
        return now - self._asked_s >= TIMES.record_s

    def stop(self, grace_s: float) -> None:
        """Ask the workers that still run to end; `watch` kills them after `grace_s`."""
        self._stop_s = time.monotonic() + grace_s
        self._reap()  # Whoever has ended by now has done so without us.
        for worker in self._workers:
            if worker.alive:
                worker.stopped_by_us = True
                worker.send(signal.SIGTERM)
        if grace_s == 0:
            self._kill()
            while any(worker.alive for worker in self._workers):
                self._reap()
                time.sleep(0.01)

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.alive:
                worker.stopped_by_us = True
                worker.send(signal.SIGKILL)

    def conclude(self) -> int:
        """Say what failed, the cause first; return the job's exit code."""
        failures = [failure for worker in self._workers if (failure := worker.failure())]
        cause = first_cause(failures)
        if self._ended_by is not None:
            name = signal.Signals(self._ended_by).name
            self._say(f"stopped by {name}")
            return 128 + self._ended_by
        if cause is None:
            return 0
        self._say(f"rank {cause.rank} failed first ({cause.describe()}); all workers were stopped")
        for line in cause.traceback:
            self._say(f"  {line}")
        others = [f for f in failures if f is not cause]
        for failure in sorted(others, key=lambda f: f.time_s):
            what = f": {failure.exception}" if failure.exception else ""
            self._say(f"then rank {failure.rank} ({failure.describe()}){what}")
        return cause.exit_code

    def _say(self, text: str) -> None:
        _write(self._stderr, f"ringreduce: {text}\n")


def _write(target: TextIO, text: str) -> None:
    """Write and flush; a reader that has gone, as in `| head`, must not end the job."""
    try:
        target.write(text)
        target.flush()
    except OSError:
        # What is left in the buffer would fail again when Python flushes it at its end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target.fileno())
        os.close(nowhere)


class _Reader:
    """One stream of one worker."""

    def __init__(self, stream: IO[bytes], worker: _Worker, target: TextIO, job: _Job) -> None:
        self._stream, self._worker, self._target, self._job = stream, worker, target, job
        self._lines = LineBuffer()

    def read(self) -> bool:
        """Show what has come; whether there may be more at once."""
        data = None if self._stream.closed else self._stream.read(1 << 16)
        if data is None:
            return False
        lines = self._lines.feed(data) if data else self._lines.flush()
        if lines:
            self._job.show(self._worker, self._target, lines)
        if not data:
            self._job.finished(self._stream)
        return bool(data)


def _prepare(parent: int, *, ignored: Sequence[int]) -> Callable[[], None] | None:
    """Run in the child before its program: have the kernel kill it when the launcher dies."""
    on_linux = sys.platform == "linux"
    if not on_linux and not ignored:
        return None
    prctl = ctypes.CDLL(None).prctl if on_linux else None

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if prctl is None:
            return
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before we asked.
            os._exit(1)

    return prepare
