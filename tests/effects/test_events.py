"""Parts of calls: what is kept of them, and what they sum up to."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from ringreduce.effects.events import Events
from ringreduce.pure.spans import PARTS_KEPT, SPAN, SpanKind, decode_spans, unchanged
from ringreduce.pure.wire import Kind
from tests.recorded import parts_of

kinds = st.sampled_from([kind for kind in SpanKind if kind != SpanKind.CALL])
# Whole seconds, so that sums are exact.
parts = st.tuples(kinds, st.integers(0, 2**31), st.integers(0, 2**20))


@given(st.lists(parts, max_size=20), st.sampled_from([0, PARTS_KEPT - 10, 3 * PARTS_KEPT]))
def test_the_last_parts_are_kept_and_all_are_counted(found, before) -> None:
    events = Events()
    for _ in range(before):
        events.part(SpanKind.WAIT, 0.0, 1.0)
    for index, (kind, began, lasts) in enumerate(found):
        events.part(kind, float(began), float(began + lasts), nbytes=index)
    for kind in SpanKind:
        total = sum(lasts for each, _, lasts in found if each == kind)
        assert events.seconds(kind) == total + (before if kind == SpanKind.WAIT else 0)
    kept = parts_of(events)
    assert len(kept) == min(PARTS_KEPT, before + len(found))
    ours = [(span.kind, span.began_s, span.ended_s, span.nbytes) for span in kept]
    for index, (kind, began, lasts) in enumerate(found):
        assert (kind, began, began + lasts, index) in ours
    assert [span.began_s for span in kept] == sorted(span.began_s for span in kept)


def test_a_part_belongs_to_the_running_call() -> None:
    events = Events()
    events.begin(Kind.BARRIER, 0)
    events.end()
    events.begin(Kind.ALL_REDUCE, 80)
    events.part(SpanKind.WAIT, 1.0, 2.0, other=3)
    [waited] = parts_of(events)
    assert (waited.kind, waited.number, waited.other) == (SpanKind.WAIT, 1, 3)
    assert waited.thread == threading.get_ident()


def test_parts_and_calls_do_not_mix() -> None:
    events = Events()
    for number in range(300):
        events.begin(Kind.ALL_REDUCE, number)
        events.part(SpanKind.WAIT, 0.0, 1.0)
        events.end()
    assert [span.nbytes for span in events.calls()] == list(range(44, 300))
    assert [span.number for span in sorted(parts_of(events), key=lambda s: s.number)] == [
        *range(300)
    ]
    assert events.current_call().calls == 300


@given(st.integers(0, 64), st.integers(0, 64))
def test_a_part_that_is_being_written_is_not_seen(first_words, second_words) -> None:
    """C writes the stamp as 0, then the rest, then the new stamp."""
    old = SPAN.pack(1, SpanKind.PACK, 0, 0, 7, 70, 700, 1.0, 2.0)
    new = SPAN.pack(1 + PARTS_KEPT, SpanKind.UNPACK, 0, 0, 8, 80, 800, 3.0, 4.0)
    empty = bytes(8)

    def written(words: int) -> bytes:
        """The slot after so many steps of 1 byte; what comes first is the 0, last the stamp."""
        if words == 0:
            return old
        if words == 64:
            return new
        return empty + new[8 : 8 + words] + old[8 + words :]

    first, second = ([written(words)] for words in sorted((first_words, second_words)))
    for number, called in ((0, 7), (PARTS_KEPT, 8)):
        found = list(decode_spans(unchanged([number], first, second)))
        assert [span.number for span in found] in ([], [called])
        assert all(span.nbytes == 10 * called for span in found)
