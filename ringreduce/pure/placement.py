"""Which ranks share memory, and which of them communicate with other hosts. Pure.

    host A            host B            lanes: min(3, 2) = 2
    0   1   2         3   4
    |   |             |   |
    |   +-------------|---+  lane 1
    +-----------------+      lane 0

The first `lanes` ranks of each host each form a ring with the ranks of the same index on the other
hosts, so that the links between hosts carry several flows at once.
"""

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple


class Placement(NamedTuple):
    """The hosts of all ranks of a job."""

    # The ranks of each group that shares memory, ascending; groups by first rank. A rank that
    # shares memory with no other is a group by itself.
    hosts: tuple[tuple[int, ...], ...]

    @property
    def lanes(self) -> int:
        """How many ranks of each host communicate with other hosts."""
        return min(len(host) for host in self.hosts)

    @property
    def transport(self) -> str:
        """``shm``, ``zmq``, or ``shm+zmq`` for two levels."""
        if len(self.hosts) == 1:
            return "shm"
        return "zmq" if all(len(host) == 1 for host in self.hosts) else "shm+zmq"

    @property
    def is_in_rank_order(self) -> bool:
        """Whether a ring of the hosts passes them in the order of their first ranks."""
        return list(self.hosts) == sorted(self.hosts)

    def host_of(self, rank: int) -> int:
        """Index of the group that `rank` belongs to."""
        return next(i for i, host in enumerate(self.hosts) if rank in host)

    def lane(self, index: int) -> tuple[int, ...]:
        """The ranks of lane `index`, one on each host, in the order of the hosts."""
        return tuple(host[index] for host in self.hosts)


def in_ring_order(placement: Placement, networks: Sequence[Sequence[str]]) -> Placement:
    """The same hosts, so that a ring leaves a subnet as seldom as it can without measuring.

    After each host comes the lowest one that shares a subnet with it, if there is one left, else
    the lowest one left. `networks` are of each rank, with prefixes. Where all hosts share a subnet,
    or none do, they stay as they are.
    """
    own = [_subnets(networks[host[0]]) for host in placement.hosts]
    addresses: dict[object, list[object]] = {}
    for subnets in own:
        for subnet, address in subnets.items():
            addresses.setdefault(subnet, []).append(address)
    # Where two hosts have the same address there is no network between them, as of docker0.
    common = {subnet for subnet, each in addresses.items() if len(each) == len(set(each))}
    near = [subnets.keys() & common for subnets in own]
    left = list(range(len(own)))
    order: list[int] = []
    while left:
        last = near[order[-1]] if order else set()
        order.append(next((each for each in left if near[each] & last), left[0]))
        left.remove(order[-1])
    return Placement(tuple(placement.hosts[index] for index in order))


def _subnets(networks: Sequence[str]) -> dict[object, object]:
    """This host's address in each of its subnets."""
    found = map(ipaddress.ip_interface, networks)
    return {each.network: each.ip for each in found if each.network.num_addresses > 1}


def place(hosts: Sequence[str], memory: Sequence[str]) -> Placement:
    """Group ranks with the same name in `hosts` and text in `memory`; empty: it shares none."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, (host, domain) in enumerate(zip(hosts, memory, strict=True)):
        alone = (str(rank),)
        groups.setdefault((host, domain, "") if domain else alone, []).append(rank)
    return Placement(tuple(tuple(ranks) for ranks in groups.values()))
