"""Which hosts a job runs on, and which ranks each of them has. Pure.

``-H a:2,b:2``, or lines of a hostfile: ``a``, ``a:2`` or ``a slots=2``, as MPI and Horovod read
them. A host without a number has one slot; an IPv6 address stands in brackets.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringreduce.vocabulary.errors import ConfigError

_SLOTS_MAX = 1 << 16
# No name begins as an option of ssh does, or holds what a shell reads.
_HOST = re.compile(
    r"(?:(?P<user>[\w.][\w.-]*)@)?(?:(?P<name>[A-Za-z0-9_][\w.-]*)|\[(?P<ipv6>[\da-fA-F:.]+(?:%[\w.-]+)?)\])"
    r"(?::(?P<slots>[^:]*))?",
    re.ASCII,
)
_SLOTS = re.compile(r"(max[_-])?slots=(.*)", re.DOTALL)


class Host(NamedTuple):
    """A host that the user named."""

    login: str  # how ssh names it: ``host`` or ``user@host``
    name: str  # without a user, and an IPv6 address without brackets
    slots: int  # the ranks that it may have


@dataclass(frozen=True)
class Share:
    """The ranks of one host: `count` from `first_rank` on."""

    host: Host
    first_rank: int
    count: int


def parse_hosts(text: str) -> list[Host]:
    """The hosts of ``-H``. Raises ConfigError, which names the part that is wrong."""
    return _distinct([_parse(part.strip(), f"-H {text[:80]}") for part in text.split(",")])


def parse_hostfile(text: str, path: str) -> list[Host]:
    """The hosts of a file's text. Raises ConfigError, which names the line that is wrong."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            hosts.append(_parse_line(words, f"line {number} of {path}"))
    if not hosts:
        raise ConfigError(
            f"the hostfile {path} names no host", remedy="Write lines such as `node1 slots=2`."
        )
    return _distinct(hosts)


def share_out(hosts: Sequence[Host], count: int | None) -> list[Share]:
    """Give `count` ranks, or one for each slot, to hosts in order; ConfigError if too many."""
    slots = sum(host.slots for host in hosts)
    count = slots if count is None else count
    if count > slots:
        raise ConfigError(
            f"{count} workers are asked for, and the hosts have {slots} slots",
            remedy="Give hosts more slots, as in -H a:4,b:4.",
        )
    shares, first = [], 0
    for host in hosts:
        ranks = min(host.slots, count - first)
        if ranks:
            shares.append(Share(host, first, ranks))
        first += ranks
    return shares


def labels(shares: Sequence[Share]) -> list[str]:
    """Label each rank's lines by its host, as short as hosts still differ, and rank."""
    names = [share.host.name for share in shares]
    are_addresses = [":" in name or name.replace(".", "").isdecimal() for name in names]
    pairs = zip(names, are_addresses, strict=True)
    short = [name if is_address else name.partition(".")[0] for name, is_address in pairs]
    if len(set(short)) < len(names):
        short = names
    return [
        f"{name}:{rank}"
        for name, share in zip(short, shares, strict=True)
        for rank in range(share.first_rank, share.first_rank + share.count)
    ]


def _parse_line(words: list[str], where: str) -> Host:
    name, *options = words
    for option in options:
        match = _SLOTS.fullmatch(option)
        if match is None:
            raise ConfigError(
                f"{where} has {option[:80]!r}", remedy="A line is a host and slots=N, or host:N."
            )
        # The most that MPI may start beyond the slots, which we never do.
        if match[1] is None:
            name += f":{match[2]}"
    return _parse(name, where)


def _parse(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text[:80]!r} is no host, in {where}",
            remedy="Accepted: host, host:SLOTS, user@host:SLOTS; an IPv6 address in brackets.",
        )
    name = match["name"] or match["ipv6"]
    slots = "1" if match["slots"] is None else match["slots"]
    if not (slots.isdecimal() and len(slots) < 6 and 1 <= int(slots) <= _SLOTS_MAX):
        raise ConfigError(
            f"{slots!r} is no number of slots for {name}, in {where}; accepted: 1 to {_SLOTS_MAX}"
        )
    login = f"{match['user']}@{name}" if match["user"] else name
    return Host(login, name, int(slots))


def _distinct(hosts: list[Host]) -> list[Host]:
    names = [host.name for host in hosts]
    for host in hosts:
        if names.count(host.name) > 1:
            total = sum(other.slots for other in hosts if other.name == host.name)
            raise ConfigError(
                f"the host {host.name} is named twice",
                remedy=f"Name it once, with all its slots: {host.login}:{total}.",
            )
    return hosts
