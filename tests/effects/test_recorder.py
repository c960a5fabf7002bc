"""The flight recorder: what it keeps, what it forgets, and what it costs."""

import threading
import time

import pytest

from ringreduce.effects import events
from ringreduce.effects.events import Events
from ringreduce.effects.native import library, why_missing
from ringreduce.effects.recorder import Recorder
from ringreduce.pure.membership import whole
from ringreduce.pure.spans import CALLS_KEPT
from ringreduce.pure.wire import Kind
from ringreduce.vocabulary.errors import MismatchError, PeerLostError


@pytest.fixture(autouse=True, params=["native", "plain"])
def _who_writes(request, monkeypatch) -> None:
    """C makes the records, or Python, where there is no native library."""
    if request.param == "plain":
        monkeypatch.setattr(events, "_are_native", lambda: False)
    elif library() is None:
        pytest.skip(why_missing())


def recorded(calls: int) -> Recorder:
    """A recorder that has seen so many calls."""
    recorder = Recorder(0, 2, Events(), whole(2))
    for number in range(calls):
        recorder.events.begin(Kind.ALL_REDUCE, number)
        recorder.events.end()
    return recorder


def numbers(recorder: Recorder) -> list[int]:
    return [entry.number for entry in recorder.entries()]


@pytest.mark.parametrize("calls", [0, 1, CALLS_KEPT - 1, CALLS_KEPT, CALLS_KEPT + 1, 1000])
def test_the_last_calls_are_kept_oldest_first(calls: int) -> None:
    recorder = recorded(calls)
    assert numbers(recorder) == list(range(calls))[-CALLS_KEPT:]
    assert [entry.nbytes for entry in recorder.entries()] == numbers(recorder)
    assert recorder.current_call().calls == calls


def test_a_call_that_runs_is_the_last_entry_and_has_no_seconds_yet() -> None:
    recorder = recorded(CALLS_KEPT)
    recorder.events.begin(Kind.BARRIER, 0)
    last = recorder.entries()[-1]
    assert (last.number, last.operation, last.seconds) == (CALLS_KEPT, "barrier", None)
    assert len(recorder.entries()) == CALLS_KEPT


def test_times_are_those_of_the_call() -> None:
    recorder = Recorder(0, 2, Events(), whole(2))
    before = time.time(), time.monotonic()
    recorder.events.begin(Kind.BARRIER, 0)
    recorder.events.end()
    after = time.time(), time.monotonic()
    entry = recorder.entries()[0]
    assert before[0] - 0.01 <= entry.started <= after[0] + 0.01
    assert 0 <= entry.seconds <= after[1] - before[1]
    current = recorder.events.current_call()
    assert current.seconds == current.elapsed_s == pytest.approx(entry.seconds, abs=1e-6)


def test_standing_in_user_code_and_in_a_call() -> None:
    recorder = recorded(3)
    before = time.monotonic()
    standing = recorder.current_call()
    assert (standing.calls, standing.operation, standing.nbytes) == (3, None, 0)
    recorder.events.begin(Kind.BROADCAST, 80)
    standing = recorder.current_call()
    assert (standing.calls, standing.operation, standing.nbytes) == (3, "broadcast", 80)
    assert before <= standing.since_s <= time.monotonic()
    recorder.events.end()
    assert recorder.current_call().calls == 4
    assert recorder.current_call().since_s >= standing.since_s


def test_a_failed_call_keeps_its_error_and_neither_counts_nor_gives_its_number_again() -> None:
    """Another thread may have failed it before it ends."""
    recorder = recorded(2)
    recorder.events.begin(Kind.ALL_REDUCE, 8)
    error = PeerLostError("lost rank 1", rank=0, size=2, peer=1)
    recorder.fail(error)
    recorder.events.end()
    last = recorder.entries()[-1]
    assert last.error == "PeerLostError: rank 0 of 2 lost rank 1."
    assert last.seconds is not None
    assert (recorder.current_call().calls, recorder.current_call().operation) == (2, None)
    first = recorder.first_error
    assert first is not None
    assert (first.error, first.call.operation) == (error, "all_reduce")
    recorder.events.begin(Kind.BARRIER, 0)
    recorder.events.end()
    assert numbers(recorder) == [0, 1, 2, 3]
    assert recorder.current_call().calls == 3


def test_the_first_error_is_kept_and_makes_no_entry_between_two_calls() -> None:
    recorder = recorded(2)
    first = MismatchError("disagree")
    recorder.fail(first)
    recorder.fail(PeerLostError("lost rank 1"))
    assert numbers(recorder) == [0, 1]
    assert recorder.first_error is not None
    assert recorder.first_error.error is first
    assert recorder.first_error.call.operation is None


def test_entries_name_the_thread_while_it_lives() -> None:
    recorder = recorded(1)
    over = threading.Event()

    def work() -> None:
        recorder.events.begin(Kind.BARRIER, 0)
        recorder.events.end()
        over.wait()

    thread = threading.Thread(target=work, name="prefetch")
    thread.start()
    while recorder.current_call().calls < 2:
        pass
    names = [entry.thread for entry in recorder.entries()]
    over.set()
    thread.join()
    assert names == ["MainThread", "prefetch"]
    assert recorder.entries()[1].thread == f"thread {thread.ident}"


def test_a_reader_in_another_thread_sees_whole_records_only() -> None:
    """Every record read while calls go on belongs together: bytes are the call's number."""
    recorder = recorded(CALLS_KEPT)
    over = threading.Event()

    def write() -> None:
        for number in range(CALLS_KEPT, 30_000):
            recorder.events.begin(Kind.ALL_REDUCE, number)
            recorder.events.end()
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        standing = recorder.current_call()
        assert standing.operation is None or standing.nbytes == standing.calls
        entries = recorder.entries()
        assert all(entry.nbytes == entry.number for entry in entries)
        found = [entry.number for entry in entries]
        assert found == list(range(found[0], found[0] + CALLS_KEPT))
    writer.join()
