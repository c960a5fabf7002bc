"""Reads all flight records of one job from a folder; lists the files that it skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ringreduce.pure.flight import FILE_BYTES_MAX, Dump, Group, decode_dump, file_name
from ringreduce.pure.membership import Membership
from ringreduce.vocabulary.errors import ConfigError

# Fields that a dump has for the whole job and for each group.
_PARTS = sorted({*Group.__struct_fields__} & {*Dump.__struct_fields__})


@dataclass(frozen=True)
class Records:
    """The flight records of one job of `size` ranks, or what they say of one of its groups."""

    size: int
    dumps: Mapping[int, Dump]  # by rank; ranks without a readable record are absent
    # File names, and why they were not used.
    skipped: Mapping[str, str] = field(default_factory=dict)
    group: Membership | None = None

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.size) if self.group is None else sorted(self.group.members)

    @property
    def missing(self) -> list[int]:
        """Ranks without a readable record."""
        return [rank for rank in self.ranks if rank not in self.dumps]

    def groups(self) -> list[Records]:
        """The same of each group that a record has, in the order in which they were formed."""
        memberships = {membership_of(part) for dump in self.dumps.values() for part in dump.groups}
        groups = []
        for group in sorted(memberships, key=lambda g: (g.epoch, g.group, g.members)):
            members = [(rank, self.dumps[rank]) for rank in self.dumps if rank in group.members]
            dumps = {rank: _in_group(dump, group) for rank, dump in members}
            groups.append(replace(self, dumps=dumps, group=group))
        return groups


def membership_of(group: Group) -> Membership:
    """Who is in the group of a record."""
    return Membership(tuple(group.members), group.number, group.epoch)


def _in_group(dump: Dump, group: Membership) -> Dump:
    """Reduce a rank's record to a group; in one that it has closed, it is in user code."""
    part = next((g for g in dump.groups if membership_of(g) == group), None)
    if part is None:
        return msgspec.structs.replace(
            dump, failure=None, groups=[], calls=0, operation=None, nbytes=0, entries=[]
        )
    fields = {name: getattr(part, name) for name in _PARTS}
    return msgspec.structs.replace(dump, groups=[], **fields)


def read_records(folder: Path) -> Records:
    """The flight records of the latest job in `folder`. Raises ConfigError if there are none."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", remedy="Give that of --log-dir.")
    dumps: list[Dump] = []
    skipped: dict[str, str] = {}
    files = folder.glob("flight-rank[0-9]*.json")
    for path in sorted(files, key=lambda path: (len(path.name), path.name)):
        try:
            dumps.append(_read(path))
        except (OSError, ValueError) as error:
            skipped[path.name] = clean(str(error))
    if not dumps:
        why_skipped = "".join(f"; {name}: {why}" for name, why in list(skipped.items())[:4])
        raise ConfigError(
            f"there is no flight record (flight-rank0.json and so on) in {folder}{why_skipped}",
            remedy="Ranks write one when the ring breaks, or on SIGUSR1, with --log-dir.",
        )
    last = max(dumps, key=lambda dump: dump.when)
    for dump in dumps:
        if (dump.job, dump.size) != (last.job, last.size):
            skipped[file_name(dump.rank)] = f"of an earlier job, {clean(dump.iso)}"
    kept = {d.rank: d for d in dumps if (d.job, d.size) == (last.job, last.size)}
    return Records(last.size, kept, skipped)


def _read(path: Path) -> Dump:
    if not path.is_file():  # Reading a pipe might never end.
        raise ValueError("no ordinary file")
    with path.open("rb") as file:
        dump = decode_dump(file.read(FILE_BYTES_MAX + 1))
    if path.name != file_name(dump.rank):
        raise ValueError(f"it speaks of rank {dump.rank}")
    return dump


def shorten(text: str, length: int = 240) -> str:
    """`text` on one line, without control characters, cut to `length`."""
    line = " ".join(clean(text).split())
    return line if len(line) <= length else line[: length - 3] + "..."


def clean(text: str) -> str:
    """`text` without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
