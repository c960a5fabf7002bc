"""The engine's thread: its work, its order, and every way in which it ends."""

import sys
import threading
import traceback
from types import SimpleNamespace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.communicator import session
from ringreduce.effects import handoff, native
from ringreduce.pure.spans import SpanKind
from tests.effects.test_handoff import (
    DONE,
    FAILED,
    Plan,
    in_library,
    in_thread,
    needs_library,
    start,
)
from tests.effects.test_handoff import wait as wait_for_bucket
from tests.engine.engines import (
    DEADLINE_S,
    Gate,
    engine_threads,
    failing,
    new_engine,
    new_engine_of,
)
from tests.processes import wait_until


@pytest.fixture(params=["native", "plain"])
def engine(request, monkeypatch):
    """An engine of no ring; its `errors` are those that would have broken one."""
    if request.param == "plain":
        monkeypatch.setattr(handoff, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.why_missing())
    made, _ = new_engine()
    yield made
    made.close("the test is over")


def test_work_gives_what_the_call_returns_to_each_wait(engine):
    gate = Gate(5)
    work = engine.submit(gate)
    gate.wait_begun()
    assert not work.done()
    gate.open.set()
    assert [work.wait(), work.wait(0.0), work.done()] == [5, 5, True]


def test_an_error_is_raised_by_each_wait_and_ends_nothing_else(engine):
    """Also one that is no Exception; and tracebacks do not pile up over waits."""
    for error in (rr.MismatchError("differ"), ValueError("differ"), SystemExit("differ")):
        work, lengths = engine.submit(failing(error)), []
        for _ in range(3):
            with pytest.raises(type(error), match="differ") as caught:
                work.wait()
            lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert work.done()
        assert len(set(lengths)) == 1
        assert engine.submit(lambda: 5).wait() == 5


def test_wait_gives_up_after_its_own_time_limit_and_the_work_goes_on(engine):
    gate = Gate(7)
    work = engine.submit(gate)
    with pytest.raises(rr.PeerTimeoutError, match=r"waited 0\.01 s for a collective .* goes on"):
        work.wait(0.01)
    gate.open.set()
    assert work.wait() == 7


def test_nothing_is_kept_of_work_that_is_done_or_refused(engine):
    array = np.ones(3)
    before = sys.getrefcount(array)
    work = engine.submit(lambda array=array: array.sum())
    assert work.wait() == 3
    engine.drain()
    assert sys.getrefcount(array) == before
    engine.close("over")
    with pytest.raises(rr.ClosedError, match=r"after close\(\)"):
        engine.submit(lambda array=array: array.sum())
    assert sys.getrefcount(array) == before


def test_work_is_done_by_one_thread_in_the_order_in_which_it_was_handed_over(engine):
    done: list[tuple[int, str]] = []
    for number in range(50):
        work = engine.submit(
            lambda number=number: done.append((number, threading.current_thread().name))
        )
    work.wait()
    assert done == [(number, "ringreduce test") for number in range(50)]


def test_drain_returns_when_all_is_done(engine):
    gate = Gate()
    engine.submit(gate)
    work = engine.submit(lambda: None)
    draining = in_thread(engine.drain)
    gate.wait_begun()
    assert not draining.done()
    gate.open.set()
    draining.result(DEADLINE_S)
    assert work.done()


def test_the_engines_own_thread_waits_neither_for_its_work_nor_its_end(engine):
    assert engine.submit(engine.drain).wait(DEADLINE_S) is None
    assert engine.submit(lambda: engine.close("over")).wait(DEADLINE_S) is None


def test_close_lets_what_has_begun_end_and_fails_the_rest(engine):
    """Also where another thread waits for it."""
    gate = Gate(7)
    begun = engine.submit(gate)
    left = [engine.submit(lambda: 5) for _ in range(3)]
    waiting = in_thread(left[0].wait)
    gate.wait_begun()
    closing = in_thread(lambda: engine.close("over"))
    # The queue ends before the thread does, so nothing else is begun.
    wait_until(lambda: engine._queue.post(-1) is False, "the queue to be closed")
    gate.open.set()
    closing.result(DEADLINE_S)
    assert begun.wait(0.0) == 7
    with pytest.raises(rr.ClosedError):
        waiting.result(DEADLINE_S)
    for work in left:
        with pytest.raises(rr.ClosedError, match="closed before this collective had begun"):
            work.wait(0.0)
    assert "ringreduce test" not in engine_threads()
    engine.close("again, which does nothing")


def test_communicators_are_closed_when_the_process_ends():
    made = [rr.Communicator(rr.Config()) for _ in range(3)]
    for each in made:
        each.all_reduce(np.ones(3), async_op=True).wait(DEADLINE_S)
    session._close_all()
    assert engine_threads() == set()
    assert all(each.closed for each in made)


# --- Buckets --------------------------------------------------------------------------------


@pytest.fixture
def buckets():
    """An engine that doubles a bucket; and the errors that would have broken a ring."""
    made, errors = new_engine()
    plan = Plan(made.native)

    def double(item):
        plan.bucket(item.bucket)[:] *= 2

    made.serve(plan.number, double)
    yield made, plan, errors
    made.close("the test is over")


@needs_library
class TestBuckets:
    def test_bucket_is_reduced_in_the_background_and_its_time_counted(self, buckets):
        engine, plan, _ = buckets
        assert engine._events.seconds(SpanKind.REDUCE) == 0.0
        gate = Gate()
        engine.submit(gate)
        start(plan.number, 0, 4.0)
        waiting = in_library(lambda: wait_for_bucket(plan.number, 0))
        gate.open.set()
        assert waiting.result(DEADLINE_S).gradients[0].tolist() == [8.0] * 5
        engine.drain()
        assert engine._events.seconds(SpanKind.REDUCE) > 0.0
        assert engine._events.seconds(SpanKind.BLOCKED) > 0.0

    def test_buckets_and_work_share_one_order(self, buckets):
        engine, plan, _ = buckets
        gate, seen = Gate(), []
        engine.submit(gate)
        start(plan.number, 0, 3.0)
        last = engine.submit(lambda: seen.append(float(plan.bucket(0)[0])))
        gate.wait_begun()
        assert plan.bucket(0)[0] == 3.0
        gate.open.set()
        last.wait()
        assert seen == [6.0]

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (rr.PeerLostError("lost rank 3"), "lost rank 3."),
            (ValueError("odd"), "failed in the engine: ValueError: odd."),
            (SystemExit(3), "failed in the engine: SystemExit: 3."),
        ],
        ids=["of ours", "a bug", "no exception"],
    )
    def test_error_in_a_reduction_breaks_the_ring_and_answers_who_waits(self, buckets, error, text):
        engine, plan, errors = buckets
        engine.serve(plan.number, lambda _: failing(error)())
        start(plan.number, 0)
        answer = in_thread(lambda: wait_for_bucket(plan.number, 0)).result(DEADLINE_S)
        assert (answer.code, answer.why) == (FAILED, text)
        engine.drain()
        assert [str(each) for each in errors] == [text]
        assert errors == [error] or not isinstance(error, rr.RingReduceError)

    def test_who_waits_is_answered_though_the_ring_cannot_be_broken(self):
        """Gradients that were not reduced must never be taken for means."""
        engine = new_engine_of(lambda error: failing(OSError("no"))())
        plan = Plan(engine.native)
        engine.serve(plan.number, lambda _: failing(rr.PeerLostError("lost rank 3"))())
        start(plan.number, 0)
        answer = in_thread(lambda: wait_for_bucket(plan.number, 0)).result(DEADLINE_S)
        after = engine.submit(lambda: 5).wait(DEADLINE_S)
        engine.close("the test is over")
        assert (answer.code, answer.why, after) == (FAILED, "lost rank 3.", 5)

    def test_bucket_started_twice_breaks_the_ring(self, buckets):
        engine, plan, errors = buckets
        start(plan.number, 0)
        answer = in_thread(lambda: start(plan.number, 0)).result(DEADLINE_S)
        assert answer.code == FAILED
        assert "began another step while gradients" in answer.why
        engine.drain()
        assert [str(error) for error in errors] == [answer.why]

    def test_reason_that_is_no_text_is_given_all_the_same(self, buckets):
        engine, plan, _ = buckets
        engine.fail(engine._owner, rr.MismatchError("odd name \udcff"))  # of os.fsdecode
        assert start(plan.number, 0).why == "odd name ?."

    def test_long_reason_is_cut_between_characters(self, buckets):
        engine, plan, _ = buckets
        engine.fail(engine._owner, rr.MismatchError("ab" + "\N{SNOWMAN}" * 1000))
        why = start(plan.number, 0).why  # which decodes it
        assert why == "ab" + "\N{SNOWMAN}" * ((2047 - 2) // 3)

    def test_plans_go_on_with_the_session_that_takes_the_place_of_one_that_failed(self, buckets):
        engine, plan, errors = buckets
        old, anew = engine._owner, []
        engine.fail(old, rr.PeerLostError("lost rank 3"))
        engine.let_go("the ring is formed anew")
        assert start(plan.number, 0).why == "lost rank 3."
        engine.follow(SimpleNamespace(fail=anew.append))
        engine.fail(old, rr.MismatchError("a late one"))
        start(plan.number, 0, 3.0)
        answer = wait_for_bucket(plan.number, 0)
        assert (answer.code, answer.gradients[0][0]) == (DONE, 6.0)
        error = rr.PeerLostError("lost rank 2")
        engine.serve(plan.number, lambda _: failing(error)())
        start(plan.number, 0)
        engine.drain()
        assert (errors, anew) == ([], [error])

    def test_plan_in_flight_is_forgotten_later(self, buckets):
        engine, plan, _ = buckets
        start(plan.number, 0, 3.0)
        engine.forget(plan.number)
        answer = wait_for_bucket(plan.number, 0)
        assert (answer.code, answer.gradients[0][0]) == (DONE, 6.0)
        engine.forget(plan.number)
        assert "given up" in start(plan.number, 0).why

    def test_plan_in_flight_is_forgotten_after_a_failure(self, buckets):
        engine, plan, _ = buckets
        start(plan.number, 0, 3.0)
        engine.forget(plan.number)
        assert plan.number in engine._plans
        engine.fail(engine._owner, rr.MismatchError("over"))
        # At once, or when the engine's thread has done what it was in the midst of.
        wait_until(lambda: plan.number not in engine._plans, "the plan to be forgotten")
        assert "over" in wait_for_bucket(plan.number, 0).why
