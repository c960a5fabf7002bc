"""Slurm's short forms, expanded: lists of hosts, and counts per host."""

from __future__ import annotations

import re
from itertools import product

from ringreduce.vocabulary.errors import ConfigError

# Longer ranges than any cluster has are a mistake, and would fill the memory.
_MEMBERS_MAX = 100_000
_PART = re.compile(r"[^][,]+|\[[^][]+\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """The hosts in `text`, in its order: ``gpu[08-10],login`` is gpu08, gpu09, gpu10, login.

    Raises:
        ConfigError: `text` is no list of hosts, or has more than 100,000.
    """
    hosts: list[str] = []
    for name in _split(text):
        parts = _PART.findall(name)
        if "".join(parts) != name or not parts:
            raise _unreadable(text)
        choices = [_numbers(part, text) if part[0] == "[" else [part] for part in parts]
        for combination in product(*choices):
            hosts.append("".join(combination))
            if len(hosts) > _MEMBERS_MAX:
                raise _unreadable(text)
    return hosts


def expand_counts(text: str) -> list[int]:
    """The number on each host: ``2(x3),1`` is 2, 2, 2, 1. Raises ConfigError as `expand_hosts`."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if not found:
            raise _unreadable(text)
        times = int(found[2] or 1)
        if len(counts) + times > _MEMBERS_MAX:
            raise _unreadable(text)
        counts += [int(found[1])] * times
    return counts


def _split(text: str) -> list[str]:
    """`text` at its commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _numbers(part: str, text: str) -> list[str]:
    """The numbers in ``[08-10,12]``, with their leading zeros."""
    numbers: list[str] = []
    for each in part[1:-1].split(","):
        found = _RANGE.fullmatch(each)
        if not found:
            raise _unreadable(text)
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < _MEMBERS_MAX:
            raise _unreadable(text)
        numbers += [f"{each:0{len(first)}}" for each in range(int(first), int(last) + 1)]
    return numbers


def _unreadable(text: str) -> ConfigError:
    return ConfigError(f"cannot read {text[:80]!r} as Slurm's short form of a list")
