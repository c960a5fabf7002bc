"""Traces: the file that a rank writes of a communicator, and what the files of all ranks say. Pure.

A file is a line of JSON, and records as they are in memory (`ringreduce.pure.spans`).
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

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
    except msgspec.DecodeError as error:
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
