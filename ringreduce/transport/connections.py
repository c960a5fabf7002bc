"""The channels of a ring over ZeroMQ: which rank each leads to, and which neighbours are lost.

Each rank binds a PULL socket for every connection that another rank makes to it, and connects a
PUSH socket to each of those it sends to (`ringreduce.transport.channel`): `streams` of them to the
next rank, and one each to the ranks 2, 4, 8, ... positions ahead, for the exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringreduce.pure import schedule
from ringreduce.pure.membership import Membership
from ringreduce.pure.watcher_messages import SentToNext
from ringreduce.transport.channel import Incoming, Outgoing, announced_ports, join_ports
from ringreduce.transport.listening import Bind
from ringreduce.transport.records import ChannelRecord
from ringreduce.transport.security import Security
from ringreduce.transport.sockets import Sockets


class Connections:
    """A link's pairs of sockets, by channel: first the streams, then the longer distances.

    Frames longer than `frame_bytes_max` are refused unread. The ring will have at most
    `members_max` members. Other arguments are as in `ZmqLink`.

    Attributes:
        address: where the sockets listen: an address with one port for each channel.
        who: this rank and the size of the job, for errors.
        members: the ranks of the ring, in its order. Frames and schedules give places in it.
        sockets: all of them.
        incoming, outgoing: one for each channel; `outgoing` is empty until `connect`.
        records: one for each channel, for the compiled loops.
        sources: for each channel, where the rank listens that it receives from.
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
        self._rank, self.who = security.rank, security.who
        self.members: tuple[int, ...] = ()
        self._streams = streams
        self._distances = distances(members_max, streams)
        self.sources: list[str] = []
        self.records = (ChannelRecord * len(self._distances))()
        self.sockets = Sockets(security, security.data, streams)
        self.incoming: list[Incoming] = self.sockets.incoming
        self.outgoing: list[Outgoing] = self.sockets.outgoing
        try:
            for channel, record in enumerate(self.records):
                self.sockets.listen(bind, record, channel, f"data.{channel}", frame_bytes_max)
        except BaseException:
            self.sockets.close(0)
            raise
        self.address = join_ports([pulling.address for pulling in self.incoming])

    def connect(self, addresses: Mapping[int, str], membership: Membership) -> None:
        """Connect to the ranks ahead at `addresses`, by rank, and close the sockets not needed."""
        self.members, expected = membership.members, len(self._distances)
        self._distances = distances(membership.size, self._streams)
        for unneeded in self.incoming[len(self._distances) :]:
            self.sockets.drop(unneeded)
        ports = {
            peer: announced_ports(addresses[peer], expected, peer, self.sockets.security)
            for peer in membership.members
        }
        for channel, distance in enumerate(self._distances):
            ahead, behind = (membership.ahead(self._rank, each) for each in (distance, -distance))
            self.sockets.connect(ports[ahead][channel], ahead, self.records[channel], channel)
            self.sockets.admit(self.incoming[channel], behind)
            self.sources.append(ports[behind][channel])

    def address_of(self, peer: int) -> str:
        """Where a member listens, or the port of it that this rank sends to."""
        ahead = (pushing.address for pushing in self.outgoing if pushing.peer == peer)
        known = zip(self.incoming, self.sources, strict=True)
        behind = (address for pulling, address in known if pulling.peer == peer)
        return next(behind, None) or next(ahead, "")

    def lost_outgoing(self, wanted: Sequence[int]) -> list[Outgoing]:
        """Connections over one of the `wanted` distances that have ended, the nearest first."""
        return [
            pushing
            for pushing, distance in zip(self.outgoing, self._distances, strict=True)
            if pushing.is_lost and distance in wanted
        ]

    def gone(self) -> list[int]:
        """Neighbours whose connections have ended, those ahead first, also before any frame."""
        ahead = [pushing.peer for pushing in self.lost_outgoing(self._distances)]
        behind = [pulling.peer for pulling in self.incoming if pulling.is_lost(True)]
        return ahead + behind

    def sent_to_next(self) -> SentToNext | None:
        """How fast the connections to the next rank were so far; from any thread."""
        found = [pushing.sent() for pushing in self.outgoing[: self._streams]]
        known = [each for each in found if each is not None]
        if not found or len(known) < len(found):
            return None
        # They send at the same time.
        nbytes, seconds = sum(n for n, _ in known), max(s for _, s in known)
        return SentToNext(self.outgoing[0].peer, nbytes, seconds)


def distances(size: int, streams: int) -> tuple[int, ...]:
    """How many ranks ahead each pair of sockets sends: the streams, then the longer distances."""
    return (1,) * streams + schedule.exchange(size).distances[1:]
