"""The sockets of one link over ZeroMQ: open, connect, shut the ports, close; for every link.

Threads: `threads` of libzmq and the authenticator's, in a context of their own; they end in
`close`. One thread at a time calls the methods.
"""

from typing import Any

import zmq

from ringreduce.pure.liveness import Flow
from ringreduce.transport import inherited, sodium
from ringreduce.transport.channel import Incoming, Outgoing
from ringreduce.transport.frames import FRAMES_PER_KEY_MAX
from ringreduce.transport.listening import Bind
from ringreduce.transport.records import NO_SOURCE, ChannelRecord
from ringreduce.transport.security import Admission
from ringreduce.vocabulary.times import milliseconds


class Sockets:
    """Ends of channels with other ranks, which may listen on `bind`.

    `admission` says what those must show that connect, and their frames have `longest` bytes at
    most.
    """

    def __init__(self, admission: Admission, bind: Bind, longest: int, threads: int = 1) -> None:
        self._admission, self._place = admission, (bind, longest)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=threads)
        self._authenticator = admission.authenticator(self._context)
        self.incoming: list[Incoming] = []  # open ones, in the order in which they were made
        self.outgoing: list[Outgoing] = []
        inherited.watch(self)

    @property
    def is_closed(self) -> bool:
        return bool(self._context.closed)

    def listen(self, record: ChannelRecord, number: int, domain: str, **options: Any) -> Incoming:
        """Listen for one rank, which is not known yet, on channel `number`; as `Incoming`."""
        record.source = NO_SOURCE
        what = *self._place, record, number, self._admission, self._authenticator, domain
        made = Incoming(self._context, *what, **options)
        self.incoming.append(made)
        return made

    def connect(
        self, address: str, peer: int, record: ChannelRecord, number: int, **options: Any
    ) -> Outgoing:
        """Connect to rank `peer`, which listens on `address` for this one; as `Outgoing`."""
        what = address, peer, record, number, self._admission
        made = Outgoing(self._context, *what, **options)
        self.outgoing.append(made)
        return made

    def lock_all(self, deadline: float) -> None:
        """Lock all ports, as `Incoming.lock` does; the authenticator ends once all are shut."""
        # A list, so that every port is tried, also after one that fails.
        if all([pulling.lock(deadline) for pulling in self.incoming]):
            self._authenticator.close()

    def read_events(self) -> None:
        for end in self._ends():
            end.read_events()

    def flow(self) -> Flow:
        """Count frames sent to each rank, and find ranks whose frames are due; from any thread."""
        sent = ((end.peer, end.number, end.record.sent) for end in list(self.outgoing))
        overdue = (end.overdue() for end in list(self.incoming))
        return Flow(sent=tuple(sent), overdue=tuple(filter(None, overdue)))

    def close_inherited(self) -> None:
        """In a forked child: forget the keys, and close its copies of the connections."""
        self._forget_keys()
        listening = [endpoint for pulling in self.incoming for endpoint in pulling.endpoints]
        inherited.close_connections(listening + [pushing.address for pushing in self.outgoing])

    def close(self, linger_s: float) -> None:
        """Free everything, once all that was sent has been written, or `linger_s` have passed."""
        inherited.unwatch(self)
        self._authenticator.close()
        for pushing in self.outgoing:
            pushing.close(milliseconds(linger_s) if linger_s else 0)
        for pulling in self.incoming:
            pulling.close()
        # Including what a failed constructor has left open. It waits for what is still unsent.
        self._context.destroy(linger=0)
        self._forget_keys()

    def _forget_keys(self) -> None:
        """Seal nothing from now on, so that no two processes use a key for the same numbers."""
        for end in self._ends():
            end.record.seal_nonce[0] = FRAMES_PER_KEY_MAX
            end.record.seal_key[:] = end.record.open_key[:] = bytes(sodium.KEY_BYTES)

    def _ends(self) -> list[Incoming | Outgoing]:
        return [*self.incoming, *self.outgoing]
