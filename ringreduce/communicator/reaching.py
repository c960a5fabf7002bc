"""Before ranks connect: each finds the addresses at which it reaches those that it sends to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringreduce.bootstrap.rendezvous import Meeting
from ringreduce.bootstrap.settlement import OPEN_NETWORK
from ringreduce.communicator.ends import Announced, Ends
from ringreduce.pure.membership import Membership
from ringreduce.pure.networks import unreached_table
from ringreduce.pure.placement import Placement
from ringreduce.transport.connections import distances
from ringreduce.transport.routes import Routes
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import RendezvousError


def reached(
    config: Config,
    routes: Routes,
    hosts: Mapping[int, str],
    membership: Membership,
    placement: Placement,
    ends: Ends,
    announced: Mapping[int, Announced],
    meeting: Meeting | None,
    check: Callable[[], None],
) -> dict[int, Announced]:
    """What the members have announced, at the addresses that this rank has chosen.

    While it waits it calls `check`. With a `meeting` all members agree on whether all succeed.

    Raises:
        RendezvousError: a rank cannot reach one that it sends to: with a meeting on all ranks.
    """
    if not routes.are_needed:
        return dict(announced)
    # At the port of the control channel, which every rank has.
    tried = {rank: announced[rank].control for rank in _peers(config, membership, placement)}
    unreached = routes.find(tried, check)
    if meeting is not None:
        settlement = meeting.settlement(unreached, hosts)
        while not settlement.advance():
            ends.read_events()
    elif unreached:
        raise RendezvousError(
            f"cannot reach ranks of a group:\n{unreached_table(unreached, hosts)}\n",
            **config.who,
            peer=unreached[0].peer,
            remedy=OPEN_NETWORK,
        )
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
