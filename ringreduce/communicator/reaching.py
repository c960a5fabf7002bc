"""Before ranks connect: each finds the addresses at which it reaches those that it sends to."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ringreduce.bootstrap.hello import shown
from ringreduce.communicator.opened_sockets import Announced
from ringreduce.pure.membership import Membership
from ringreduce.pure.networks import Unreached, unreached_table
from ringreduce.pure.placement import Placement
from ringreduce.pure.schedule import channel_distances
from ringreduce.transport.routes import Routes
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import RendezvousError


class Exchange(Protocol):
    """How ranks that form a ring tell each other something: a rendezvous, or a parent ring."""

    def exchange(self, value: Any) -> dict[int, Any]:
        """What each of its ranks has passed, by rank. Raises RendezvousError if one has failed."""

    def guarded(self) -> AbstractContextManager[None]:
        """What fails within lets `exchange` fail on the others."""


def find_ways(
    config: Config,
    routes: Routes,
    membership: Membership,
    placement: Placement,
    announced: Mapping[int, Announced],
    check: Callable[[], None],
) -> list[tuple[int, str, str]]:
    """Find out at which addresses this rank reaches the members that it sends to.

    It tries the ports of their control channels, which every rank has; all members must have done
    so before one connects, since ports are shut then. While this waits it calls `check`. Returns
    what it could not reach: rank, address, reason.
    """
    ahead = _ahead(config, membership, placement)
    peers = {*membership.neighbours(config.rank), *ahead} - {config.rank}
    tried = {rank: announced[rank].control for rank in peers}
    return [(each.peer, each.address, each.why) for each in routes.find(tried, check)]


def refuse_unreached(
    config: Config, hosts: Sequence[str], found: Mapping[int, Sequence[tuple[int, str, str]]]
) -> None:
    """Raise the same RendezvousError on all ranks if one has found no way to another."""
    failed = [Unreached(rank, *each) for rank, theirs in found.items() for each in theirs]
    if failed:
        table = unreached_table(failed, dict(enumerate(map(shown, hosts))))
        raise RendezvousError(
            f"cannot form the ring, since ranks cannot reach each other:\n{table}\n",
            **config.who,
            peer=failed[0].peer,
            remedy="Let these hosts connect to each other at these ports (RINGREDUCE_PORTS gives "
            "them a range for firewalls), or choose another network by RINGREDUCE_IFACE on all "
            "hosts.",
        )


def ways_to(routes: Routes, announced: Mapping[int, Announced]) -> dict[int, Announced]:
    """What members have announced, at the addresses that this rank has found."""
    return {
        rank: Announced(
            routes.lead(rank, each.address), routes.lead(rank, each.control), each.memory
        )
        for rank, each in announced.items()
    }


def _ahead(config: Config, membership: Membership, placement: Placement) -> list[int]:
    """The members that it sends data to over sockets, the next one first."""
    group_rank = membership.group_rank(config.rank)
    lane = placement.hosts[placement.host_of(group_rank)].index(group_rank)
    if placement.transport == "shm" or lane >= placement.lanes:
        return []
    ring = [membership.members[other] for other in placement.lane(lane)]
    here, distances = ring.index(config.rank), channel_distances(len(ring), config.streams)
    return [ring[(here + each) % len(ring)] for each in distances]
