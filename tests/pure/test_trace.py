"""What traces of several ranks say together: calls, clocks, lateness."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.membership import Membership, whole
from ringreduce.pure.spans import CODES, SPAN, SPAN_BYTES, Span, SpanKind
from ringreduce.pure.trace import Head, Stream, decode_trace, file_name, joined, lateness, offsets

Times = list[tuple[float, float]]


def head(rank: int, membership: Membership | None = None, **fields: Any) -> Head:
    defaults = {"job": "a", "when": 1.0, "size": 4, "host": "ada", "clock": "boot", "first": 0}
    return Head(rank=rank, membership=membership or whole(4), **{**defaults, **fields})


def call(number: int, began_s: float, ended_s: float, operation: str = "all_reduce") -> Span:
    return Span(SpanKind.CALL, operation, 0, number, 80, 7, began_s, ended_s)


def stream(rank: int, times: Times, membership: Membership | None = None) -> Stream:
    """A rank that has made calls at these times, from call 1 on."""
    spans = [call(number, *both) for number, both in enumerate(times, 1)]
    return Stream(head(rank, membership), [call(0, 0.0, 0.5, "barrier"), *spans], 0)


def packed(stamp: int, kind: SpanKind, number: int) -> bytes:
    return SPAN.pack(stamp, kind, CODES["all_reduce"], 3, number, 80, 7, 1.0, 2.0)


@given(st.integers(0, 4 * SPAN_BYTES))
def test_a_file_that_was_cut_has_its_whole_records(nbytes):
    records = b"".join(packed(number + 1, SpanKind.CALL, number) for number in range(10, 14))
    whole_line = msgspec.json.encode(head(2, first=10)) + b"\n"
    found = decode_trace(whole_line + records[:nbytes])
    assert found.head == head(2, first=10)
    assert [span.number for span in found.spans] == list(range(nbytes // SPAN_BYTES))


def test_what_is_missing_is_counted():
    records = packed(1, SpanKind.WAIT, 0) + packed(1, SpanKind.LOST, 44)
    found = decode_trace(msgspec.json.encode(head(0)) + b"\n" + records)
    assert (len(found.spans), found.lost) == (1, 44)


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b'{"format":1}\n', b"\xff" * 100])
def test_another_file_is_no_trace(data):
    with pytest.raises(ValueError, match="it is no trace"):
        decode_trace(data)


def test_each_communicator_of_a_rank_has_a_file():
    assert file_name(head(3)) == "rank-3.trace"
    assert file_name(head(3, Membership((1, 3), 2))) == "rank-3-group-2.trace"
    assert file_name(head(3, Membership((1, 3), 0, 1))) == "rank-3-epoch-1.trace"


def test_calls_are_joined_by_their_numbers():
    """Rank 1 has lost call 1, and was killed before call 3."""
    others = stream(0, [(1, 2), (3, 4), (5, 6)])
    killed = Stream(head(1), [call(2, 3.5, 4.5)], 1)
    calls = joined([others, killed])
    assert calls.ranks == [0, 1]
    assert calls.began_s.tolist() == [[3, 3.5]]
    assert calls.ended_s.tolist() == [[4, 4.5]]


def test_groups_have_calls_of_their_own():
    group = Membership((1, 2), 1)
    calls = joined(
        [
            *(stream(rank, [(1, 2)]) for rank in range(3)),
            *(stream(rank, [(3, 4)], group) for rank in (1, 2)),
            stream(2, [(5, 6)], Membership((2, 3), 1)),  # Rank 3 was not traced.
        ]
    )
    assert np.array_equal(calls.began_s, [[1, 1, 1], [np.nan, 3, 3]], equal_nan=True)


def test_without_common_calls_there_are_none():
    calls = joined([stream(0, [(1, 2)])])
    assert calls.began_s.shape == calls.ended_s.shape == (0, 1)
    calls = joined([stream(0, [(1, 2)]), stream(1, [])])
    assert calls.began_s.shape == calls.ended_s.shape == (0, 2)
    assert offsets(calls, {0: "a", 1: "b"}) == {"a": (0, 0), "b": (-np.inf, np.inf)}


# Whole milliseconds, which floats hold well enough to compare.
milliseconds = st.integers(0, 1000)


@given(st.data())
def test_the_offset_of_each_clock_is_within_its_bounds(data):
    """Hosts of one or two ranks, whose clocks are ahead by anything, and calls as they can be."""
    hosts = data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=3))
    ahead = [0, *(data.draw(st.integers(-10_000, 10_000)) for _ in hosts[1:])]
    of = [host for host, count in enumerate(hosts) for _ in range(count)]
    times: list[Times] = [[] for _ in of]
    now = 0
    for _ in range(data.draw(st.integers(2, 6))):
        begun = [now + data.draw(milliseconds) for _ in of]
        ended = [max(begun) + data.draw(milliseconds) for _ in of]
        for rank, host in enumerate(of):
            times[rank].append((begun[rank] + ahead[host], ended[rank] + ahead[host]))
        now = max(ended)
    calls = joined([stream(rank, each) for rank, each in enumerate(times)])
    bounds = offsets(calls, {rank: f"boot {host}" for rank, host in enumerate(of)})
    assert bounds["boot 0"] == (0.0, 0.0)
    for host, early in enumerate(ahead):
        least, most = bounds[f"boot {host}"]
        assert least <= -early <= most < np.inf


def test_the_bounds_are_as_narrow_as_calls_allow():
    """In one call rank 1 is last, in the other rank 0; its clock is 100 ahead."""
    calls = joined(
        [stream(0, [(1, 8), (15, 16), (20, 21)]), stream(1, [(105, 109), (110, 117), (120, 121)])]
    )
    assert offsets(calls, {0: "a", 1: "b"})["b"] == (15 - 117, 8 - 105)


def test_a_call_that_need_not_wait_says_nothing_of_clocks():
    """The root of a broadcast may be done before others begin, and a failed call, the last one."""
    spans = [call(1, 0, 1, "broadcast"), call(2, 10, 20), call(3, 21, 22)]
    late = [call(1, 5, 6, "broadcast"), call(2, 10, 20), call(3, 90, 91)]
    calls = joined([Stream(head(0), spans, 0), Stream(head(1), late, 0)])
    assert calls.are_meetings.tolist() == [False, True, False]
    assert offsets(calls, {0: "a", 1: "b"})["b"] == (-10, 10)


def test_who_was_late_and_who_waited():
    calls = joined(
        [
            stream(0, [(1, 5), (6, 10)]),
            stream(1, [(104, 105), (106, 110)]),  # Its clock is 100 ahead.
            stream(2, [(2, 3), (8, 10)]),
        ]
    )
    late = lateness(calls, [0.0, -100.0, 0.0])
    assert late.late_s.tolist() == [[0, 3, 1], [0, 0, 2]]
    assert late.last.tolist() == [1, 2]
    # Rank 2 was done with the first one before rank 1 began.
    assert late.waited_s.tolist() == [[3, 0, 1], [2, 2, 0]]
    assert late.whole_s == 9
