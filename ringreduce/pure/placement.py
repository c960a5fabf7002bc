"""Which ranks share memory, and which of them communicate with other hosts. Pure.

    host A            host B            lanes: min(3, 2) = 2
    0   1   2         3   4
    |   |             |   |
    |   +-------------|---+  lane 1
    +-----------------+      lane 0

The first `lanes` ranks of each host each form a ring with the ranks of the same index on the other
hosts, so that the links between hosts carry several flows at once.
"""

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

    def host_of(self, rank: int) -> int:
        """Index of the group that `rank` belongs to."""
        return next(i for i, host in enumerate(self.hosts) if rank in host)

    def lane(self, index: int) -> tuple[int, ...]:
        """The ranks of lane `index`, one on each host, in the order of the hosts."""
        return tuple(host[index] for host in self.hosts)


def place(hosts: Sequence[str], memory: Sequence[str]) -> Placement:
    """Group ranks with the same name in `hosts` and text in `memory`; empty: it shares none."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, (host, domain) in enumerate(zip(hosts, memory, strict=True)):
        alone = (str(rank),)
        groups.setdefault((host, domain, "") if domain else alone, []).append(rank)
    return Placement(tuple(tuple(ranks) for ranks in groups.values()))
