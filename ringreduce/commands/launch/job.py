"""One attempt at a job: its workers, from their start to their end, and how it failed.

One loop in one thread waits for output, signals and exits together.
"""

from __future__ import annotations

import secrets
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringreduce.commands.launch.conclusion import conclude, others, wanted_keyboard
from ringreduce.commands.launch.display import Display
from ringreduce.commands.launch.failure import Failure, first_cause
from ringreduce.commands.launch.logs import Logs
from ringreduce.commands.launch.processes import Guard, Stream, Worker
from ringreduce.commands.launch.screen import Screen
from ringreduce.commands.launch.signals import STOPPING
from ringreduce.commands.launch.terminal import Terminal
from ringreduce.vocabulary.config import TIMES, Config, configured_secret, worker_environment


@dataclass(frozen=True)
class Plan:
    """What a job runs, in every attempt.

    Attributes:
        threads: compute threads of each worker.
        output: whose lines are shown as they come (`display.OUTPUTS`).
        tracebacks: whose tracebacks are shown (`conclusion.TRACEBACKS`).
        stdin_rank: the rank that gets the launcher's standard input, or its terminal.
        choices: fields of `Config` that the user chose.
        inherited: for each rank, descriptors that its process gets, and whose numbers stand after
            the command's arguments; empty: none.
    """

    command: Sequence[str]
    size: int
    threads: int
    output: str
    tracebacks: str
    stdin_rank: int | None
    choices: Mapping[str, Any]
    inherited: Sequence[Sequence[int]] = ()


class Job:
    """All workers of one attempt.

    Args:
        attempt: how often the job was started before.
        signals: those that have arrived at the launcher; `_watch` passes them on.
    """

    def __init__(
        self,
        plan: Plan,
        attempt: int,
        screen: Screen,
        logs: Logs | None,
        guard: Guard,
        signals: deque[int],
    ) -> None:
        self._plan, self._attempt = plan, attempt
        self._screen, self._guard, self._signals = screen, guard, signals
        self._display = Display(screen, logs, plan.size, plan.output, plan.stdin_rank)
        self._terminal: Terminal | None = None
        # They ask workers for flight records, and must not kill one that has no communicator yet,
        # and so no handler.
        self._record_signals = (signal.SIGUSR1,) if "log_dir" in plan.choices else ()
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self.ended_by: int | None = None
        self._stop_s: float | None = None
        self._asked_s: float | None = None

    def run(self) -> None:
        """Start the workers, and wait until all have ended.

        After a failure, tracebacks are left for `conclude` or `consequences`.
        """
        try:
            self._start()
            self._watch()
        finally:
            self._stop(grace_s=0.0)
            self._take_terminal_back()
            self._selector.close()
        self._display.end_lines()
        cause = self.cause
        if self.ended_by is not None or cause is None:
            self._display.release(range(self._plan.size))
        else:
            self._display.reveal(cause.rank)

    @property
    def cause(self) -> Failure | None:
        """The failure that caused the others; None when there is none."""
        return first_cause(self._failures())

    @property
    def may_start_again(self) -> bool:
        """Whether a worker failed, and nobody asked for the end."""
        cause = self.cause
        # Ctrl-C may have reached a worker alone.
        return (
            cause is not None
            and self.ended_by is None
            and not any(number in STOPPING for number in self._signals)
            and cause.returncode != -signal.SIGINT
        )

    def _start(self) -> None:
        plan = self._plan
        choices = dict(plan.choices)
        # Workers read the user's own secret from the environment.
        if not configured_secret():
            choices["secret"] = secrets.token_hex(32)
        # Rank 0 inherits the listening socket, so that no other program can take the port, and a
        # rank that connects early waits instead of being refused.
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, plan.size)) as listener:
            listener.setblocking(False)
            job_id = secrets.token_hex(8)
            for rank in range(plan.size):
                meeting = (listener.fileno(),) if rank == 0 else ()
                own = plan.inherited[rank] if plan.inherited else ()
                config = Config(
                    rank=rank,
                    size=plan.size,
                    local_rank=rank,
                    local_size=plan.size,
                    rendezvous=f"127.0.0.1:{listener.getsockname()[1]}",
                    rendezvous_fd=meeting[0] if meeting else None,
                    job_id=job_id,
                    restart=self._attempt,
                    **choices,
                )
                has_stdin = rank == plan.stdin_rank
                if has_stdin and Terminal.is_possible():
                    self._terminal = Terminal(self._screen.columns)
                    self._selector.register(
                        self._terminal.keyboard, selectors.EVENT_READ, self._terminal.read_keys
                    )
                worker = Worker(
                    rank,
                    [*plan.command, *map(str, own)],
                    worker_environment(
                        config,
                        plan.threads,
                        decided=choices,
                        columns=self._screen.columns,
                        skips_breakpoints=plan.stdin_rank not in (None, rank),
                    ),
                    has_stdin=has_stdin,
                    terminal=self._terminal if has_stdin else None,
                    inherited=(*meeting, *own),
                    ignored=self._record_signals,
                )
                self._workers.append(worker)
                self._guard.add(worker)
                for stream in worker.streams:
                    self._selector.register(
                        stream.file, selectors.EVENT_READ, partial(self._read, stream)
                    )

    def _watch(self) -> None:
        """Until every worker has ended: show output, pass on signals, stop after a failure."""
        while self._running():
            self._read_all()
            while self._signals:
                self._pass_on(self._signals.popleft())
            self._reap()
            if self._terminal is not None:
                self._terminal.resize(self._screen.columns)
                self._terminal.pass_keys()
            self._display.tick(releases=not self._failures())
            if self._stop_s is None and self._is_doomed() and self._have_recorded():
                self._stop(TIMES.grace_s)
            elif self._stop_s is not None and time.monotonic() >= self._stop_s:
                self._end(signal.SIGKILL)
        deadline = time.monotonic() + TIMES.drain_s
        while self._selector.get_map() and time.monotonic() < deadline:
            self._read_all()

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.alive]

    def _read_all(self) -> None:
        for key, _ in self._selector.select(TIMES.poll_s):
            key.data()

    def _read(self, stream: Stream) -> bool:
        """Show what has arrived on a stream; return whether there may be more now."""
        lines = stream.read()
        if lines is not None:
            self._display.update(stream.source, lines, stream.partial)
        if stream.has_ended and not stream.file.closed:
            self._selector.unregister(stream.file)
            stream.file.close()
        return lines is not None and not stream.has_ended

    def _pass_on(self, number: int) -> None:
        repeated = self.ended_by is not None and number in STOPPING
        for worker in self._running():
            if number in self._record_signals:
                worker.ask_for_record()
            else:
                worker.send(signal.SIGKILL if repeated else number)
        if number in STOPPING and not repeated:
            self.ended_by = number
            self._stop_s = time.monotonic() + TIMES.grace_s

    def _reap(self) -> None:
        for worker in self._running():
            if worker.reap():
                for stream in worker.streams:
                    # Its last lines decide whether its failure is the cause.
                    while self._read(stream):
                        pass
                self._guard.remove(worker)
                if worker.rank == self._plan.stdin_rank:
                    self._take_terminal_back()
                if worker.failure() is None and self._stop_s is None:
                    self._display.release([worker.rank])

    def _take_terminal_back(self) -> None:
        if self._terminal is not None:
            self._selector.unregister(self._terminal.keyboard)
            self._terminal.close()
            self._terminal = None

    def _failures(self) -> list[Failure]:
        found = [failure for worker in self._workers if (failure := worker.failure())]
        if not found or not all(failure.is_consequence for failure in found):
            return found
        # The cause may have been about to end when it was stopped; others may have logged
        # tracebacks long ago.
        late = [failure for worker in self._workers if (failure := worker.unfinished_failure())]
        late = [failure for failure in late if not failure.is_consequence]
        return found + sorted(late, key=lambda failure: failure.time_s)[-1:]

    def _is_doomed(self) -> bool:
        """Whether a worker has failed and the cause is known, or has had time to show."""
        cause = self.cause
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

    def _stop(self, grace_s: float) -> None:
        """Ask the workers that still run to end; `_watch` kills them after `grace_s`."""
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

    def consequences(self) -> list[str]:
        """A line for each rank but the cause that failed; once, with their tracebacks if wanted."""
        cause = self.cause
        if cause is None:
            return []
        held = self._display.take_held()
        return others(cause, self._failures(), held, self._plan.tracebacks)

    def conclude(self) -> int:
        """Print what failed, the cause first; return the exit code."""
        if self.ended_by is not None:
            self._screen.say(f"stopped by {signal.Signals(self.ended_by).name}")
            return 128 + self.ended_by
        cause = self.cause
        if cause is None:
            return 0
        held = self._display.take_held()
        for line in conclude(cause, self._failures(), held, self._plan.tracebacks):
            self._screen.say(line)
        if wanted_keyboard(cause) and self._plan.stdin_rank is None:
            self._screen.say(f"--stdin {cause.rank} gives rank {cause.rank} the keyboard")
        return cause.exit_code
