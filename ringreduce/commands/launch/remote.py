"""The ranks of another host: an agent there (`agent.py`), reached through ssh.

All that crosses is in `exchange`; ssh carries and encrypts it. The secret and the environment go
over standard input, since every user of a host can read the arguments of its processes.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque

from ringreduce._version import __version__
from ringreduce.commands.launch import exchange
from ringreduce.commands.launch.frames import Records, encode
from ringreduce.commands.launch.hosts import Host
from ringreduce.commands.launch.local import standing_of
from ringreduce.commands.launch.output import LineBuffer
from ringreduce.commands.launch.processes import Guard, Pipe
from ringreduce.commands.launch.screen import Screen
from ringreduce.commands.launch.spread import Spread
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.worker_environment import environment_without_secret

_SAID_LINES = 20
LOST_CODE = 255  # what ssh itself returns when it fails


class RemoteHost:
    """An agent's ranks; `selector` gets its outputs, with callables that return what they bring.

    The `screen` shows lines from ssh and the agent's standard error. ConfigError: there is no ssh.
    """

    def __init__(
        self,
        host: Host,
        assignment: exchange.Assignment,
        spread: Spread,
        selector: selectors.BaseSelector,
        guard: Guard,
        screen: Screen,
    ) -> None:
        self.name, self._login, self.ranks = host.name, host.login, assignment.ranks
        self._assignment, self._spread = assignment, spread
        # Where the ranks meet on rank 0's host, once the agent is ready; elsewhere 0.
        self.port: int | None = None
        self.has_started = False
        self.refusal = ""  # why the ranks cannot be started, if they cannot
        self._said: deque[str] = deque(maxlen=_SAID_LINES)
        self._guard, self._screen = guard, screen
        self._running = set(assignment.ranks)
        self._killed: set[int] = set()
        self._reports: Records[exchange.Report] = Records(exchange.Report, after=exchange.MAGIC)
        self._lines = LineBuffer()
        self._unsent = b""
        self._begun_s = self._sent_s = time.monotonic()
        self._is_over = False
        self._why = ""
        self._due_s: float | None = None  # since when it should have ended
        command = spread.command(host)
        try:
            # Apart from the terminal's Ctrl-C: the ranks must get it, over this connection.
            self._process = subprocess.Popen(
                command,
                env=environment_without_secret(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot run {command[0]!r} to reach {host.name}: {error.strerror}",
                remedy="Install OpenSSH's client, or name another program with --ssh.",
            ) from None
        guard.add(self._process.pid)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin = process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._pipes = (
            Pipe(process.stdout, selector, self._take_reports),
            Pipe(process.stderr, selector, self._take_lines),
        )

    def start(self, port: int) -> None:
        self.has_started = True
        self._send(exchange.Start(port))

    def send(self, rank: int, number: int) -> None:
        """Send a signal, as `LocalHost.send` does."""
        if not self.has_started:
            # Nothing runs yet that could end by itself.
            if number not in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
                self._abandon("it was not needed any more")
            return
        if number == signal.SIGKILL:
            if rank in self._killed:
                return
            self._killed.add(rank)
            self._due_s = self._due_s or time.monotonic()
        self._send(exchange.Signal(rank, number))

    def inform(self, event: exchange.Event) -> None:
        """As `LocalHost.inform`; of its own ranks an agent knows before."""
        is_news = event.rank not in self.ranks and standing_of(event) is not None
        if is_news and self.has_started and not self._is_over:
            assert not isinstance(event, exchange.Output)
            self._send(event)

    def poll(self) -> list[exchange.Event]:
        """Keep the connection alive; what it brought last, and lost ranks, once it has ended."""
        if self._is_over:
            return []
        now_s = time.monotonic()
        if now_s - self._sent_s >= TIMES.agent_ping_s:
            self._send(exchange.Alive())
        self._flush()
        if self.port is None and now_s - self._begun_s >= TIMES.agent_start_s:
            self._abandon(f"it was not ready within {TIMES.agent_start_s:g} s")
        if self._due_s is not None and now_s - self._due_s >= TIMES.agent_end_s:
            self._abandon("its ranks did not end")
        if self._process.poll() is None:
            return []
        self._is_over = True
        events = [event for pipe in self._pipes for event in pipe.drain()]
        self._guard.remove(self._process.pid)
        why = self._describe_end() if self._running else ""
        self.refusal = "" if self.has_started else f"cannot start on {self.name}: {why}"
        how = f"its host was lost: {why}"
        return events + [exchange.Ended(rank, LOST_CODE, how) for rank in sorted(self._running)]

    def leave(self) -> None:
        """Begin to close; the ranks have ended."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def close(self) -> None:
        """Wait for ssh to end, and end it if it does not."""
        self.leave()
        try:
            self._process.wait(TIMES.agent_end_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in self._pipes:
            pipe.close()
        if not self._is_over:
            self._guard.remove(self._process.pid)
            self._is_over = True

    def _abandon(self, why: str) -> None:
        """End the connection; the agent then ends its ranks."""
        self._why = self._why or why
        self._process.kill()

    def _describe_end(self) -> str:
        code = self._process.returncode
        if self._why or not self.has_started:
            return self._why or self._spread.explain(self._login, code, self._said)
        last = next((line for line in reversed(self._said) if line.strip()), "")
        return f"{last or 'the connection ended'} (exit code {code})"

    def _take_reports(self, data: bytes) -> list[exchange.Event]:
        if not data:  # ssh ends with its streams.
            self._due_s = self._due_s or time.monotonic()
        events: list[exchange.Event] = []
        try:
            reports = self._reports.feed(data)
        except ConfigError as error:
            self._abandon(error.message)
            return []
        for report in reports:
            if isinstance(report, exchange.Hello) and report.version != __version__:
                self._abandon(
                    f"it has ringreduce {report.version}, and this host has {__version__}. Install "
                    "the same version on all"
                )
            elif isinstance(report, exchange.Hello):
                self._send(self._assignment)
            elif isinstance(report, exchange.Refused):
                self._abandon(report.text)
            elif isinstance(report, exchange.Ready):
                self.port = report.port
            else:
                events.append(report)
                if isinstance(report, exchange.Ended):
                    self._running.discard(report.rank)
        return events

    def _take_lines(self, data: bytes) -> list[exchange.Event]:
        lines = self._lines.feed(data)
        self._said.extend(lines)
        for line in filter(str.strip, lines):
            self._screen.say(f"{self.name}: {line}")
        return []

    def _send(self, order: exchange.Order) -> None:
        self._sent_s = time.monotonic()
        self._unsent += encode(order)
        self._flush()

    def _flush(self) -> None:
        # A closed connection shows when it is read.
        with contextlib.suppress(OSError, ValueError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
