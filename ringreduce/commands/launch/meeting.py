"""The launchers of a job with ``--nnodes`` while an attempt runs: who failed, who is done."""

from __future__ import annotations

import contextlib
import secrets
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ringreduce.commands.launch import node_messages as messages
from ringreduce.commands.launch.failure import Failure
from ringreduce.commands.launch.frames import Alive, Refused
from ringreduce.commands.launch.worker_records import Raised, Reformed
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.endpoints import address
from ringreduce.vocabulary.errors import ConfigError

_PIECE_BYTES = 1 << 16
_LATE_MAX = 16  # launchers without a place that are connected at a time
_TOO_LATE = (
    "the job has started already, with other launchers. Give each host a --node-rank of its own, "
    "and each job a --rendezvous of its own"
)


class Node(NamedTuple):
    """What a launcher was told: which one it is, and where node 0 listens."""

    own: messages.Join  # what it says of itself
    host: str
    port: int
    secret: str  # the job's; every launcher has it
    join_timeout_s: float  # how long node 0 waits for the others, and they for it

    @property
    def address(self) -> str:
        """Where node 0 listens, for people."""
        return address(self.host, self.port)


class Meeting:
    """The launchers of an attempt, from the time when all have come.

    On node 0 `door` is where it listens for launchers, and `listener` where the ranks meet.
    """

    def __init__(
        self,
        node: Node,
        placed: messages.Placed,
        peers: Sequence[Peer],
        listener: socket.socket | None = None,
        door: socket.socket | None = None,
    ) -> None:
        self.node, self._peers, self._door = node, peers, door
        self.placed, self.listener = placed, listener
        self._late: list[Peer] = []
        # Since when launchers have been waiting at the door; None: there are none.
        self._waiting_since_s: float | None = None
        # What the others have said of theirs: those that end the job, and of ranks that are lost.
        self.failures: list[Failure] = []
        self.lost: list[Failure] = []
        self.joined: set[int] = set()  # which ranks wait, or did, in the ring of all ranks
        self.ring = Reformed(-1, (), -1, 0.0)  # the last ring of which another launcher has told
        self.is_over = False  # the ranks of all nodes have ended, well or lost
        self._is_done = False
        # What was reported: ranks that are lost; None: the failure that ends the job.
        self._reported: set[int | None] = set()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` watch the connections; its data are callables that read them."""
        for peer in self._peers:
            selector.register(peer.end, selectors.EVENT_READ, partial(self._read, peer, selector))

    def poll(self) -> None:
        """Keep the connections alive; note which launchers are gone."""
        for peer in self._peers:
            if not peer.is_gone:
                peer.keep_alive()
            # A launcher that is done, or that knows of a failure, may leave.
            elif not (peer.is_done or self.failures or None in self._reported or self.is_over):
                how = "its launcher is gone, or the network to it"
                peer.is_done = self.node.own.elastic is not None
                gone = Failure(peer.first_rank, 255, 0.0, host=peer.host, how=how)
                self._take_failure(peer, msgspec.structs.replace(gone, is_lost=peer.is_done))
        if self._is_done and all(peer.is_done for peer in self._peers):
            self.is_over = True
            self.tell(messages.Done())
        self._refuse_late()

    def report(self, failure: Failure) -> None:
        """Send the others, once, which rank has failed first, or each that `is_lost`."""
        what = failure.rank if failure.is_lost else None
        if what not in self._reported:
            self._reported.add(what)
            raised = failure.raised  # Without its text, since records are not encrypted.
            raised = raised and Raised(raised.kind, raised.peer, raised.origin)
            self.tell(msgspec.structs.replace(failure, raised=raised))

    def note_joins(self, rank: int, but: Peer | None = None) -> None:
        """A rank waits in the ring of all ranks."""
        if rank not in self.joined:
            self.joined.add(rank)
            self.tell(messages.Joined(rank), but)

    def note_done(self) -> None:
        """The ranks of this node have ended, well or lost."""
        if not self._is_done:
            self._is_done = True
            if self.node.own.node > 0:
                self.tell(messages.Done())

    def close(self) -> None:
        for peer in self._peers:
            # What is left to read would make the system drop what was sent.
            with contextlib.suppress(OSError):
                peer.end.setblocking(False)
                while peer.end.recv(_PIECE_BYTES):
                    pass
            peer.end.close()
        for peer in self._late:
            peer.end.close()
        if self.listener is not None:
            self.listener.close()

    def _read(self, peer: Peer, selector: selectors.BaseSelector) -> None:
        records = peer.read()
        if peer.is_gone:
            selector.unregister(peer.end)
        for record in records:
            if isinstance(record, messages.Done):
                peer.is_done = True
            elif isinstance(record, messages.Joined):
                self.note_joins(record.rank, peer)
            elif isinstance(record, Failure):
                self._take_failure(peer, record)
            elif isinstance(record, Reformed):
                self.ring = record

    def _take_failure(self, peer: Peer, failure: Failure) -> None:
        # Node 0 passes on what it learns; the others know only node 0.
        self.tell(failure, but=peer)
        now = {"time_s": time.monotonic(), "has_ended": True, "is_lost": False}
        known = self.lost if failure.is_lost else self.failures
        known.append(msgspec.structs.replace(failure, **now))

    def _refuse_late(self) -> None:
        """On node 0: answer launchers for which there is no place, with the reason."""
        # Those that come after a failure come for the next attempt, and wait for it.
        has_failed = None in self._reported or self.failures
        if self._door is None or has_failed or self.is_over or not self._are_late():
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while len(self._late) < _LATE_MAX:
                end, _ = self._door.accept()
                self._late.append(Peer(end, self.node.secret, is_first=True))
                self._late[-1].send(Refused(_TOO_LATE))
        for peer in self._late:
            if select.select([peer.end], [], [], 0)[0]:
                peer.read()
        for peer in [peer for peer in self._late if peer.is_gone]:
            peer.end.close()
            self._late.remove(peer)

    def _are_late(self) -> bool:
        """Whether launchers wait at the door that do not come for the next attempt.

        Those have sent before that a rank failed, and it may come after them.
        """
        assert self._door is not None
        ends = [peer.end for peer in self._peers if not peer.is_gone]
        ready, _, _ = select.select([self._door, *ends], [], [], 0)
        if self._door not in ready:
            self._waiting_since_s = None
            return bool(self._late)
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        return len(ready) == 1 and time.monotonic() - self._waiting_since_s >= TIMES.confirm_s

    def tell(self, record: messages.Record, but: Peer | None = None) -> None:
        """Send the other launchers a record."""
        for peer in self._peers:
            if peer is not but and not peer.is_gone:
                peer.send(record)


class Peer:
    """The connection with another launcher, on `host`, whose ranks begin with `first_rank`."""

    def __init__(self, end: socket.socket, secret: str, *, is_first: bool) -> None:
        self.end = end
        self._channel = messages.Channel(
            secret, secrets.token_bytes(messages.NONCE_BYTES), is_first=is_first
        )
        self._waiting: deque[messages.Record] = deque()
        self._sent_s = self._received_s = time.monotonic()
        self.join: messages.Join | None = None  # what it has said of itself, on node 0
        self.host, self.first_rank = "", 0
        self.stranger = ""  # what is at the other end, if it is no launcher of this job
        # Its ranks have ended, well or lost; the connection has ended.
        self.is_done = self.is_gone = False
        end.settimeout(TIMES.agent_end_s)
        self._write(self._channel.opening)

    def send(self, record: messages.Record) -> None:
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

    def read(self) -> Sequence[messages.Record]:
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
