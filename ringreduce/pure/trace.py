"""Traces: the file that a rank writes of a communicator, and what the files of all ranks say. Pure.

A file is a line of JSON, and records as they are in memory (`ringreduce.pure.spans`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from ringreduce.pure.decoding import UNREADABLE
from ringreduce.pure.membership import Membership
from ringreduce.pure.spans import SPAN_BYTES, Span, SpanKind, decode_spans


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Whose records a file has."""

    format: Literal[2] = 2  # incremented by every change that an older reader would misunderstand
    job: str  # the job's id, which tells traces of several jobs apart
    when: float  # it began, in seconds since the epoch
    rank: int
    size: int
    host: str
    clock: str  # equal for ranks whose times are on one clock
    membership: Membership
    first: int  # number of the next call, which counts as 0


class Stream(NamedTuple):
    """The contents of a file; calls have the numbers that they have on all ranks."""

    head: Head
    spans: list[Span]
    lost: int  # records that were overwritten before they were copied


def file_name(head: Head) -> str:
    """Name of a file; further communicators of a rank have further files."""
    membership = head.membership
    group = f"-group-{membership.group}" if membership.group else ""
    epoch = f"-epoch-{membership.epoch}" if membership.epoch else ""
    return f"rank-{head.rank}{group}{epoch}.trace"


def decode_trace(data: bytes) -> Stream:
    """Decode a file, also of a rank that was killed; ValueError if it is no trace."""
    line, _, records = data.partition(b"\n")
    try:
        head = msgspec.json.decode(line, type=Head)
    except UNREADABLE as error:
        raise ValueError(f"it is no trace: {error}") from error
    spans = list(decode_spans(records[: len(records) // SPAN_BYTES * SPAN_BYTES]))
    lost = sum(span.number for span in spans if span.kind == SpanKind.LOST)
    kept = [s._replace(number=s.number - head.first) for s in spans if s.kind != SpanKind.LOST]
    return Stream(head, kept, lost)


class Calls(NamedTuple):
    """Calls that several ranks have recorded, in rows; columns are `ranks`, NaN: takes no part."""

    ranks: list[int]
    began_s: np.ndarray
    ended_s: np.ndarray
    are_meetings: np.ndarray  # whether no rank can end the call before all have begun it


def joined(streams: Sequence[Stream]) -> Calls:
    """The calls of which all ranks of a communicator that were traced have a record.

    The barrier with which a ring forms is left out, since ranks start at different times.
    """
    ranks = sorted({stream.head.rank for stream in streams})
    times, are_meetings = [np.empty((0, len(ranks), 2))], []
    for membership in dict.fromkeys(stream.head.membership for stream in streams):
        calls = {
            ranks.index(stream.head.rank): {
                s.number: s for s in stream.spans if s.kind == SpanKind.CALL
            }
            for stream in streams
            if stream.head.membership == membership
        }
        first = next(iter(calls.values()))
        common = sorted(set.intersection(*map(set, calls.values()))) if len(calls) > 1 else []
        if common[:1] == [0] and first[0].operation == "barrier":
            del common[0]
        rows = np.full((len(common), len(ranks), 2), np.nan)
        for column, spans in calls.items():
            rows[:, column] = np.reshape([spans[n][-2:] for n in common], (-1, 2))
        times.append(rows)
        # The last call may have failed.
        are_meetings += [n < common[-1] and _is_meeting(first[n]) for n in common]
    began_s, ended_s = np.moveaxis(np.concatenate(times), 2, 0)
    return Calls(ranks, began_s, ended_s, np.array(are_meetings, bool))


def _is_meeting(call: Span) -> bool:
    return call.operation == "barrier" or (call.operation == "all_reduce" and call.nbytes > 0)


def offsets(calls: Calls, clocks: Mapping[int, str]) -> dict[str, tuple[float, float]]:
    """Bounds of what turns times of a clock into those of the lowest rank's, if added; by clocks.

    `clocks` are by rank. No rank ends an all-reduce or a barrier before all have begun it. Bounds
    that contradict each other show that clocks do not go at the same speed.
    """
    of = np.array([clocks[rank] for rank in calls.ranks])
    offset_of, extremes = {}, {}
    for clock in dict.fromkeys(of.tolist()):
        chosen = np.ix_(calls.are_meetings, of == clock)
        began_s = np.fmax.reduce(calls.began_s[chosen], 1)
        ended_s = np.fmin.reduce(calls.ended_s[chosen], 1)
        extremes[clock] = began_s, ended_s
        first_began_s, first_ended_s = extremes[of[0]]
        least_s = np.fmax.reduce(first_began_s - ended_s, initial=-np.inf)
        most_s = np.fmin.reduce(first_ended_s - began_s, initial=np.inf)
        offset_of[clock] = (float(least_s), float(most_s)) if clock != of[0] else (0.0, 0.0)
    return offset_of


class Lateness(NamedTuple):
    """When ranks began the calls that they made together, in seconds; rows and columns as `Calls`.

    `late_s`: how long after the first rank. `last`: the column of the rank that was last.
    `waited_s`: how long a rank was in the call before the last one began it. `whole_s`: from the
    first call to the end of the last.
    """

    late_s: np.ndarray
    last: np.ndarray
    waited_s: np.ndarray
    whole_s: float


def lateness(calls: Calls, shifts_s: Sequence[float]) -> Lateness:
    """Who was late, once these numbers are added to the ranks' times; there are calls."""
    began_s, ended_s = calls.began_s + shifts_s, calls.ended_s + shifts_s
    first_s, last_s = np.fmin.reduce(began_s, 1)[:, None], np.fmax.reduce(began_s, 1)[:, None]
    # The root of a broadcast may be done before others begin.
    waited_s = np.minimum(last_s, ended_s) - began_s
    whole_s = float(np.nanmax(ended_s) - first_s.min())
    return Lateness(began_s - first_s, np.nanargmax(began_s, 1), waited_s, whole_s)


# The track and name of a span, in the order in which tracks are shown.
_SHOWN = {
    SpanKind.TRAINING: ("training steps", "training step"),
    SpanKind.CALL: ("calls", "{0.operation}"),
    SpanKind.WAIT: ("waits for ranks", "wait for rank {0.other}"),
    SpanKind.BLOCKED: ("waits for buckets", "blocked"),
    SpanKind.PACK: ("bucket {0.other}", "pack"),
    SpanKind.QUEUE: ("bucket {0.other}", "queue"),
    SpanKind.REDUCE: ("bucket {0.other}", "reduce"),
    SpanKind.UNPACK: ("bucket {0.other}", "unpack"),
    SpanKind.SEND: ("messages to rank {0.other}", "send"),
    SpanKind.RECV: ("messages from rank {0.other}", "recv"),
}
_ORDER = [*(track for track, _ in _SHOWN.values()), "engine"]


def events(streams: Sequence[Stream], shifts_s: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """The events of all ranks in Chrome's format, which Perfetto reads.

    `shifts_s` are what to add to each rank's times. Ranks are processes, and what a rank does is in
    tracks. In one no event may overlap another in part, so spans that do are in several.

    See: Duca and Sinclair, "Trace Event Format", 2016.
    """
    begun_s = [span.began_s + shifts_s[s.head.rank] for s in streams for span in s.spans]
    zero_s = min(begun_s, default=0.0)
    tracks: dict[tuple[int, int, int, str], list[tuple[int, int, Span]]] = defaultdict(list)
    for stream in streams:
        rank, membership = stream.head.rank, stream.head.membership
        yield _about(rank, 0, "process_name", f"rank {rank} on {stream.head.host}")
        for span in stream.spans:
            track, _ = _SHOWN[SpanKind(span.kind)]
            if track.startswith("bucket") and not span.nbytes:
                track = "engine"  # Its other work, and buckets that Python reduces.
            name = track.format(span) + (f", {membership.name}" if membership.group else "")
            place = rank, _ORDER.index(track), span.other if "{" in track else 0, name
            both_s = span.began_s, span.ended_s or span.began_s
            began, ended = (round((at_s + shifts_s[rank] - zero_s) * 1e9) for at_s in both_s)
            tracks[place].append((began, ended, span))
    rows = [(place, row) for place in sorted(tracks) for row in _rows(tracks[place])]
    for tid, ((rank, *_, name), row) in enumerate(rows, 1):
        yield _about(rank, tid, "thread_name", name)
        for began, ended, span in row:
            kind = SpanKind(span.kind)
            fields = {"ph": "X", "pid": rank, "tid": tid, "cat": kind.name.lower()}
            times = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
            more = {"call": span.number, "bytes": span.nbytes}
            yield {**fields, **times, "name": _SHOWN[kind][1].format(span), "args": more}


def _about(rank: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": tid, "ts": 0, "name": what, "args": {"name": name}}


def _rows(spans: list[tuple[int, int, Span]]) -> list[list[tuple[int, int, Span]]]:
    """The spans in few rows, in none of which they overlap."""
    rows: list[list[tuple[int, int, Span]]] = []
    for span in sorted(spans):
        row = next((row for row in rows if row[-1][1] <= span[0]), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows
