"""Which of its addresses a host offers to others, and in which order these try them. Pure.

Addresses are numeric text; a network is an address with its prefix, ``10.0.0.4/24``.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ringreduce.vocabulary.endpoints import Pattern

# Interfaces that lead to containers and virtual machines of their own host.
BRIDGES = (
    *("docker*", "br-*", "podman*", "cni*", "cali*", "flannel*", "cilium_*", "weave", "veth*"),
    *("kube-*", "nodelocaldns", "virbr*", "vmnet*", "vboxnet*", "lxcbr*", "lxdbr*", "dummy*"),
)
OFFERED_MAX = 8  # a rank offers no more, so that the rendezvous's table stays small

_NETWORK_CHARACTERS_MAX = 64
_ROWS_SHOWN, _HOST_WIDTH = 16, 12


class Local(NamedTuple):
    """An address of this host, of the interface `name`."""

    name: str
    network: str

    @property
    def at(self) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
        return ipaddress.ip_interface(self.network)

    @property
    def is_usable(self) -> bool:
        """Whether other hosts can know this one by it."""
        ip = self.at.ip
        return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast)


def offered(local: Sequence[Local], patterns: Sequence[Pattern]) -> list[Local]:
    """The addresses in `local` that other hosts may use.

    Without a pattern that includes, all usable ones but those of `BRIDGES`. Raises ValueError if
    such a pattern matches no usable address, or none is left.
    """
    usable = [address for address in local if address.is_usable]
    included, excluded = list[Local](), list[Local]()
    for pattern in patterns:
        matched = [address for address in usable if pattern.matches(address.name, address.at.ip)]
        if not pattern.excludes and not matched:
            raise ValueError(f"{pattern.text} matches no address of this host")
        (excluded if pattern.excludes else included).extend(matched)
    if not included:
        included = [
            address for address in usable if not any(fnmatchcase(address.name, b) for b in BRIDGES)
        ]
    chosen = [address for address in usable if address in included and address not in excluded]
    if patterns and not chosen:
        raise ValueError("every address of this host is excluded")
    return chosen


def described(local: Sequence[Local]) -> str:
    """Usable addresses for an error: ``eth0 10.0.0.4/24, ib0 10.1.0.4/16``."""
    usable = [f"{address.name} {address.network}" for address in local if address.is_usable]
    return ", ".join(usable[:16]) or "none"


def ways(own: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    """The addresses in `theirs` in the order in which this rank should try them.

    First those of a common subnet, then those of the family of the peer's first address, which
    leads to the rendezvous. An address that this host has too is another network's (each host has
    a docker0), unless it has all of them: then both ranks are on it.
    """
    mine = [ipaddress.ip_interface(network) for network in own]
    candidates = [ipaddress.ip_interface(network) for network in theirs]
    elsewhere = [address for address in candidates if address.ip not in {ours.ip for ours in mine}]

    def cost(address: ipaddress.IPv4Interface | ipaddress.IPv6Interface) -> tuple[bool, bool]:
        is_common = any(address.ip in ours.network and ours.ip in address.network for ours in mine)
        return not is_common, address.version != candidates[0].version

    return tuple(str(address.ip) for address in sorted(elsewhere or candidates, key=cost))


def are_networks(texts: Sequence[str]) -> bool:
    """Whether `ways` can read what a rank offers."""
    try:
        return len(texts) <= OFFERED_MAX and all(
            len(text) <= _NETWORK_CHARACTERS_MAX and ipaddress.ip_interface(text) for text in texts
        )
    except ValueError:
        return False


class Unreached(NamedTuple):
    """An address of rank `peer` at which rank `rank` could not connect, and why not."""

    rank: int
    peer: int
    address: str
    why: str


def unreached_table(rows: Sequence[Unreached], hosts: Mapping[int, str]) -> str:
    """Who could not reach whom, at which address, and why; `hosts` are names by rank."""
    shown = rows[:_ROWS_SHOWN]
    named = {rank: f"{rank} {host[:_HOST_WIDTH]}".strip() for rank, host in hosts.items()}
    cells = [("from", "to", "at", "why")]
    cells += [(named[row.rank], named[row.peer], *row[2:]) for row in shown]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = [
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, [*widths, 0], strict=True))
        for line in cells
    ]
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more")
    return "\n".join(lines)
