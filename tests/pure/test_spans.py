"""The layout of events: what is written is read, and empty slots are not."""

from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure import spans
from ringreduce.pure.wire import Kind

words = st.integers(0, 2**64 - 1)
times = st.floats(0, 1e9)
operations = st.sampled_from(sorted(spans.CODES))


def test_records_fill_cache_lines():
    assert {spans.SPAN.size, spans.STANDING.size, spans.CALLS_AT, spans.SPAN_BYTES} == {64}


@given(words, words, times, times, operations, words, words, times)
def test_a_standing_is_read_as_written(
    number, calls, seconds, elapsed, operation, nbytes, thread, since
):
    memory = bytearray(spans.CALLS_AT)
    spans.STANDING.pack_into(memory, 0, number, calls, seconds, elapsed, 0, 0, 0, 0.0)
    assert spans.decode_standing(memory).operation is None
    spans.RUNNING.pack_into(memory, spans.RUNNING_AT, spans.CODES[operation], nbytes, thread, since)
    assert spans.decode_standing(memory) == spans.Present(
        number, calls, seconds, elapsed, operation, nbytes, thread, since
    )


ranks = st.integers(-(2**31), 2**31 - 1)
kinds = st.just(spans.SpanKind.CALL)
any_span = st.builds(spans.Span, kinds, operations, ranks, words, words, words, times, times)


@given(st.lists(st.none() | any_span, max_size=8))
def test_spans_are_read_as_written_and_empty_slots_are_not(slots):
    memory = bytearray(len(slots) * spans.SPAN_BYTES)
    for index, span in enumerate(slots):
        if span is not None:
            row = span._replace(operation=spans.CODES[span.operation])
            spans.SPAN.pack_into(memory, index * spans.SPAN_BYTES, index + 1, *row)
    assert list(spans.decode_spans(memory)) == [span for span in slots if span is not None]


def test_every_operation_has_a_code_that_is_not_the_one_of_none():
    assert 0 not in spans.CODES.values()
    assert {spans.operation_name(kind) for kind in Kind} == set(spans.CODES)
    assert spans.operation_name(77) == "operation 77"
