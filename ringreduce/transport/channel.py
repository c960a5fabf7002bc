"""The two ends of a channel: a socket to another rank, or from one, and its connection's state.

A one-way connection goes from a connected PUSH socket to a bound PULL socket. The compiled loops
use the sockets by address; frames pass through Python only when a call ends badly. What ends have
in common with others of their context does `ringreduce.transport.sockets`, which makes them.
"""

import itertools
import socket as sockets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from ringreduce.pure.watcher_messages import Overdue
from ringreduce.transport import listening
from ringreduce.transport.address import endpoint
from ringreduce.transport.authenticator import Authenticator
from ringreduce.transport.descriptors import borrowed
from ringreduce.transport.listening import Bind
from ringreduce.transport.records import ChannelRecord
from ringreduce.transport.security import OVERHEAD_BYTES, Admission
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import RendezvousError
from ringreduce.vocabulary.times import milliseconds

# Frames that may wait at a receiver. Two keep the link busy while one is reduced; up to 16 cost
# memory and make no measurable difference (docs/performance.md).
RECEIVE_QUEUE_FRAMES = 4
_KEEPALIVE_IDLE_S = 60
_RECONNECT_MS = 24 * 3600 * 1000
_monitors = itertools.count()


class Incoming:
    """A socket that listens on `bind` for one rank's frames, of at most `frame_bytes_max`.

    The `authenticator` of `context` decides who may connect, by the name `domain`. A receive on
    `socket` (PULL) waits for at most ``TIMES.poll_s``. At most `queue` frames wait to be read; TCP
    holds the others back. `events` are for `read_events` to process.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bind: Bind,
        frame_bytes_max: int,
        record: ChannelRecord,
        number: int,
        admission: Admission,
        authenticator: Authenticator,
        domain: str,
        queue: int = RECEIVE_QUEUE_FRAMES,
    ) -> None:
        self.record, self.number = record, number
        self._admission, self._authenticator, self._domain = admission, authenticator, domain
        self.peer = -1  # the rank that sends, once that is known
        self.is_locked = False  # nobody can connect any more
        self.silence = Silence(self.arrived_bytes)  # for how long a frame has been due
        self.socket = context.socket(zmq.PULL)
        admission.serve(self.socket, domain)
        # Watched from the start, so that no event is missed.
        seen = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.events = Monitor(self.socket, seen)
        self.visitors: set[int] = set()  # connections to our port, by descriptor
        self._has_visitor_left = False
        self._listeners: list[int] = []  # descriptors of the listening sockets
        self._is_proven = False  # whether a peer has proven that the key is its own
        # The kernel sizes its buffers: fixed ones are slower up to 512 KiB and no faster above
        # (docs/performance.md).
        self.socket.set_hwm(queue)
        self.socket.setsockopt(zmq.RCVTIMEO, milliseconds(TIMES.poll_s))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max + OVERHEAD_BYTES)
        self.socket.setsockopt(zmq.IPV6, int(any(":" in host for host in bind.hosts)))
        self.endpoints: list[str] = []  # on the same port at each address; `address` is the first
        for listener in listening.listen(bind, **admission.security.who):
            address = endpoint(*listener.getsockname()[:2])
            self.socket.setsockopt(zmq.USE_FD, listener.fileno())
            self.socket.bind(address)
            self._listeners.append(listener.detach())  # libzmq closes it.
            self.endpoints.append(address)
        self.address = self.endpoints[0]
        record.receiver = self.socket.underlying

    def overdue(self) -> Overdue | None:
        """The frame that has been due for a while, if one has; from any thread."""
        dry_s = self.silence.dry_s()
        return None if dry_s is None else Overdue(self.peer, self.number, self.record.taken, dry_s)

    def read_events(self) -> None:
        for kind, descriptor in self.events.read():
            if kind == zmq.EVENT_ACCEPTED:
                self.visitors.add(descriptor)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_proven = self._admission.mechanism != "NULL"
            else:
                self.visitors.discard(descriptor)
                self._has_visitor_left = True

    def admit(self, peer: int) -> None:
        """Let rank `peer`, and nobody else, connect."""
        self.peer = peer
        security = self._admission.security
        if self._admission.seals:
            self.record.open_key[:] = security.frame_key(peer, security.rank, self.number)
        shown = self._admission.credentials(peer, self.number)
        self._authenticator.allow(self._domain, shown)

    def lock(self, deadline: float) -> bool:
        """Let nobody connect any more once the rank that is due here has; return whether so.

        Its first frame or, with a secret, a finished handshake shows that it has. Waits for a
        handshake until ``time.monotonic()`` is `deadline`. Then the kernel drops all attempts to
        connect; where it cannot, libzmq refuses them.
        """
        if self.is_locked:
            return True
        while self.record.source < 0 and not self._is_proven:
            wait_ms = int((deadline - time.monotonic()) * 1000)
            asks = self._admission.mechanism != "NULL"
            if not asks or wait_ms <= 0 or not self.events.receiver.poll(wait_ms):
                return False
            self.read_events()
        self.read_events()
        self.is_locked = True
        for listener in self._listeners:
            listening.shut(listener)
        self._authenticator.allow(self._domain, None)
        return True

    def is_lost(self, quiet: bool) -> bool:
        """Whether the connection that frames come from has ended.

        Strangers may connect too, so it is identified by its descriptor, which is unknown before
        the first frame. Until then it counts as ended when connections have been lost, none is
        left, and nothing has arrived for so long that the caller sets `quiet`.
        """
        if self.record.source >= 0:
            return self.record.source not in self.visitors
        return self._has_visitor_left and not self.visitors and quiet

    def arrived_bytes(self) -> int | None:
        """Total bytes received on the connection that frames come from; None if not counted.

        Before the first frame the only connection, if there is one, counts as that; without one
        nothing has arrived.
        """
        # A copy, since the watcher's thread may ask while the link's changes the set.
        source, visitors = int(self.record.source), self.visitors.copy()
        if source < 0 and not visitors:
            return 0
        if source < 0 and len(visitors) == 1:
            source = visitors.pop()
        counts = None if source < 0 else _counts(source, _BYTES_RECEIVED_AT)
        return None if counts is None else counts[0]

    def close(self) -> None:
        """Close the socket; unread frames are lost."""
        self.events.close()
        self.socket.close(linger=0)


class Outgoing:
    """A socket (PUSH) connected to rank `peer` of the job, which listens on `address`.

    Sending never waits. At most `queue` frames wait to be sent; 0: any number. `record`, `number`
    and `events` are as of the other end. The connection ends when the other system has not
    acknowledged data for `unconfirmed_ms_max`; 0: the system's default, many minutes. Every
    `ping_ms`, if not 0, libzmq sends a few bytes, by a thread that needs no Python. Raises
    RendezvousError if libzmq refuses the address.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        peer: int,
        record: ChannelRecord,
        number: int,
        admission: Admission,
        *,
        queue: int = 0,
        unconfirmed_ms_max: int = 0,
        ping_ms: int = 0,
    ) -> None:
        self.address, self.peer = address, peer
        self.record, self.number = record, number
        self.is_lost = False
        self.socket = context.socket(zmq.PUSH)
        admission.join(self.socket, peer, number)
        security = admission.security
        if admission.seals:
            record.seal_key[:] = security.frame_key(security.rank, peer, number)
        self.socket.setsockopt(zmq.SNDHWM, queue)
        # Else a firewall may forget a connection that is idle while a rank saves for minutes.
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
        if unconfirmed_ms_max:
            self.socket.setsockopt(zmq.TCP_MAXRT, unconfirmed_ms_max)
        if ping_ms:
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, ping_ms)
            # A missing answer must not end the connection: a reset under a full queue can abort the
            # process (libzmq issue 3937).
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)
        # Practically never reconnect: a silent reconnect would lose the frames in flight. Really
        # never, -1, makes libzmq 4.3.5 hang in zmq_ctx_term when the neighbour died before the
        # handshake and a frame was queued.
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        # All that it says where there was no descriptor, or no memory, for a connection.
        ended |= zmq.EVENT_CONNECT_RETRIED
        self.events = Monitor(self.socket, ended | zmq.EVENT_CONNECTED)
        self._descriptor: int | None = None  # of the connection
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            why = zmq.strerror(error.errno or 0)  # Its own text repeats the whole address.
            text = f"cannot connect to rank {peer} at {address[:200]!r}: {why}"
            remedy = f"Read rank {peer}'s log."
            raise RendezvousError(text, **security.who, peer=peer, remedy=remedy) from error
        record.sender = self.socket.underlying

    @property
    def borrows(self) -> bool:
        """Whether libzmq still holds borrowed memory that is to be sent."""
        return bool(self.record.released < self.record.borrowed)

    def read_events(self) -> None:
        for kind, descriptor in () if self.socket.closed else self.events.read():
            if kind == zmq.EVENT_CONNECTED:
                self._descriptor = descriptor
            else:
                self.is_lost = True

    def sent(self) -> tuple[int, float] | None:
        """Bytes that the other system has confirmed, and for how many seconds some were under way.

        Not while the receiver did not read. None where the system does not measure it.
        """
        descriptor = self._descriptor
        if descriptor is None or self.is_lost or self.socket.closed:
            return None
        counts = _counts(descriptor, _BYTES_ACKED_AT, _BUSY_AT, _RECEIVER_LIMITED_AT)
        if counts is None:
            return None
        nbytes, busy_us, limited_us = counts
        return nbytes, max(0, busy_us - limited_us) * 1e-6

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; frames not sent within `linger_ms` are lost."""
        if not self.socket.closed:
            self.read_events()
            self.events.close()
            self.socket.close(linger=0 if self.is_lost else linger_ms)


class Monitor:
    """Receives those of libzmq's `events` that happen to `socket` from now on, until `close`.

    pyzmq's ``get_monitor_socket`` has a queue of a thousand events. When it is full, libzmq's I/O
    thread waits, holding a lock that ``disable_monitor`` needs: strangers that connect and leave
    while nobody reads would stop the socket's traffic and block its closing. Here the queue is
    unbounded, so the owner must `read` it often. `receiver` becomes readable when there are some.
    """

    def __init__(self, socket: zmq.Socket[Any], events: int) -> None:
        self._socket = socket
        name = f"inproc://monitor.{next(_monitors)}"
        socket.monitor(name, int(events))
        self.receiver: zmq.Socket[Any] = socket.context.socket(zmq.PAIR)
        self.receiver.setsockopt(zmq.RCVHWM, 0)
        self.receiver.setsockopt(zmq.LINGER, 0)
        self.receiver.connect(name)

    def read(self) -> Iterator[tuple[int, int]]:
        """The events that have come, each with its value: of most, a connection's descriptor."""
        while self.receiver.poll(0):
            event = parse_monitor_message(self.receiver.recv_multipart())
            yield event["event"], event["value"]

    def close(self) -> None:
        self._socket.disable_monitor()
        self.receiver.close()


class _Seen(NamedTuple):
    arrived: int
    since_s: float
    looked_s: float


class Silence:
    """For how long no byte has come on a connection while a thread waits for a frame of it.

    Just after that it may still say so: only if the other end has sent more does it mean anything.
    `arrived_bytes` returns how many have come in all; None where the system does not count them.
    """

    def __init__(self, arrived_bytes: Callable[[], int | None]) -> None:
        self._arrived_bytes = arrived_bytes
        self._seen: _Seen | None = None

    def look(self) -> None:
        """Note what has arrived; at each check of the thread that waits."""
        now, seen, arrived = time.monotonic(), self._seen, self._arrived_bytes()
        if arrived is None:
            # Unknown counts as progress: a link that is merely slow must not look dead.
            self._seen = None
        # In the last case the thread stood still itself.
        elif seen is None or arrived != seen.arrived or now - seen.looked_s > TIMES.looked_s:
            self._seen = _Seen(arrived, now, now)
        else:
            self._seen = seen._replace(looked_s=now)

    def dry_s(self) -> float | None:
        """For how long; None: no frame is due. From any thread."""
        seen, now = self._seen, time.monotonic()
        # A thread that has not checked for long does not wait any more, or waits for the GIL, and
        # frames may have arrived meanwhile.
        if seen is None or now - seen.looked_s > TIMES.looked_s:
            return None
        return now - seen.since_s if seen.arrived == self._arrived_bytes() else None


def join_ports(addresses: Sequence[str]) -> str:
    """Join addresses that differ only in their ports: ``tcp://10.0.0.4:41873,41874``."""
    ports = [address.rpartition(":")[2] for address in addresses]
    return f"{addresses[0].rpartition(':')[0]}:{','.join(ports)}"


def announced_ports(address: str, count: int, peer: int, who: dict[str, Any]) -> list[str]:
    """Undo `join_ports` on what `peer` has announced; RendezvousError if not `count` ports."""
    host, _, ports = address.rpartition(":")
    listening = [f"{host}:{port}" for port in ports.split(",")]
    if len(listening) != count:
        text = f"got the address {address[:200]!r} of rank {peer}, which has not {count} ports"
        remedy = "Start all ranks with the same ringreduce."
        raise RendezvousError(text, **who, peer=peer, remedy=remedy)
    return listening


# From <linux/tcp.h>: the option, the size of struct tcp_info, and where it has these counts.
_TCP_INFO, _TCP_INFO_BYTES = 11, 192
_BYTES_ACKED_AT, _BYTES_RECEIVED_AT = 120, 128
# Microseconds with data under way, and those of them in which the receiver's window was full.
_BUSY_AT, _RECEIVER_LIMITED_AT = 168, 176


def _counts(descriptor: int, *places: int) -> list[int] | None:
    """Read Linux's counters of a connection, 64 bits at each of `places`; None elsewhere."""
    if sys.platform != "linux":
        return None
    try:
        with borrowed(descriptor) as connection:
            facts = connection.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(facts) < max(places) + 8:
        return None  # An old Linux: before 4.1 for bytes, 4.10 for times.
    return [int.from_bytes(facts[place : place + 8], sys.byteorder) for place in places]
