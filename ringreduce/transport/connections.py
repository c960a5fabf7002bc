"""The sockets of a link over ZeroMQ: open, connect, shut the ports, detect losses, close.

Each rank binds a PULL socket for every connection that another rank makes to it, and connects a
PUSH socket to each of those it sends to (`ringreduce.transport.channel`): `streams` of them to the
next rank, and one each to the ranks 2, 4, 8, ... positions ahead, for the exchanges.

Threads: `streams` I/O threads of libzmq, in a context of this link; they end in `close`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import zmq

from ringreduce.pure import schedule
from ringreduce.pure.messages import Sending
from ringreduce.transport import inherited, sodium
from ringreduce.transport.channel import (
    Incoming,
    Outgoing,
    announced_ports,
    join_ports,
    split_ports,
)
from ringreduce.transport.frames import FRAMES_PER_KEY_MAX
from ringreduce.transport.listening import Bind
from ringreduce.transport.records import NO_SOURCE, ChannelRecord
from ringreduce.transport.security import Security
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.times import milliseconds


class Connections:
    """A link's pairs of sockets, by channel: first the streams, then the longer distances.

    Frames longer than `frame_bytes_max` are refused unread. The ring will have at most
    `members_max` members. Other arguments are as in `ZmqLink`.

    Attributes:
        address: where the sockets listen: an address with one port for each channel.
        members: the ranks of the ring, in its order; `place` is this rank's index there. Errors
            give ranks of the job; frames and schedules give indices in the ring.
        incoming, outgoing: one for each channel; `outgoing` is empty until `connect`.
        records: one for each channel, for the compiled loops.

    Raises:
        RendezvousError: the address cannot be bound.
    """

    def __init__(
        self,
        *,
        bind: Bind,
        frame_bytes_max: int,
        streams: int,
        security: Security,
        members_max: int,
    ) -> None:
        self.place = self.rank = security.rank
        self.world_size = security.size
        self.members: tuple[int, ...] = ()
        self._streams, self._security = streams, security
        self._distances = distances(members_max, streams)
        self._addresses: tuple[str, ...] = ()
        self._context = zmq.Context(io_threads=streams)
        self._authenticator = security.data.authenticator(self._context)
        self.incoming: list[Incoming] = []
        self.outgoing: list[Outgoing] = []
        limits = frame_bytes_max, milliseconds(TIMES.poll_s)
        try:
            for channel in range(len(self._distances)):
                pulling = Incoming(self._context, bind, *limits, security.data, _domain(channel))
                self.incoming.append(pulling)
        except BaseException:
            self._authenticator.close()
            self._context.destroy(linger=0)
            raise
        self.address = join_ports([pulling.address for pulling in self.incoming])
        self.records = (ChannelRecord * len(self._distances))()
        for record in self.records:
            record.source = NO_SOURCE
        inherited.watch(self)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._context.closed)

    def connect(self, addresses: Mapping[int, str], members: Sequence[int]) -> None:
        """Connect to the ranks ahead, and close the sockets that the ring does not need.

        `addresses` are by rank.

        Raises:
            RendezvousError: an address is not that of a link like this one.
        """
        self.members, self.place = tuple(members), tuple(members).index(self.rank)
        ports_per_rank = len(self._distances)
        self._distances = distances(len(self.members), self._streams)
        for unneeded in self.incoming[len(self._distances) :]:
            unneeded.close()
        del self.incoming[len(self._distances) :]
        for channel, distance in enumerate(self._distances):
            peer = self.members[(self.place + distance) % len(self.members)]
            ports = announced_ports(addresses[peer], ports_per_rank, peer, self._security)
            pushing = Outgoing(self._context, ports[channel], peer, self._security.data)
            self.outgoing.append(pushing)
            self.records[channel].sender = pushing.socket.underlying
            self.records[channel].receiver = self.incoming[channel].socket.underlying
        self._addresses = tuple(addresses[member] for member in self.members)
        for channel, record in enumerate(self.records[: len(self._distances)]):
            sender = self.behind(channel)[0]
            if self._security.seals:
                key = self._security.frame_key
                record.seal_key[:] = key(self.rank, self.outgoing[channel].peer, channel)
                record.open_key[:] = key(sender, self.rank, channel)
            self._authenticator.allow(_domain(channel), self._security.data.credentials(sender))

    def lock(self) -> None:
        """Refuse all further connections; call it once all ranks have taken part in a call.

        A port whose rank has not connected within `TIMES.lock_s` stays open, with the
        authenticator. Where the kernel cannot shut a port, libzmq refuses everybody once the
        authenticator is closed.
        """
        for pushing in self.outgoing:
            pushing.read_events()
        deadline = time.monotonic() + TIMES.lock_s
        # A list, so that every port is tried, also after one that fails.
        if all([p.lock(self._source(c), deadline) for c, p in enumerate(self.incoming)]):
            self._authenticator.close()

    def behind(self, channel: int) -> tuple[int, str]:
        """The rank that `channel` receives from, and the address where that rank listens."""
        place = (self.place - self._distances[channel]) % len(self.members)
        return self.members[place], split_ports(self._addresses[place])[channel]

    def read_events(self) -> None:
        """Process the events of all connections."""
        for end in self._ends():
            end.read_events()

    def is_source_lost(self, channel: int, waited_s: float) -> bool:
        """Whether the connection that `channel` receives from has ended.

        Before the first frame, a rank that is late looks like one that is lost; it counts as lost
        only after `TIMES.quiet_s` of silence.
        """
        return self.incoming[channel].is_lost(self._source(channel), waited_s > TIMES.quiet_s)

    def lost_outgoing(self, wanted: Sequence[int]) -> list[Outgoing]:
        """Connections over one of the `wanted` distances that have ended, the nearest first."""
        return [
            pushing
            for pushing, distance in zip(self.outgoing, self._distances, strict=True)
            if pushing.is_lost and distance in wanted
        ]

    def gone(self) -> list[tuple[int, str]]:
        """Neighbours whose connections have ended, those ahead first, also before any frame."""
        ahead = [(p.peer, p.address) for p in self.lost_outgoing(self._distances)]
        channels = range(len(self.incoming))
        return ahead + [
            self.behind(channel)
            for channel in channels
            if self.is_source_lost(channel, float("inf"))
        ]

    def arrived_bytes(self, channel: int) -> int | None:
        """Total bytes received on `channel`; None where the system does not count them."""
        return self.incoming[channel].arrived_bytes(self._source(channel))

    def sending(self) -> Sending | None:
        """How fast the connections to the next rank were so far; from any thread."""
        found = [pushing.sent() for pushing in self.outgoing[: self._streams]]
        known = [each for each in found if each is not None]
        if not found or len(known) < len(found):
            return None
        # They send at the same time.
        nbytes, seconds = sum(n for n, _ in known), max(s for _, s in known)
        return Sending(self.outgoing[0].peer, nbytes, seconds)

    def borrows(self, channel: int) -> bool:
        """Whether libzmq still holds borrowed memory that is to be sent on `channel`."""
        record = self.records[channel]
        return bool(record.released < record.borrowed)

    def close_inherited(self) -> None:
        """In a forked child: forget the keys, and close its copies of the connections."""
        self._forget_keys()
        ends = [endpoint for pulling in self.incoming for endpoint in pulling.endpoints]
        inherited.close_connections(ends + [pushing.address for pushing in self.outgoing])

    def stop_admitting(self) -> None:
        """Close the authenticator: all further connections are refused."""
        self._authenticator.close()

    def close(self) -> None:
        """Free everything, after about a second at most."""
        inherited.unwatch(self)
        # CURVE copies: libzmq has released borrowed memory before the encrypted copy was written.
        curve = self._security.data.mechanism == "CURVE"
        linger_ms = milliseconds(TIMES.linger_s) if curve else 0
        for pushing in self.outgoing:
            pushing.close(linger_ms)
        for pulling in self.incoming:
            pulling.close()
        self._context.destroy(linger=0)
        self._forget_keys()

    def _forget_keys(self) -> None:
        """Seal nothing from now on, so that no two processes use a key for the same numbers."""
        for record in self.records:
            record.seal_nonce[0] = FRAMES_PER_KEY_MAX
            record.seal_key[:] = record.open_key[:] = bytes(sodium.KEY_BYTES)

    def _ends(self) -> list[Incoming | Outgoing]:
        return [*self.incoming, *self.outgoing]

    def _source(self, channel: int) -> int:
        return int(self.records[channel].source)


def distances(size: int, streams: int) -> tuple[int, ...]:
    """How many ranks ahead each pair of sockets sends: the streams, then the longer distances."""
    return (1,) * streams + schedule.exchange(size).distances[1:]


def _domain(channel: int) -> str:
    """Name of the port of `channel` for the authenticator."""
    return f"data.{channel}"
