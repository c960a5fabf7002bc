"""Before ranks connect: each finds the addresses at which it reaches those that it sends to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ringreduce.bootstrap.rendezvous import Rendezvous
from ringreduce.bootstrap.settlement import OPEN_NETWORK
from ringreduce.communicator.opened_sockets import Announced, OpenedSockets
from ringreduce.pure.membership import Membership
from ringreduce.pure.networks import Unreached, unreached_table
from ringreduce.pure.placement import Placement
from ringreduce.transport.connections import distances
from ringreduce.transport.routes import Routes
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import RendezvousError

_log = logging.getLogger(__name__)

# Between hosts of one site an answer takes less. One connection carries 500 MB/s then.
_LONG_S = 0.005


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
    rendezvous: Rendezvous,
    unreached: Sequence[Unreached],
    hosts: Mapping[int, str],
    opened: OpenedSockets,
) -> None:
    """Wait until all members have found their ways.

    Raises:
        RendezvousError: on all members, if one has not.
    """
    settlement = rendezvous.settlement(unreached, hosts)
    while not settlement.advance():
        opened.read_events()


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


def advise_streams(
    config: Config, routes: Routes, membership: Membership, placement: Placement
) -> None:
    """Warn of a long link that one stream cannot fill, where nobody has chosen how many to use."""
    ahead = _ahead(config, membership, placement)
    took_s = routes.round_trip_s(ahead[0]) if ahead else 0.0
    if took_s < _LONG_S or config.streams > 1:
        return
    _log.warning(
        "[%d/%d] a round trip to rank %d takes %.0f ms. One connection carries 2 to 3 MB in that"
        " time with Linux's usual buffers; set RINGREDUCE_STREAMS to 2 to 4 on all ranks, or let"
        ' the buffers grow ("Long links" in docs/guides/settings.md)',
        *(config.rank, config.size, ahead[0], took_s * 1e3),
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
    ahead = _ahead(config, membership, placement)
    return {*membership.neighbours(config.rank), *ahead} - {config.rank}


def _ahead(config: Config, membership: Membership, placement: Placement) -> list[int]:
    """The members that it sends data to over sockets, the next one first."""
    group_rank = membership.group_rank(config.rank)
    lane = placement.hosts[placement.host_of(group_rank)].index(group_rank)
    if placement.transport == "shm" or lane >= placement.lanes:
        return []
    ring = [membership.members[other] for other in placement.lane(lane)]
    here = ring.index(config.rank)
    return [ring[(here + each) % len(ring)] for each in distances(len(ring), config.streams)]
