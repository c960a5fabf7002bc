"""Before ranks connect: to which others each sends, and at which addresses it reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ringreduce.bootstrap.hello import shown
from ringreduce.communicator.opened_sockets import Announced
from ringreduce.pure.membership import Membership
from ringreduce.pure.networks import Unreached, unreached_table
from ringreduce.pure.placement import Placement
from ringreduce.pure.schedule import channel_distances
from ringreduce.vocabulary.errors import RendezvousError

if TYPE_CHECKING:
    from ringreduce.communicator.formation import Job


@dataclass(frozen=True)
class Layout:
    """Where the members of a ring are, as one of them sees it: `rank`, of the job."""

    rank: int
    membership: Membership
    placement: Placement

    @property
    def together(self) -> list[int]:
        """The members that share memory with it, itself among them."""
        host = self.placement.host_of(self.membership.group_rank(self.rank))
        return [self.membership.members[place] for place in self.placement.hosts[host]]

    @property
    def lane(self) -> Membership | None:
        """The members of its ring over sockets; None: it sends no data over sockets."""
        index = self.together.index(self.rank)
        if self.placement.transport == "shm" or index >= self.placement.lanes:
            return None
        members = [self.membership.members[place] for place in self.placement.lane(index)]
        return replace(self.membership, members=tuple(members))


class Exchanger(Protocol):
    """How ranks that form a ring tell each other something: a rendezvous, or a parent ring."""

    def exchange(self, value: Any) -> dict[int, Any]:
        """Return each rank's value, by rank. Raises RendezvousError if one has failed."""

    def guarded(self) -> AbstractContextManager[None]:
        """If the block raises, `exchange` raises on all other ranks."""


def find_ways(
    job: Job,
    layout: Layout,
    announced: Mapping[int, Announced],
    others: Exchanger,
    check: Callable[[], None],
) -> dict[int, Announced]:
    """Choose the addresses at which this rank reaches what members have `announced`.

    It tries the ports of the control channels, which every rank has, of those that it sends to; all
    members must have done so before one connects, since ports are shut then. While this waits it
    calls `check`. Raises RendezvousError, on all ranks, if one has found no way to another.
    """
    with others.guarded():
        lane = layout.lane
        distances = () if lane is None else channel_distances(lane.size, job.config.streams)
        ahead = [] if lane is None else [lane.ahead(layout.rank, hops) for hops in distances]
        peers = {*layout.membership.neighbours(layout.rank), *ahead} - {layout.rank}
        failed = job.routes.find({rank: announced[rank].control for rank in peers}, check)
        unreached = [(way.peer, way.address, way.why) for way in failed]
    refuse_unreached(job, others.exchange(unreached))
    lead = job.routes.lead
    return {
        rank: Announced(lead(rank, member.address), lead(rank, member.control), member.memory)
        for rank, member in announced.items()
    }


def refuse_unreached(job: Job, unreached: Mapping[int, Sequence[tuple[int, str, str]]]) -> None:
    """Raise the same RendezvousError on all ranks if one has found no way to another."""
    failed = [Unreached(rank, *row) for rank, rows in unreached.items() for row in rows]
    if failed:
        table = unreached_table(failed, dict(enumerate(map(shown, job.hosts))))
        raise RendezvousError(
            f"cannot form the ring, since ranks cannot reach each other:\n{table}\n",
            **job.config.who,
            peer=failed[0].peer,
            remedy="Let these hosts connect to each other at these ports (RINGREDUCE_PORTS gives "
            "them a range for firewalls), or choose another network by RINGREDUCE_IFACE on all "
            "hosts.",
        )
