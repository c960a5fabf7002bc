"""The launchers of a job with ``--nnodes`` while an attempt runs: what ranks elsewhere do."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ringreduce.commands.launch.exchange import Alive, Ended, Join, NodeRecord, Placed, Told
from ringreduce.commands.launch.frames import NONCE_BYTES, Channel
from ringreduce.commands.launch.worker_records import Exits, Raised
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.endpoints import address
from ringreduce.vocabulary.errors import ConfigError

_PIECE_BYTES = 1 << 16


class Node(NamedTuple):
    """A launcher's options: which node it is, and where node 0 listens."""

    own: Join  # what it says of itself
    host: str
    port: int
    secret: str  # the job's; every launcher has it
    join_timeout_s: float  # how long node 0 waits for the others, and they for it

    @property
    def address(self) -> str:
        return address(self.host, self.port)


class Meeting:
    """The launchers of an attempt, from the time when all have come.

    Each tells the others what its ranks do, so that all decide alike; node 0 passes on what the
    others tell. There `listener` is where the ranks meet.
    """

    def __init__(
        self,
        node: Node,
        placed: Placed,
        peers: Sequence[Peer],
        listener: socket.socket | None = None,
    ) -> None:
        self.node, self.placed, self.listener = node, placed, listener
        self._peers = peers
        self._missed: set[Peer] = set()  # those of which `poll` has told that they are gone

    @property
    def hosts(self) -> list[str]:
        return [host for host, count in self.placed.nodes for _ in range(count)]

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` watch the connections, with callables that return what they bring."""
        for peer in self._peers:
            selector.register(peer.end, selectors.EVENT_READ, partial(self._read, peer, selector))

    def poll(self) -> list[int]:
        """Keep the connections alive; return the ranks of launchers that are gone, once."""
        for peer in self._peers:
            if not peer.is_gone:
                peer.keep_alive()
        gone = [peer for peer in self._peers if peer.is_gone and peer not in self._missed]
        self._missed.update(gone)
        return [rank for peer in gone for rank in peer.ranks]

    def tell(self, event: Told | Ended, but: Peer | None = None) -> None:
        """Send the other launchers what a rank does, without texts: nothing is encrypted."""
        if isinstance(event, Told) and isinstance(event.record, Exits):
            event = Told(event.rank, Exits(""))
        elif isinstance(event, Told) and isinstance(event.record, Raised):
            raised = event.record
            told = Raised(raised.kind, raised.peer, raised.origin, code=raised.code)
            event = Told(event.rank, told)
        for peer in self._peers:
            if peer is not but and not peer.is_gone:
                peer.send(event)

    def close(self) -> None:
        for peer in self._peers:
            # What is left to read would make the system drop what was sent.
            with contextlib.suppress(OSError):
                peer.end.setblocking(False)
                while peer.end.recv(_PIECE_BYTES):
                    pass
            peer.end.close()
        if self.listener is not None:
            self.listener.close()

    def _read(self, peer: Peer, selector: selectors.BaseSelector) -> list[Told | Ended]:
        events = [record for record in peer.read() if isinstance(record, Told | Ended)]
        if peer.is_gone:
            selector.unregister(peer.end)
        for event in events:
            self.tell(event, but=peer)
        return events


class Peer:
    """The connection with another launcher, which starts `ranks`."""

    def __init__(self, end: socket.socket, secret: str, *, is_first: bool) -> None:
        self.end = end
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._channel = Channel[NodeRecord](NodeRecord, secret, nonce, is_first=is_first)
        self._waiting: deque[NodeRecord] = deque()
        self._sent_s = self._received_s = time.monotonic()
        self.join: Join | None = None  # what it has said of itself, on node 0
        self.ranks = range(0)
        self.stranger = ""  # what is at the other end, if it is no launcher of this job
        self.is_gone = False  # the connection has ended
        end.settimeout(TIMES.agent_end_s)
        self._write(self._channel.opening)

    def send(self, record: NodeRecord) -> None:
        """Send a record, once the other end has begun; does nothing if it has gone."""
        self._waiting.append(record)
        self._sent_s = time.monotonic()
        self._flush()

    def keep_alive(self, silent_s: float = TIMES.agent_silent_s) -> None:
        """Show now and then that this launcher lives; it is gone if it was silent for so long."""
        now_s = time.monotonic()
        if now_s - self._sent_s >= TIMES.agent_ping_s:
            self.send(Alive())
        if now_s - self._received_s >= silent_s:
            self.is_gone = True

    def read(self) -> Sequence[NodeRecord]:
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
        # A closed connection shows when it is read, after what has arrived.
        with contextlib.suppress(OSError):
            try:
                self.end.sendall(data)
            except TimeoutError:
                self.is_gone = True
