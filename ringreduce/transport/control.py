"""The control channel: a pair of sockets to each neighbour, for messages about the ring.

It is separate from the data, so that a message never waits behind a large frame and can go round
the ring both ways. When a connection ends, the rank at its other end has died, unless it announced
that it leaves. libzmq's thread pings the neighbours by itself, so bytes arrive from each process
that runs, also from one in which Python does not.

    previous rank  <--- PULL/PUSH --->  this rank  <--- PULL/PUSH --->  next rank

The thread that forms the ring makes and connects it, then the watcher's alone uses and closes it
(`ringreduce.engine.watch`); `wake` may be called from any thread.
"""

import contextlib
import socket as sockets
import time
from collections.abc import Collection, Mapping

import zmq

from ringreduce.pure.membership import Membership
from ringreduce.pure.watcher_messages import message_bytes_max
from ringreduce.transport.channel import Incoming, Outgoing, announced_ports, join_ports
from ringreduce.transport.listening import Bind
from ringreduce.transport.records import ChannelRecord
from ringreduce.transport.security import Security
from ringreduce.transport.sockets import Sockets
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.times import milliseconds

CONTROL_CHANNELS = 2  # most pairs of sockets that it has

_QUEUE = 1000  # messages that may wait on either side of a connection: heartbeats of minutes


class Control:
    """This rank's side of the control channel, listening on `bind`.

    A message longer than any of ours is refused unread, and its connection ends. So does a
    connection on which the other system has not acknowledged data for `link_timeout_s`; the system
    of a stopped process still acknowledges. It leads to the neighbours in `membership`, to whom
    `address` says where the sockets listen.
    """

    def __init__(
        self, *, bind: Bind, link_timeout_s: float, security: Security, membership: Membership
    ) -> None:
        rank, self._who = security.rank, security.who
        self._link_timeout_ms = int(link_timeout_s * 1000)
        self._before, self._after = membership.ahead(rank, -1), membership.ahead(rank, 1)
        self._awake, self._waker = sockets.socketpair()
        for end in (self._awake, self._waker):
            end.setblocking(False)
        longest = message_bytes_max(security.size)
        self.sockets = Sockets(security.control, bind, longest)
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Outgoing] = {}
        try:
            for neighbour in membership.neighbours(rank):
                what = ChannelRecord(), 0, f"control.{neighbour}"
                self._incoming[neighbour] = self.sockets.listen(*what, queue=_QUEUE)
        except BaseException:
            self.close()
            raise
        # Each rank lists its sockets in this order: the one for the rank before it, then after.
        order = [self._incoming[self._before], self._incoming[self._after]]
        self.address = join_ports([pulling.address for pulling in order])
        self._poller = zmq.Poller()

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Connect to the neighbours, whose sockets are bound already; `addresses` are by rank."""
        self._poller.register(self._awake, zmq.POLLIN)
        for neighbour, pulling in self._incoming.items():
            ports = announced_ports(addresses[neighbour], 2, neighbour, self._who)
            is_next = neighbour == self._after
            pushing = self._outgoing[neighbour] = self.sockets.connect(
                *(ports[0 if is_next else 1], neighbour, pulling.record, 0),
                queue=_QUEUE,
                unconfirmed_ms_max=self._link_timeout_ms,
                ping_ms=milliseconds(TIMES.ping_s),
            )
            pulling.admit(neighbour)
            for socket in (pulling.socket, pulling.events.receiver, pushing.events.receiver):
                self._poller.register(socket, zmq.POLLIN)

    def send(self, message: bytes, but: Collection[int] = ()) -> None:
        """Send `message` to the neighbours that are connected, except `but`, without waiting."""
        for neighbour, pushing in self._outgoing.items():
            if neighbour not in but and not pushing.is_lost:
                # The queue is full: the neighbour has not read for minutes, so drop the message.
                with contextlib.suppress(zmq.Again):
                    pushing.socket.send(message, zmq.DONTWAIT)

    def receive(self, wait_ms: int) -> list[tuple[int, bytes]]:
        """Wait for at most `wait_ms`; return messages and the neighbours they came from."""
        self._poller.poll(wait_ms)
        with contextlib.suppress(BlockingIOError):
            while self._awake.recv(64):
                pass
        messages = []
        for neighbour, pulling in self._incoming.items():
            # Events first: once a connection has ended, all its messages are here.
            pulling.read_events()
            while True:
                try:
                    frame = pulling.socket.recv(zmq.DONTWAIT, copy=False)
                except zmq.Again:
                    break
                pulling.record.source = frame.get(zmq.SRCFD)
                messages.append((neighbour, frame.bytes))
        for pushing in self._outgoing.values():
            pushing.read_events()
        return messages

    def lost(self) -> dict[int, bool]:
        """Neighbours with an ended connection, and whether nothing more can arrive from them."""
        ended = {n: pulling.is_lost(False) for n, pulling in self._incoming.items()}
        return {n: is_over for n, is_over in ended.items() if is_over or self._outgoing[n].is_lost}

    def arrived_bytes(self, neighbours: Collection[int]) -> dict[int, int]:
        """Total bytes received from each of `neighbours`, pings included, where they are counted.

        They are on Linux, for a connection that has not ended.
        """
        # The descriptor of one that has ended may be another connection's by now.
        there = [n for n in neighbours if not self._incoming[n].is_lost(False)]
        counts = {n: self._incoming[n].arrived_bytes() for n in there}
        return {n: count for n, count in counts.items() if count is not None}

    def lock(self) -> None:
        """Refuse all further connections, once both neighbours are connected."""
        self.sockets.lock_all(time.monotonic())

    def wake(self) -> None:
        """Make `receive` return; from any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Free everything, almost at once."""
        self.sockets.close(TIMES.flush_s)
        self._awake.close()
        self._waker.close()
