"""Draws traces in Chrome's format of events, which Perfetto reads. Pure.

Ranks are processes, and what a rank does is in tracks. In a track no event may overlap another in
part, so spans that overlap are in several tracks of one name.

See: Duca and Sinclair, "Trace Event Format", 2016.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringreduce.pure.spans import Span, SpanKind
from ringreduce.pure.trace import Stream

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
    """The events of all ranks; `shifts_s` are what to add to each rank's times."""
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
