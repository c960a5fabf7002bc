"""``ringreduce trace``: which ranks were late, in words, and what all did, as a drawing."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ringreduce.pure.trace import (
    Lateness,
    Stream,
    decode_trace,
    events,
    joined,
    lateness,
    offsets,
)
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import named

# Ranks are named for which others have waited for this part of the time; at most so many.
_SHARE_MIN, _NAMED_MAX = 0.01, 3
_COLUMNS = "{:>5}{:>10}{:>10}{:>16}{:>16}{:>10}"


def describe(folder: Path) -> Iterator[str]:
    """Lines that say who was late; also writes ``trace.json`` into the folder.

    Raises ConfigError if the folder has no trace.
    """
    streams, notes = _read(folder)
    clocks = {stream.head.rank: stream.head.clock for stream in streams}
    calls = joined(streams)
    bounds = offsets(calls, clocks)
    # Without any bound clocks are taken as they are.
    middles_s = {c: sum(both) / 2 if np.isfinite(both).all() else 0.0 for c, both in bounds.items()}
    shifts_s = {rank: middles_s[clock] for rank, clock in clocks.items()}
    if len(calls.began_s):
        yield from _who(lateness(calls, list(shifts_s.values())), calls.ranks)
    else:
        yield "No call is recorded of several ranks."
    if len(bounds) > 1:
        apart_s = max(abs(most - least) / 2 for least, most in bounds.values())
        notes.append(f"the hosts' clocks are known to {_ms(apart_s)}; less lateness says nothing")
    for note in notes:
        yield from textwrap.wrap(f"Note: {note}.", 80)
    path = folder / "trace.json"
    with path.open("wb") as file:
        # One by one, since there may be millions.
        for number, event in enumerate(events(streams, shifts_s)):
            file.write((b",\n" if number else b'{"traceEvents":[') + msgspec.json.encode(event))
        file.write(b"]}\n")
    yield f"Wrote {path}: open it in https://ui.perfetto.dev"


def _read(folder: Path) -> tuple[list[Stream], list[str]]:
    """Read the latest job's traces, by ranks; say what is missing."""
    streams, notes = [], []
    for path in sorted(folder.glob("rank-*.trace")):
        try:
            streams.append(decode_trace(path.read_bytes()))
        except ValueError as error:
            notes.append(f"{path.name} is left out: {error}")
    if not streams:
        raise ConfigError(
            f"there is no trace (rank-0.trace and so on) in {folder}",
            remedy="Ranks write one from when they join the ring, with `ringreduce run --trace`.",
        )
    last = max((stream.head for stream in streams), key=lambda head: head.when)
    streams = [stream for stream in streams if stream.head.job == last.job]
    streams.sort(key=lambda stream: stream.head.rank)
    if absent := {*range(last.size)} - {stream.head.rank for stream in streams}:
        rest = "each host has the files of its own ranks"
        notes.append(f"there is no trace of {named('rank', sorted(absent))}; {rest}")
    if lost := {stream.head.rank for stream in streams if stream.lost}:
        count, whose = sum(stream.lost for stream in streams), named("rank", sorted(lost))
        notes.append(f"{count:,} records of {whose} were overwritten before they were copied")
    return streams, notes


def _who(late: Lateness, ranks: Sequence[int]) -> Iterator[str]:
    """Whom others have waited for, and a row for each rank."""
    longest_s = np.fmax.reduce(late.waited_s, 1)
    awaited_s = np.bincount(late.last, longest_s, len(ranks))
    slow = [c for c in np.argsort(-awaited_s) if awaited_s[c] >= _SHARE_MIN * late.whole_s]
    if not slow:
        yield f"No rank was late: others waited for each less than {_SHARE_MIN:.0%} of the time."
    for column in slow[:_NAMED_MAX]:
        waits = longest_s[late.last == column]
        text = (
            f"Rank {ranks[column]} was the last to begin {len(waits):,} of {len(longest_s):,} "
            f"calls: others waited for it {waits.sum() / late.whole_s:.1%} of the time, at most "
            f"{_ms(waits.max())} in one call."
        )
        yield from textwrap.wrap(text, 80)
    yield "\n" + _COLUMNS.format("rank", "calls", "last", "median late", "worst late", "waited")
    for column, rank in enumerate(ranks):
        delays = late.late_s[:, column][np.isfinite(late.late_s[:, column])]
        if delays.size:
            waited = f"{np.nansum(late.waited_s[:, column]) / late.whole_s:.1%}"
            times = _ms(np.median(delays)), _ms(delays.max()), waited
            count = f"{(late.last == column).sum():,}"
            yield _COLUMNS.format(rank, f"{delays.size:,}", count, *times)
    yield ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
