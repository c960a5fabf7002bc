"""Before ranks connect: each finds the addresses at which it reaches those that it sends to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ringreduce.bootstrap.rendezvous import Meeting
from ringreduce.bootstrap.settlement import OPEN_NETWORK
from ringreduce.communicator.ends import Announced, Ends
from ringreduce.pure.membership import Membership
from ringreduce.pure.networks import Unreached, unreached_table
from ringreduce.pure.placement import Placement
from ringreduce.transport.connections import distances
from ringreduce.transport.routes import Routes
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import RendezvousError


def find_ways(
    config: Config,
    routes: Routes,
    membership: Membership,
    placement: Placement,
    announced: Mapping[int, Announced],
    check: Callable[[], None] = lambda: None,
) -> list[Unreached]:
    """Find out at which addresses this rank reaches the members that it sends to.

    It tries the ports of their control channels, which every rank has; all members must have done
    so before one connects, since ports are shut then. While this waits it calls `check`.
    """
    tried = {rank: announced[rank].control for rank in _peers(config, membership, placement)}
    return routes.find(tried, check)


def settle(
    meeting: Meeting, unreached: Sequence[Unreached], hosts: Mapping[int, str], ends: Ends
) -> None:
    """Wait until all members have found their ways.

    Raises:
        RendezvousError: on all members, if one has not.
    """
    settlement = meeting.settlement(unreached, hosts)
    while not settlement.advance():
        ends.read_events()


def refuse_unreached(
    config: Config, unreached: Sequence[Unreached], hosts: Mapping[int, str]
) -> None:
    """Raise RendezvousError if this rank cannot reach a member of a group."""
    if unreached:
        raise RendezvousError(
            f"cannot reach ranks of a group:\n{unreached_table(unreached, hosts)}\n",
            **config.who,
            peer=unreached[0].peer,
            remedy=OPEN_NETWORK,
        )


def ways_to(routes: Routes, announced: Mapping[int, Announced]) -> dict[int, Announced]:
    """What members have announced, at the addresses that this rank has found."""
    return {
        rank: Announced(
            routes.lead(rank, each.address), routes.lead(rank, each.control), each.memory
        )
        for rank, each in announced.items()
    }


def _peers(config: Config, membership: Membership, placement: Placement) -> set[int]:
    """The members that this rank connects to."""
    peers = set(membership.neighbours(config.rank))
    place = membership.place(config.rank)
    lane = placement.hosts[placement.host_of(place)].index(place)
    if placement.transport != "shm" and lane < placement.lanes:
        ring = [membership.members[other] for other in placement.lane(lane)]
        here = ring.index(config.rank)
        ahead = distances(len(ring), config.streams)
        peers |= {ring[(here + distance) % len(ring)] for distance in ahead}
    return peers - {config.rank}
