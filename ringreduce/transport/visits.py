"""Messages among the ranks of a broken ring, at their standby ports.

A port that its host refuses belongs to no process any more: that rank will not come. But it is not
proven dead (`pure.views`): it may have gone on with others, without this one, and ended well. One
that is silent may be stopped, in user code, or beyond a network that is cut; and so may one that
accepts, but whose rank does not answer.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import zmq

from ringreduce.pure.decoding import UNREADABLE
from ringreduce.pure.views import Agreement, Message, Verb, View, receive
from ringreduce.transport.address import endpoint
from ringreduce.transport.channel import Monitor
from ringreduce.transport.routes import first_to_answer
from ringreduce.transport.security import Security
from ringreduce.transport.standby import Standby
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.endpoints import is_loopback
from ringreduce.vocabulary.times import milliseconds

_DECODER = msgspec.msgpack.Decoder(tuple[int, Message])
_MESSAGE_BYTES_MAX = 1 << 20
# Connections to the port at a time, beside one of each rank: strangers may leave them idle.
_VISITORS_MAX = 64


class Visits:
    """Opens `standby`, and sends to the others at `ways`: by rank, addresses that may lead there.

    One thread at a time may use it. Messages may be lost, as the first to each rank, which connects
    to it, and those while a port is still shut.
    """

    def __init__(
        self,
        standby: Standby,
        security: Security,
        job: int,
        ways: Mapping[int, Sequence[tuple[str, int]]],
    ) -> None:
        self._standby, self._security, self._job, self._ways = standby, security, job, ways
        self._rank, self._thread, self._is_closing = security.rank, threading.Thread(), False
        self._context = zmq.Context(io_threads=1)
        self._incoming = self._socket(zmq.PULL)
        self._authenticator = security.serve_meeting(self._incoming, self._context)
        self._incoming.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(TIMES.hello_s))
        self._events = Monitor(self._incoming, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._visitors: set[int] = set()
        self._is_full = False
        for address, descriptor in standby.descriptors().items():
            self._incoming.setsockopt(zmq.USE_FD, descriptor)
            self._incoming.bind(address)
        standby.open()
        self._outgoing: dict[int, zmq.Socket[bytes]] = {}

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.LINGER, milliseconds(TIMES.flush_s))
        return socket

    def send(self, message: Message) -> bool:
        """Send it to its receiver; False: there is no connection yet, or none any more."""
        if message.receiver not in self._outgoing:
            self._connect(message.receiver)
        encoded = msgspec.msgpack.encode((self._job, message))
        try:
            self._outgoing[message.receiver].send(encoded, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _connect(self, peer: int) -> None:
        self._outgoing[peer] = socket = self._socket(zmq.PUSH)
        self._security.join_meeting(socket)
        # Of several addresses only those that answer get messages.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        is_near = all(is_loopback(host) for host, _ in self._ways[peer])
        timeout_s = TIMES.poll_s if is_near else TIMES.reconnect_s
        socket.setsockopt(zmq.CONNECT_TIMEOUT, milliseconds(timeout_s))
        socket.setsockopt(zmq.RECONNECT_IVL, milliseconds(TIMES.poll_s))
        for way in self._ways[peer]:
            socket.connect(endpoint(*way))

    def turn_to(self, peer: int, ways: Sequence[tuple[str, int]]) -> None:
        """From now on send to another process at that place, at `ways`."""
        self._ways = {**self._ways, peer: ways}
        if (socket := self._outgoing.pop(peer, None)) is not None:
            socket.close()

    def receive(self, wait_s: float) -> Iterator[Message]:
        """Yield the messages for this rank, once anything has come, or after `wait_s`."""
        self._limit_visitors()
        wait_ms = milliseconds(wait_s)
        while self._incoming.poll(wait_ms):
            wait_ms = 0
            with contextlib.suppress(*UNREADABLE):
                job, message = _DECODER.decode(self._incoming.recv())
                known = message.sender in self._ways
                if known and (job, message.receiver) == (self._job, self._rank):
                    yield message

    def _limit_visitors(self) -> None:
        """Shut the port while too many are connected; those without the secret are ended soon."""
        for kind, descriptor in self._events.read():
            if kind == zmq.EVENT_ACCEPTED:
                self._visitors.add(descriptor)
            else:
                self._visitors.discard(descriptor)
        if self._is_full != (len(self._visitors) > _VISITORS_MAX + len(self._ways)):
            self._is_full = not self._is_full
            (self._standby.shut if self._is_full else self._standby.open)()

    def refused(self, peers: Collection[int]) -> set[int]:
        """Find those of `peers` that will not come: every way to their ports is refused."""
        ways = {peer: self._ways[peer] for peer in peers}
        _, failed = first_to_answer(self._rank, ways, TIMES.poll_s, lambda: None, 0.0)
        why = {peer: [way.why for way in failed if way.peer == peer] for peer in peers}
        return {peer for peer in peers if why[peer] == ["refused"] * len(ways[peer])}

    def answer(
        self, view: View, for_s: float, *, has_ended: bool = False, is_busy: bool = False
    ) -> None:
        """For so long, in a thread, tell `view` to those that come because of one before it.

        To those that come because of it: an empty one, if it `has_ended`; or that this rank
        `is_busy`. Then the port is shut.
        """
        known = Agreement(self._rank, view, successor=View(view.number + 1, ()))
        until_s = time.monotonic() + for_s

        def answer(message: Message) -> None:
            # A ring that works has no successor to tell.
            if has_ended or message.view < view.number:
                for reply in receive(known, message)[1]:
                    self.send(reply)
            elif is_busy and message.view == view.number:
                self.send(known.to(message.sender, Verb.BUSY))

        def run() -> None:
            try:
                while not self._is_closing and time.monotonic() < until_s:
                    for message in self.receive(TIMES.poll_s):
                        answer(message)
            finally:
                self._end()

        name = f"ringreduce standby {self._rank}"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._end()

    def _end(self) -> None:
        self._standby.shut()
        self._authenticator.close()
        self._events.close()
        for socket in (self._incoming, *self._outgoing.values()):
            socket.close()
        self._context.term()
