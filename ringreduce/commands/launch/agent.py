"""Runs the ranks of a host for a launcher on another one, which reaches it through ssh.

Standard input and output are the connection (`exchange`). When that ends, however it ends, the
ranks are killed, with their children: the launcher ended, or nobody can see them any more.
"""

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections import deque
from typing import TypeVar

from ringreduce._version import __version__
from ringreduce.commands.launch import exchange
from ringreduce.commands.launch.frames import Records, encode
from ringreduce.commands.launch.local import LocalHost, cores_of, listen
from ringreduce.commands.launch.processes import Guard
from ringreduce.commands.launch.program import check_program
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import RingReduceError
from ringreduce.vocabulary.worker_environment import ports_wanted

_PIECE_BYTES = 1 << 16
_Order = TypeVar("_Order")


class _EndedError(Exception):
    """The connection to the launcher has ended."""


class _Connection:
    """The launcher's end of standard input and output."""

    def __init__(self) -> None:
        self._output = os.dup(1)  # What else writes to standard output must not get into a record.
        os.dup2(2, 1)
        os.set_blocking(self._output, False)
        self._orders: Records[exchange.Order] = Records(exchange.Order)
        self.arrived: deque[exchange.Order] = deque()  # those that have arrived and were not taken
        self._received_s = time.monotonic()
        self._write(exchange.MAGIC + encode(exchange.Hello(__version__)))

    def send(self, report: exchange.Report) -> None:
        """Send a record; waits while the connection is full. Raises `_EndedError`."""
        self._write(encode(report))

    def receive(self) -> None:
        """Read orders; called when standard input is readable. Raises `_EndedError` at its end."""
        data = os.read(0, _PIECE_BYTES)
        if not data:
            raise _EndedError
        self._received_s = time.monotonic()
        self.arrived += self._orders.feed(data)

    def wait(self, kind: type[_Order]) -> _Order:
        """The next order of this kind. Raises `_EndedError`."""
        while True:
            while self.arrived:
                if isinstance(order := self.arrived.popleft(), kind):
                    return order
            if select.select([0], [], [], TIMES.poll_s)[0]:
                self.receive()
            self.check()

    def check(self) -> None:
        """Raise `_EndedError` if nothing came for long, as when a network was cut."""
        if time.monotonic() - self._received_s >= TIMES.agent_silent_s:
            print("nothing came from the launcher for long", file=sys.stderr)
            raise _EndedError

    def _write(self, data: bytes) -> None:
        try:
            while data:
                # Also reads, so that a full connection is told from one that has ended.
                readable, writable, _ = select.select([0], [self._output], [], TIMES.poll_s)
                if readable:
                    self.receive()
                if writable:
                    with contextlib.suppress(BlockingIOError):
                        data = data[os.write(self._output, data) :]
                self.check()
        except OSError:
            raise _EndedError from None


def main() -> None:
    """Run what the launcher assigns, until that has ended or the launcher has."""
    # It ends by its standard input, after its ranks. Not SIG_IGN, which they would inherit.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(_EndedError):
        connection = _Connection()
        assignment = connection.wait(exchange.Assignment)
        try:
            check_program(assignment.arguments)
            cores_of(assignment)
            listener = _listen(assignment)
        except RingReduceError as error:
            connection.send(exchange.Refused(str(error)))
            return
        connection.send(exchange.Ready(listener.getsockname()[1] if listener else 0))
        _run(connection, assignment, connection.wait(exchange.Start).port, listener)


def _run(
    connection: _Connection,
    assignment: exchange.Assignment,
    port: int,
    listener: socket.socket | None,
) -> None:
    with Guard() as guard, selectors.DefaultSelector() as selector:
        host = LocalHost(assignment, selector, guard)
        try:
            host.start(port, listener)
            if listener is not None:
                listener.close()
            selector.register(0, selectors.EVENT_READ, connection.receive)
            _watch(connection, host, selector)
        finally:
            for rank in host.started:
                host.send(rank, signal.SIGKILL)
            host.close()


def _watch(connection: _Connection, host: LocalHost, selector: selectors.BaseSelector) -> None:
    """Report what the ranks do, and pass signals on, until all have ended."""
    running = set(host.started)
    while running:
        events: list[exchange.Event] = []
        for key, _ in selector.select(TIMES.poll_s):
            events += key.data() or ()
        while connection.arrived:
            if isinstance(order := connection.arrived.popleft(), exchange.Signal):
                host.send(order.rank, order.number)
            elif isinstance(order, exchange.Told | exchange.Ended):
                host.inform(order)
        events += host.poll()
        for event in events:
            host.inform(event)
            if isinstance(event, exchange.Ended):
                running.discard(event.rank)
            connection.send(event)
        connection.check()


def _listen(assignment: exchange.Assignment) -> socket.socket | None:
    """The socket at which the ranks meet, if rank 0 is here; ConfigError if it cannot listen."""
    placed = assignment.placed
    if placed.first_rank > 0 or placed.size == 1:
        return None
    return listen(
        assignment.meeting_host,
        placed.port,
        placed.size,
        is_reached_by_others=assignment.is_reached_by_others,
        remedy="Name an address of this host, which all hosts reach, with --rendezvous ADDRESS or "
        "--rendezvous ADDRESS:PORT.",
        ports=ports_wanted(assignment.variables),
    )


if __name__ == "__main__":
    main()
