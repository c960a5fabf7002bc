"""A pair of sockets, one from a rank behind and one to a rank ahead, and what befell their peers.

Each one-way connection has its own pair: the sending side connects a PUSH socket to the
receiving side's bound PULL socket. The compiled loops use the sockets by their addresses;
frames pass through Python only when a call ends badly.
"""

from __future__ import annotations

import os
import socket as sockets
import sys
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ringreduce.transport import door
from ringreduce.transport.monitor import unwatch, watch
from ringreduce.transport.security import OVERHEAD_BYTES, Security

__all__ = ["Incoming", "Outgoing", "join_ports", "split_ports"]

# Frames that may wait at a receiver. Two keep the wire busy while one is reduced; up to 16
# make no difference beyond noise (docs/performance.md) and cost memory.
RECEIVE_QUEUE_FRAMES = 4
_RECONNECT_MS = 24 * 3600 * 1000


class Incoming:
    """A socket that listens on `bind` for one rank's frames, of at most `frame_bytes_max`.

    Who may connect is for the authenticator of `context` to say, under the name `domain`. At most
    `queue` frames wait to be read; TCP holds the others back.

    Attributes:
        socket: PULL; waits `slice_ms` for a frame.
        address: where it listens.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bind: str,
        frame_bytes_max: int,
        slice_ms: int,
        security: Security,
        domain: str,
        queue: int = RECEIVE_QUEUE_FRAMES,
    ) -> None:
        self.socket = context.socket(zmq.PULL)
        security.serve(self.socket, domain)
        # Watched from the start, so that no connection comes or goes unseen.
        seen = (
            zmq.EVENT_LISTENING
            | zmq.EVENT_ACCEPTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
        )
        self._events = watch(self.socket, int(seen))
        self._visitors: set[int] = set()  # connections to our port, by descriptor
        self._has_visitor_left = False
        self._listener = -1  # descriptor of the listening socket
        self._is_proven = False  # whether a peer has proven that the key is its own
        self._asks = security.mechanism != "NULL"
        # The kernel's buffers are left to grow by themselves: fixed ones are slower up to 512 KiB
        # and no faster above (docs/performance.md).
        self.socket.set_hwm(queue)
        self.socket.setsockopt(zmq.RCVTIMEO, slice_ms)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max + OVERHEAD_BYTES)
        self.socket.setsockopt(zmq.IPV6, int("[" in bind))
        self.socket.bind(bind)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def read_events(self) -> None:
        """Take note of what has happened to our connections."""
        while self._events.poll(0):
            self._note(parse_monitor_message(self._events.recv_multipart()))

    def _note(self, event: Any) -> None:
        kind, descriptor = event["event"], event["value"]
        if kind == zmq.EVENT_LISTENING:
            self._listener = descriptor
        elif kind == zmq.EVENT_ACCEPTED:
            self._visitors.add(descriptor)
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_proven = self._asks
        else:
            self._visitors.discard(descriptor)
            self._has_visitor_left = True

    def lock(self, source: int, deadline: float) -> bool:
        """Have the kernel drop all further attempts to connect, where it can.

        Not before the one rank that is due here has connected: it has when a frame has come, or
        when a peer has proven its key, for which this waits.

        Returns:
            Whether that rank is there.

        Args:
            source: as for `is_lost`.
            deadline: by ``time.monotonic()``, until when to wait.
        """
        while source < 0 and not self._is_proven:
            wait_ms = int((deadline - time.monotonic()) * 1000)
            if not self._asks or wait_ms <= 0 or not self._events.poll(wait_ms):
                return False
            self.read_events()
        self.read_events()
        door.shut(self._listener)
        return True

    def is_lost(self, source: int, quiet: bool) -> bool:
        """Whether the connection that frames come from has ended.

        Strangers come and go on the listening port, so it is known by its descriptor, which
        the first frame tells. Until then all there is to go by is an empty port.

        Args:
            source: descriptor of that connection; negative before the first frame.
            quiet: whether nothing has come for so long that an empty port counts.
        """
        if source >= 0:
            return source not in self._visitors
        return self._has_visitor_left and not self._visitors and quiet

    def arrived_bytes(self, source: int) -> int | None:
        """How many bytes have come on the connection with descriptor `source`, ever.

        None where the system does not tell, or no rank has connected yet. The only visitor counts
        as the source before the first frame.
        """
        # A copy, since the watcher asks while the link may be taking note of who comes and goes.
        if source < 0 and len(visitors := self._visitors.copy()) == 1:
            source = visitors.pop()
        return None if source < 0 else _arrived_bytes(source)

    def sockets_to_poll(self) -> tuple[Any, ...]:
        """What becomes readable when a frame or an event has come."""
        return self.socket, self._events

    def close(self) -> None:
        """Close the socket; what is unread is gone."""
        unwatch(self.socket, self._events)
        self.socket.close(linger=0)


class Outgoing:
    """A socket connected to a rank that listens on `address`; `is_lost` once that is over.

    Attributes:
        socket: PUSH; never waits to send.
        address: where that rank listens.
        peer: its number among all ranks of the job.
        is_lost: whether the connection is known to have ended.
        is_open: whether the socket still is.

    Args:
        context, address, peer: see above.
        queue: frames that may wait to be sent; 0: any number.
        unconfirmed_ms_max: the connection ends when the other end's system has not confirmed
            what was sent for so long; 0: as the system has it, which is many minutes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        peer: int,
        security: Security,
        *,
        queue: int = 0,
        unconfirmed_ms_max: int = 0,
    ) -> None:
        self.address, self.peer = address, peer
        self.is_lost, self.is_open = False, True
        self.socket = context.socket(zmq.PUSH)
        security.join(self.socket, peer)
        self.socket.setsockopt(zmq.SNDHWM, queue)
        if unconfirmed_ms_max:
            self.socket.setsockopt(zmq.TCP_MAXRT, unconfirmed_ms_max)
        # A silent reconnect would lose the frames that were under way, so it comes never, or as
        # good as that. "Never" itself, -1, makes libzmq 4.3.5 wait for ever in zmq_ctx_term when
        # the neighbour died before the handshake and a frame was queued.
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._events = watch(self.socket, int(ended))
        self.socket.connect(address)

    def read_events(self, wait_ms: int = 0) -> None:
        """Take note of what has happened to our connection, for at most `wait_ms`."""
        while self.is_open and self._events.poll(wait_ms):
            self._events.recv_multipart()
            self.is_lost, wait_ms = True, 0

    def sockets_to_poll(self) -> tuple[Any, ...]:
        """What becomes readable when an event has come."""
        return (self._events,)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what has not left `linger_ms` after that is gone."""
        if self.is_open:
            self.read_events()
            self.is_open = False
            unwatch(self.socket, self._events)
            self.socket.close(linger=0 if self.is_lost else linger_ms)


def join_ports(addresses: Sequence[str]) -> str:
    """Addresses that differ in their ports as one: ``tcp://10.0.0.4:41873,41874``."""
    ports = [address.rpartition(":")[2] for address in addresses]
    return f"{addresses[0].rpartition(':')[0]}:{','.join(ports)}"


def split_ports(address: str) -> list[str]:
    """The addresses that `join_ports` has made one of."""
    host, _, ports = address.rpartition(":")
    return [f"{host}:{port}" for port in ports.split(",")]


# <linux/tcp.h>: the option, and where struct tcp_info has tcpi_bytes_received.
_TCP_INFO, _TCP_INFO_BYTES, _BYTES_RECEIVED_AT = 11, 192, 128


def _arrived_bytes(descriptor: int) -> int | None:
    """Bytes that have come on a connection, as Linux counts them; None elsewhere."""
    if sys.platform != "linux":
        return None
    try:
        # Of libzmq's descriptor only a copy is ours to close.
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            facts = connection.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(facts) < _BYTES_RECEIVED_AT + 8:
        return None  # Before Linux 4.1.
    return int.from_bytes(facts[_BYTES_RECEIVED_AT : _BYTES_RECEIVED_AT + 8], sys.byteorder)
