"""Slurm's short forms: the first of a list of hosts, and the count of one of them."""

import re

from ringreduce.vocabulary.errors import ConfigError

_RANGE = r"\d+(?:-\d+)?"
# Of a list, as gpu[08-10,12],login: the first host's name, in which brackets hold ranges.
_FIRST = re.compile(rf"(?:[^][,\s]|\[{_RANGE}(?:,{_RANGE})*\])+(?=,|$)", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def first_host(text: str) -> str:
    """The first host: of ``gpu[08-10],login``, gpu08. Raises ConfigError for what is no list."""
    found = _FIRST.match(text)
    if not found:
        raise _unreadable(text)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", found[0])


def count_of(text: str, host: int) -> int:
    """The number on a host: ``2(x3),1`` is 2, 2, 2, 1; 0 beyond them. Raises as `first_host`."""
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if not found:
            raise _unreadable(text)
        host -= int(found[2] or 1)
        if host < 0:
            return int(found[1])
    return 0


def _unreadable(text: str) -> ConfigError:
    return ConfigError(f"cannot read {text[:80]!r} as Slurm's short form of a list")
