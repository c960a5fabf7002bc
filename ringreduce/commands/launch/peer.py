"""The connection between two launchers of a job with ``--nnodes``."""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence

from ringreduce.commands.launch.frames import Alive
from ringreduce.commands.launch.node_messages import NONCE_BYTES, Channel, Join, Record
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ConfigError

_PIECE_BYTES = 1 << 16


class Peer:
    """The connection with another launcher.

    Attributes:
        join: what it has said of itself, on node 0.
        host, first_rank: its host, and the first of its ranks.
        is_done: whether its ranks have ended well.
        has_failed: whether it has said which rank failed.
        is_gone: whether the connection has ended.
        stranger: what is at the other end, if it is no launcher of this job.
    """

    def __init__(self, end: socket.socket, secret: str, *, is_first: bool) -> None:
        self.end = end
        self._channel = Channel(secret, secrets.token_bytes(NONCE_BYTES), is_first=is_first)
        self._waiting: deque[Record] = deque()
        self._sent_s = self._received_s = time.monotonic()
        self.join: Join | None = None
        self.host, self.first_rank, self.stranger = "", 0, ""
        self.is_done = self.has_failed = self.is_gone = False
        end.settimeout(TIMES.agent_end_s)
        self._write(self._channel.opening)

    def send(self, record: Record) -> None:
        """Send a record, once the other end has begun; does nothing if it has gone."""
        self._waiting.append(record)
        self._sent_s = time.monotonic()
        self._flush()

    def keep_alive(self) -> None:
        """Show now and then that this launcher lives; note whether the other one does."""
        now_s = time.monotonic()
        if now_s - self._sent_s >= TIMES.agent_ping_s:
            self.send(Alive())
        if now_s - self._received_s >= TIMES.agent_silent_s:
            self.is_gone = True

    def read(self) -> Sequence[Record]:
        """What has arrived."""
        try:
            data = self.end.recv(_PIECE_BYTES)
            records = self._channel.feed(data)
        except OSError:
            data = b""
        except ConfigError as error:
            data, self.stranger = b"", error.message
        if not data:
            self.is_gone = True
            return []
        self._received_s = time.monotonic()
        self._flush()
        return records

    def _flush(self) -> None:
        while self._channel.is_open and self._waiting:
            self._write(self._channel.encode(self._waiting.popleft()))

    def _write(self, data: bytes) -> None:
        try:
            self.end.sendall(data)
        except OSError:
            self.is_gone = True
