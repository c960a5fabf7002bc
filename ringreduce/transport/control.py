"""The control channel: a pair of sockets to each neighbour of a rank, for messages about the ring.

Ranks exchange them with the ones before and after, whatever way the data takes, so that a
message is never behind a large frame and goes both ways round. The connections are watched: the end
of one means that the rank at its other end has died, unless it said before that it leaves.

    previous rank  <--- PULL/PUSH --->  this rank  <--- PULL/PUSH --->  next rank

Threads: made and connected by the thread that forms the ring, then used by the watcher's
alone (`ringreduce.engine.watch`), which closes it; `wake` is for any.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import time
from collections.abc import Collection, Sequence

import zmq

from ringreduce.transport import inherited
from ringreduce.transport.channel import Incoming, Outgoing, join_ports, split_ports
from ringreduce.transport.security import Security
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import RendezvousError
from ringreduce.vocabulary.times import milliseconds

__all__ = ["CONTROL_CHANNELS", "Control"]

# Pairs of sockets that it has at most.
CONTROL_CHANNELS = 2

# Messages that may wait for a neighbour which does not read, and for us: heartbeats of minutes.
_QUEUE = 1000


class Control:
    """This rank's side of the control channel.

    Args:
        rank, size: this rank, among at least two.
        bind: address to listen on, such as ``tcp://127.0.0.1:*``.
        message_bytes_max: longer messages are refused unread, with the connection they came on.
        security: who may connect.
        link_timeout_s: how long the other end's system may leave a message unconfirmed before
            the connection counts as ended. A stopped process's system still confirms.

    Attributes:
        address: where the sockets listen, for the other ranks' `connect`.
        neighbours: the ranks at the other ends: previous and next, which may be one.

    Raises:
        RendezvousError: the address cannot be bound.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        bind: str,
        message_bytes_max: int,
        link_timeout_s: float,
        security: Security,
    ) -> None:
        self._link_timeout_ms = int(link_timeout_s * 1000)
        self.neighbours = sorted({(rank - 1) % size, (rank + 1) % size})
        self._awake, self._waker = sockets.socketpair()
        self._context = zmq.Context(io_threads=1)
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Outgoing] = {}
        # The descriptor of each neighbour's connection to us, known from its first message.
        self._sources: dict[int, int] = {}
        self._security = security
        self._authenticator = security.authenticator(self._context)
        try:
            for neighbour in self.neighbours:
                self._incoming[neighbour] = Incoming(
                    self._context,
                    bind,
                    message_bytes_max,
                    0,
                    security,
                    _domain(neighbour),
                    queue=_QUEUE,
                )
        except zmq.ZMQError as error:
            self.close()
            raise RendezvousError(
                f"cannot listen on {bind}: {error.strerror}",
                rank=rank,
                size=size,
                remedy="The rendezvous host must be one of rank 0's own addresses.",
            ) from error
        for end in (self._awake, self._waker):
            end.setblocking(False)
        # Each rank lists its sockets by distance: the one for the rank before it, then after.
        order = [self._incoming[(rank - 1) % size], self._incoming[(rank + 1) % size]]
        self.address = join_ports([pulling.address for pulling in order])
        self._rank, self._size = rank, size
        self._poller = zmq.Poller()
        inherited.watch(self)

    def connect(self, addresses: Sequence[str]) -> None:
        """Open the ways to the neighbours, which have bound their sockets already.

        Args:
            addresses: the `address` of each rank's channel.

        Raises:
            RendezvousError: an address is not that of a control channel.
        """
        for neighbour in self.neighbours:
            ports = split_ports(addresses[neighbour])
            if len(ports) != 2:
                raise RendezvousError(
                    f"got the control address {addresses[neighbour][:200]!r} of rank {neighbour}, "
                    "which has not 2 ports",
                    rank=self._rank,
                    size=self._size,
                    peer=neighbour,
                    remedy="Start all ranks with the same ringreduce.",
                )
            is_next = neighbour == (self._rank + 1) % self._size
            pushing = Outgoing(
                self._context,
                ports[0 if is_next else 1],
                neighbour,
                self._security,
                queue=_QUEUE,
                unconfirmed_ms_max=self._link_timeout_ms,
            )
            self._outgoing[neighbour] = pushing
            self._authenticator.allow(_domain(neighbour), self._security.credentials(neighbour))
        self._poller.register(self._awake, zmq.POLLIN)
        ends: list[Incoming | Outgoing] = [*self._incoming.values(), *self._outgoing.values()]
        for end in ends:
            for socket in end.sockets_to_poll():
                self._poller.register(socket, zmq.POLLIN)

    def send(self, message: bytes, but: Collection[int] = ()) -> None:
        """Send `message` to the neighbours that are there, except `but`, without waiting."""
        for neighbour, pushing in self._outgoing.items():
            if neighbour not in but and not pushing.is_lost:
                # A neighbour that is stopped for minutes does not get what it would not read.
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
            # Events first: of a connection that has ended all messages are there by now.
            pulling.read_events()
            while True:
                try:
                    frame = pulling.socket.recv(zmq.DONTWAIT, copy=False)
                except zmq.Again:
                    break
                self._sources[neighbour] = frame.get(zmq.SRCFD)
                messages.append((neighbour, frame.bytes))
        for pushing in self._outgoing.values():
            pushing.read_events()
        return messages

    def lost(self) -> list[int]:
        """Neighbours whose connections have ended, on either way; what they said has been read."""
        return [
            neighbour
            for neighbour in self.neighbours
            if self._outgoing[neighbour].is_lost
            or self._incoming[neighbour].is_lost(self._sources.get(neighbour, -1), False)
        ]

    def has_ended(self, neighbour: int) -> bool:
        """Whether nothing more can come from a lost neighbour."""
        source = self._sources.get(neighbour, -1)
        return source >= 0 and self._incoming[neighbour].is_lost(source, False)

    def read_events(self) -> None:
        """Take note of what has happened to our connections."""
        for pulling in self._incoming.values():
            pulling.read_events()

    def lock(self) -> bool:
        """Let nobody connect any more, once both neighbours have; return whether that is so."""
        now, done = time.monotonic(), True
        for neighbour, pulling in self._incoming.items():
            done = pulling.lock(self._sources.get(neighbour, -1), now) and done
        if done:
            self._authenticator.close()
        return done

    def close_inherited(self) -> None:
        """In a forked child: close its copies of the connections, and nothing else."""
        own = [pulling.address for pulling in self._incoming.values()]
        inherited.close_connections(own + [p.address for p in self._outgoing.values()])

    def wake(self) -> None:
        """Have `receive` return; from any thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Free everything, at once or nearly so."""
        self._authenticator.close()
        for pushing in self._outgoing.values():
            pushing.close(milliseconds(TIMES.flush_s))
        for pulling in self._incoming.values():
            pulling.close()
        # Also what a failing constructor has left open.
        self._context.destroy(linger=0)
        self._awake.close()
        self._waker.close()


def _domain(neighbour: int) -> str:
    """What the authenticator knows the port for a neighbour by."""
    return f"control.{neighbour}"
