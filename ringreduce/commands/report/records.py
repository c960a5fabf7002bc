"""Reads all flight records of one job from a folder; lists the files that it skips."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ringreduce.commands.launch.tracebacks import last_words
from ringreduce.pure.flight import FILE_BYTES_MAX, Dump, decode_dump
from ringreduce.vocabulary.errors import ConfigError

_FILES = re.compile(r"flight-rank(\d{1,7})\.json")
_LOG_TAIL_BYTES = 1 << 14


@dataclass(frozen=True)
class Records:
    """The flight records of one job of `size` ranks.

    Attributes:
        dumps: by rank; ranks without a readable record are absent.
        skipped: file names, and why they were not used.
        log_tails: what the log of each rank without a record ends with.
    """

    size: int
    dumps: Mapping[int, Dump]
    skipped: Mapping[str, str] = field(default_factory=dict)
    log_tails: Mapping[int, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Ranks without a readable record."""
        return [rank for rank in range(self.size) if rank not in self.dumps]


def read_records(folder: Path) -> Records:
    """The flight records of the latest job in `folder`. Raises ConfigError if there are none."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", remedy="Give that of --log-dir.")
    dumps: list[Dump] = []
    skipped: dict[str, str] = {}
    for path in sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name)):
        matched = _FILES.fullmatch(path.name)
        if matched is None:
            continue
        try:
            dump = _read(path)
        except (OSError, ValueError) as error:
            skipped[path.name] = clean(str(error))
            continue
        if dump.rank == int(matched[1]):
            dumps.append(dump)
        else:
            skipped[path.name] = f"it speaks of rank {dump.rank}"
    if not dumps:
        found = "".join(f"; {name}: {why}" for name, why in list(skipped.items())[:4])
        raise ConfigError(
            f"there is no flight record (flight-rank0.json and so on) in {folder}{found}",
            remedy="Ranks write one when the ring breaks, or on SIGUSR1, with --log-dir.",
        )
    last = max(dumps, key=lambda dump: dump.when)
    for dump in dumps:
        if (dump.job, dump.size) != (last.job, last.size):
            skipped[f"flight-rank{dump.rank}.json"] = f"of an earlier job, {clean(dump.iso)}"
    kept = {d.rank: d for d in dumps if (d.job, d.size) == (last.job, last.size)}
    tails = {}
    for rank in range(last.size):
        if rank not in kept and (line := _last_words(folder / f"rank-{rank}.log")):
            tails[rank] = line
    return Records(last.size, kept, skipped, tails)


def _read(path: Path) -> Dump:
    if not path.is_file():  # Reading a pipe might never end.
        raise ValueError("no ordinary file")
    with path.open("rb") as file:
        return decode_dump(file.read(FILE_BYTES_MAX + 1))


def _last_words(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return shorten(last_words(lines))


def shorten(text: str, length: int = 240) -> str:
    """`text` on one line, without control characters, cut to `length`."""
    line = " ".join(clean(text).split())
    return line if len(line) <= length else line[: length - 3] + "..."


def clean(text: str) -> str:
    """`text` without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
