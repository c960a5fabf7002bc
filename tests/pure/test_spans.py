"""The layout of events: what is written is read, and empty slots are not."""

from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.spans import (
    CALLS_AT,
    CODES,
    RUNNING,
    RUNNING_AT,
    SPAN,
    SPAN_BYTES,
    STANDING,
    Present,
    Span,
    SpanKind,
    decode_spans,
    decode_standing,
    operation_name,
)
from ringreduce.pure.wire import Kind

words = st.integers(0, 2**64 - 1)
times = st.floats(0, 1e9)
operations = st.sampled_from(sorted(CODES))


def test_records_fill_cache_lines():
    assert (SPAN.size, STANDING.size, CALLS_AT, SPAN_BYTES) == (64, 64, 64, 64)


@given(words, words, times, times, operations, words, words, times)
def test_a_standing_is_read_as_written(
    number, calls, seconds, elapsed, operation, nbytes, thread, since
):
    memory = bytearray(CALLS_AT)
    STANDING.pack_into(memory, 0, number, calls, seconds, elapsed, 0, 0, 0, 0.0)
    assert decode_standing(memory).operation is None
    RUNNING.pack_into(memory, RUNNING_AT, CODES[operation], nbytes, thread, since)
    assert decode_standing(memory) == Present(
        number, calls, seconds, elapsed, operation, nbytes, thread, since
    )


@given(
    st.lists(
        st.none()
        | st.builds(
            Span,
            kind=st.just(SpanKind.CALL),
            operation=operations,
            other=st.integers(-(2**31), 2**31 - 1),
            number=words,
            nbytes=words,
            thread=words,
            began_s=times,
            ended_s=times,
        ),
        max_size=8,
    )
)
def test_spans_are_read_as_written_and_empty_slots_are_not(slots):
    memory = bytearray(len(slots) * SPAN_BYTES)
    for index, span in enumerate(slots):
        if span is not None:
            row = span._replace(operation=CODES[span.operation])
            SPAN.pack_into(memory, index * SPAN_BYTES, index + 1, *row)
    assert list(decode_spans(memory)) == [span for span in slots if span is not None]


def test_every_operation_has_a_code_that_is_not_the_one_of_none():
    assert 0 not in CODES.values()
    assert {operation_name(kind) for kind in Kind} == set(CODES)
    assert operation_name(77) == "operation 77"
