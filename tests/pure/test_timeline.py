"""The drawing of a trace: events that Chrome's format allows, and all of them."""

import itertools
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.membership import Membership, whole
from ringreduce.pure.spans import Span, SpanKind
from ringreduce.pure.trace import Stream, events
from tests.pure.test_trace import call, head

kinds = st.sampled_from([kind for kind in SpanKind if kind != SpanKind.LOST])
times = st.tuples(st.floats(0, 1e6), st.floats(0, 10))
spans = st.builds(
    lambda kind, other, both: Span(kind, "barrier", other, 5, 80, 7, both[0], sum(both)),
    *(kinds, st.integers(0, 3), times),
)
memberships = st.sampled_from([whole(4), Membership((0, 1), 1)])
streams = st.builds(
    lambda rank, membership, found: Stream(head(rank, membership), found, 0),
    *(st.integers(0, 3), memberships, st.lists(spans, max_size=20)),
)


@given(st.lists(streams, max_size=4), st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4))
def test_events_have_all_fields_and_do_not_overlap_in_a_track(found, shifts):
    tracks, named = defaultdict(list), set()
    for event in events(found, dict(enumerate(shifts))):
        assert event["ph"] in ("X", "M")
        assert isinstance(event["ts"], float | int)
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert event["ts"] >= 0
            tracks[place].append((event["ts"], event["dur"]))
        else:
            named.add(place)
    assert set(tracks) <= named
    assert sum(map(len, tracks.values())) == sum(len(each.spans) for each in found)
    for track in tracks.values():
        assert all(lasts >= 0 for _, lasts in track)
        # In nanoseconds, which are whole there.
        for (began, lasts), (then, _) in itertools.pairwise(sorted(track)):
            assert round((began + lasts) * 1e3) <= round(then * 1e3)


def test_tracks_have_names_and_stand_in_order():
    job = [
        Span(SpanKind.RECV, "", 1, 0, 80, 7, 1.0, 2.0),
        Span(SpanKind.REDUCE, "", 10, 0, 80, 7, 1.0, 2.0),
        Span(SpanKind.REDUCE, "", 2, 0, 80, 7, 1.0, 2.0),
        Span(SpanKind.WAIT, "", 1, 0, 0, 7, 1.0, 2.0),
        Span(SpanKind.WAIT, "", 1, 0, 0, 7, 1.5, 2.5),
        call(0, 1.0, 2.0),
        Span(SpanKind.TRAINING, "", 0, 0, 0, 7, 0.5, 2.5),
    ]
    group = Stream(head(0, Membership((0, 1), 1)), [call(0, 3.0, 4.0)], 0)
    found = list(events([Stream(head(0), job, 0), group], {0: 0.0}))
    assert [each["args"]["name"] for each in found if each["ph"] == "M"][2:] == [
        *("training steps", "calls", "calls, the group of ranks 0 and 1", "waits for ranks"),
        *("waits for ranks", "bucket 2", "bucket 10", "messages from rank 1"),
    ]
    assert [each["name"] for each in found if each["ph"] == "X"] == [
        *("training step", "all_reduce", "all_reduce", "wait for rank 1", "wait for rank 1"),
        *("reduce", "reduce", "recv"),
    ]
