"""What ranks tell the program that has called `run`, while Spark waits for their results.

    rank -- Here, Output, Failed --> driver

Over a connection of each rank's own. Spark shows what a task has led to when all have ended, and
not which rank it was. A rank that cannot reach the driver says nothing, and works all the same.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ringreduce.commands.launch.exchange import Output
from ringreduce.commands.launch.frames import NONCE_BYTES, Channel
from ringreduce.commands.launch.output import LineBuffer
from ringreduce.commands.launch.worker_records import Raised
from ringreduce.transport.listening import Bind, listen
from ringreduce.vocabulary.endpoints import host_and_port
from ringreduce.vocabulary.errors import ConfigError

_PIECE_BYTES = 1 << 15
_CONNECT_S = 5.0


class Here(msgspec.Struct, tag=True, frozen=True):
    """A rank has its place, as the task of that partition; `attempt` counts restarts."""

    rank: int
    size: int
    host: str
    attempt: int
    partition: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The function has raised this on the rank."""

    rank: int
    attempt: int
    raised: Raised


_Record = Here | Output | Failed


class Desk:
    """The driver's end: listens at `host`, and passes on what ranks write. A context.

    It has threads of its own, which end with the context. `show` gets each whole line of a rank,
    and whether it was an error's.
    """

    def __init__(self, host: str, show: Callable[[str, bool], None]) -> None:
        self.secret = secrets.token_hex(32)
        self._show, self._lock = show, threading.Lock()
        # By attempt: the ranks that have come, and what they failed by, with the time.
        self.places: dict[int, dict[int, Here]] = {}
        self.failures: dict[int, dict[int, tuple[float, Raised]]] = {}
        numeric = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        (self._listener,) = listen(Bind((str(numeric),)), rank=0, size=1)
        self._listener.setblocking(True)
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._readers: list[threading.Thread] = []
        self._waiting = threading.Thread(target=self._accept, name="rr-spark-desk", daemon=True)

    def __enter__(self) -> Desk:
        self._waiting.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A listener that is shut down wakes who accepts; a connection, who reads.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._waiting.join()
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)
        for reader in self._readers:
            reader.join()

    def latest(self) -> int:
        """The number of the latest attempt in which a rank has come; -1: none has."""
        with self._lock:
            return max(self.places, default=-1)

    def of_attempt(self, attempt: int) -> tuple[dict[int, Here], dict[int, tuple[float, Raised]]]:
        """The ranks that have come in it, and what they have failed by."""
        with self._lock:
            return dict(self.places.get(attempt, {})), dict(self.failures.get(attempt, {}))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                self._ends.append(end)
                name = f"rr-spark-reader-{len(self._readers)}"
                reader = threading.Thread(target=self._read, args=(end,), name=name, daemon=True)
                self._readers.append(reader)
                reader.start()

    def _read(self, end: socket.socket) -> None:
        """Read one rank's records, until it or the desk ends, or for what is no rank's."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        channel: Channel[Any] = Channel(_Record, self.secret, nonce, is_first=True)
        lines = {False: LineBuffer(), True: LineBuffer()}
        with end, contextlib.suppress(OSError, ConfigError):
            end.sendall(channel.opening)
            while data := end.recv(_PIECE_BYTES):
                for record in channel.feed(data):
                    self._take(record, lines)
        for is_error, buffer in lines.items():
            for line in buffer.feed(b""):
                self._show(line, is_error)

    def _take(self, record: _Record, lines: dict[bool, LineBuffer]) -> None:
        if isinstance(record, Output):
            for line in lines[record.is_error].feed(record.data) if record.data else ():
                self._show(line, record.is_error)
            return
        with self._lock:
            if isinstance(record, Here):
                self.places.setdefault(record.attempt, {})[record.rank] = record
            else:
                told = time.monotonic(), record.raised
                self.failures.setdefault(record.attempt, {}).setdefault(record.rank, told)


class Caller:
    """A rank's end; without a connection it does nothing."""

    def __init__(self, address: str, secret: str) -> None:
        self._end: socket.socket | None = None
        self._lock = threading.Lock()
        try:
            end = socket.create_connection(host_and_port(address), timeout=_CONNECT_S)
        except OSError:
            return
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._channel: Channel[Any] = Channel(_Record, secret, nonce, is_first=False)
        try:
            end.sendall(self._channel.opening)
            while not self._channel.is_open:
                if not (data := end.recv(_PIECE_BYTES)):
                    raise ConnectionError("the driver has closed the connection")
                self._channel.feed(data)
        except (OSError, ConfigError):
            end.close()
            return
        self._end = end

    @property
    def is_heard(self) -> bool:
        """Whether somebody reads what it tells."""
        return self._end is not None

    def tell(self, record: _Record) -> None:
        """Send a record; what cannot be sent is left out, and all that would follow."""
        with self._lock:
            if self._end is None:
                return
            try:
                self._end.sendall(self._channel.encode(record))
            except OSError:
                self._end.close()
                self._end = None

    def close(self) -> None:
        """End the connection, when all that was told has been handed to the system."""
        with self._lock:
            if self._end is not None:
                self._end.close()
                self._end = None

    @contextlib.contextmanager
    def passing_on(self, rank: int) -> Iterator[None]:
        """Tell what this process writes in the block, which its own outputs get too."""
        with contextlib.ExitStack() as stack:
            for stream, number, is_error in ((sys.stdout, 1, False), (sys.stderr, 2, True)):
                stack.enter_context(_copied(stream, number, self._writer(rank, is_error)))
            yield

    def _writer(self, rank: int, is_error: bool) -> Callable[[bytes], None]:
        return lambda data: self.tell(Output(rank, is_error, data))


@contextlib.contextmanager
def _copied(stream: Any, number: int, take: Callable[[bytes], None]) -> Iterator[None]:
    """Give `take` all that is written to descriptor `number`, which its file gets as well.

    A thread reads it, which ends with the block, when no process has the pipe's other end any
    more: one that the block has started and left behind keeps it.
    """
    stream.flush()
    kept = os.dup(number)
    reading, writing = os.pipe()
    os.dup2(writing, number)
    os.close(writing)

    def copy() -> None:
        while data := os.read(reading, _PIECE_BYTES):
            with contextlib.suppress(OSError):
                os.write(kept, data)
            take(data)
        os.close(reading)
        os.close(kept)

    thread = threading.Thread(target=copy, name=f"rr-spark-output-{number}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stream.flush()
        os.dup2(kept, number)
        thread.join(_CONNECT_S)
