"""Work in the background: its handle, its order, and every way in which it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ringreduce.collectives.base import Collectives
from ringreduce.communicator import registry
from ringreduce.communicator.communicator import Communicator
from ringreduce.effects import handoff, native
from ringreduce.effects.events import Events
from ringreduce.effects.handoff import BucketItem
from ringreduce.engine.engine import Engine, Owner, Work
from ringreduce.pure.spans import SpanKind
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import (
    ArrayError,
    ClosedError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    RingReduceError,
)
from tests.effects.test_handoff import (
    DONE,
    FAILED,
    Plan,
    in_thread,
    needs_library,
    start,
    until_it_waits,
)
from tests.effects.test_handoff import wait as wait_for_bucket
from tests.processes import wait_until
from tests.rings import Ring, assert_lost

# Far above what anything here takes, and below the rings' own time limit.
DEADLINE_S = 15.0
TIMEOUT_S = 60.0


def engine_threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("ringreduce ")}


@pytest.fixture(autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    """`conftest` looks at threads that are no daemons; engines are."""
    before = engine_threads()
    yield
    wait_until(lambda: engine_threads() <= before, "the engines' threads to end", DEADLINE_S)


# --- The thread by itself -------------------------------------------------------------------


class Gate:
    """A piece of work that says when it has begun, and waits to be let through."""

    def __init__(self, result: Any = None) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self._result = result

    def __call__(self) -> Any:
        self.begun.set()
        assert self.open.wait(DEADLINE_S)
        return self._result

    def wait_begun(self) -> None:
        assert self.begun.wait(DEADLINE_S)


@pytest.fixture(params=["native", "plain"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine of no ring; its `errors` are those that would have broken one."""
    if request.param == "plain":
        monkeypatch.setattr(handoff, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.why_missing())
    made, _ = new_engine()
    yield made
    made.close("the test is over")


def new_engine() -> tuple[Engine, list[RingReduceError]]:
    errors: list[RingReduceError] = []
    return new_engine_of(errors.append), errors


def new_engine_of(
    fail: Callable[[RingReduceError], object], interrupt: Callable[[], object] = lambda: None
) -> Engine:
    """An engine whose communicator and collectives do no more than that."""
    owner, collectives = SimpleNamespace(fail=fail), SimpleNamespace(interrupt=interrupt)
    return Engine("ringreduce test", cast(Owner, owner), cast(Collectives, collectives), Events())


def failing(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_work_gives_what_the_call_returns(engine):
    assert engine.submit(lambda: 5).wait() == 5


def test_work_is_not_done_while_it_runs(engine):
    gate = Gate()
    work = engine.submit(gate)
    gate.wait_begun()
    assert not work.done()
    gate.open.set()
    work.wait()


def test_work_is_done_after_wait(engine):
    work = engine.submit(lambda: None)
    work.wait()
    assert work.done()


def test_work_that_fails_is_done(engine):
    work = engine.submit(failing(ValueError("x")))
    with pytest.raises(ValueError, match="x"):
        work.wait()
    assert work.done()


def test_work_may_be_waited_for_again(engine):
    work = engine.submit(lambda: 5)
    assert [work.wait(), work.wait(0.0)] == [5, 5]


def test_error_is_raised_by_each_wait(engine):
    work = engine.submit(failing(MismatchError("differ")))
    for _ in range(3):
        with pytest.raises(MismatchError, match="differ"):
            work.wait()


def test_tracebacks_do_not_pile_up_over_waits(engine):
    work = engine.submit(failing(MismatchError("differ")))
    lengths = []
    for _ in range(3):
        with pytest.raises(MismatchError) as caught:
            work.wait()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(lengths)) == 1


def test_wait_gives_up_after_its_own_time_limit(engine):
    gate = Gate()
    work = engine.submit(gate)
    with pytest.raises(PeerTimeoutError, match=r"waited 0\.01 s for a collective .* goes on"):
        work.wait(0.01)
    gate.open.set()
    work.wait()


def test_work_goes_on_after_a_wait_that_gave_up(engine):
    gate = Gate(7)
    work = engine.submit(gate)
    with pytest.raises(PeerTimeoutError):
        work.wait(0.0)
    gate.open.set()
    assert work.wait() == 7


def test_work_lets_go_of_what_it_was_given_once_it_is_done(engine):
    array = np.ones(3)
    before = sys.getrefcount(array)
    work = engine.submit(lambda array=array: array.sum())
    assert work.wait() == 3
    engine.drain()
    assert sys.getrefcount(array) == before


def test_work_is_done_in_the_order_in_which_it_was_handed_over(engine):
    done: list[int] = []
    for number in range(50):
        work = engine.submit(partial(done.append, number))
    work.wait()
    assert done == list(range(50))


def test_work_goes_on_after_other_work_has_failed(engine):
    engine.submit(failing(ValueError("x")))
    assert engine.submit(lambda: 5).wait() == 5


def test_work_that_raises_what_is_no_exception_does_not_end_the_thread(engine):
    work = engine.submit(failing(SystemExit(3)))
    with pytest.raises(SystemExit):
        work.wait()
    assert engine.submit(lambda: 5).wait() == 5


def test_all_work_is_done_by_one_thread_of_that_name(engine):
    names = {engine.submit(lambda: threading.current_thread().name).wait() for _ in range(5)}
    assert names == {"ringreduce test"}


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


def test_drain_returns_at_once_in_the_engines_own_thread(engine):
    assert engine.submit(engine.drain).wait(DEADLINE_S) is None


def test_close_ends_the_thread(engine):
    engine.submit(lambda: None)
    engine.close("over")
    assert "ringreduce test" not in engine_threads()


def test_close_lets_what_has_begun_end(engine):
    gate = Gate(7)
    work = engine.submit(gate)
    gate.wait_begun()
    closing = in_thread(lambda: engine.close("over"))
    gate.open.set()
    closing.result(DEADLINE_S)
    assert work.wait(0.0) == 7


def test_close_fails_what_has_not_begun(engine):
    gate = Gate()
    engine.submit(gate)
    left = [engine.submit(lambda: 5) for _ in range(3)]
    gate.wait_begun()
    closing = in_thread(lambda: engine.close("over"))
    # The queue ends before the thread does, so nothing else is begun.
    wait_until(lambda: engine._queue.post(-1) is False, "the queue to be closed")
    gate.open.set()
    closing.result(DEADLINE_S)
    for work in left:
        with pytest.raises(ClosedError, match="closed before this collective had begun"):
            work.wait(0.0)


def test_close_ends_a_wait_in_another_thread(engine):
    gate = Gate()
    engine.submit(gate)
    work = engine.submit(lambda: 5)
    waiting = in_thread(work.wait)
    gate.wait_begun()
    closing = in_thread(lambda: engine.close("over"))
    wait_until(lambda: engine._queue.post(-1) is False, "the queue to be closed")
    gate.open.set()
    with pytest.raises(ClosedError):
        waiting.result(DEADLINE_S)
    closing.result(DEADLINE_S)


def test_close_interrupts_before_it_waits_for_what_runs():
    gate = Gate()
    made = new_engine_of(lambda error: None, gate.open.set)
    made.submit(gate)
    gate.wait_begun()
    in_thread(lambda: made.close("over")).result(DEADLINE_S)


def test_close_in_the_engines_own_thread_does_not_wait_for_itself(engine):
    work = engine.submit(lambda: engine.close("over"))
    assert work.wait(DEADLINE_S) is None


def test_closing_again_does_nothing(engine):
    engine.close("over")
    engine.close("over")


def test_closed_engine_takes_no_work(engine):
    engine.close("over")
    with pytest.raises(ClosedError, match=r"after close\(\)"):
        engine.submit(lambda: None)


def test_closed_engine_keeps_nothing_of_the_work_that_it_refused(engine):
    engine.close("over")
    array = np.ones(3)
    before = sys.getrefcount(array)
    with pytest.raises(ClosedError):
        engine.submit(lambda array=array: array.sum())
    assert sys.getrefcount(array) == before


def test_communicators_are_closed_when_the_process_ends():
    made = [Communicator(Config()) for _ in range(3)]
    for each in made:
        each.all_reduce(np.ones(3), async_op=True).wait(DEADLINE_S)
    registry._close_all()
    assert engine_threads() == set()
    assert all(each.closed for each in made)


# --- Buckets --------------------------------------------------------------------------------


@pytest.fixture
def buckets() -> Iterator[tuple[Engine, Plan, list[RingReduceError]]]:
    """An engine that doubles a bucket; and the errors that would have broken a ring."""
    made, errors = new_engine()
    assert made.native is not None
    plan = Plan(made.native)

    def double(item: BucketItem) -> None:
        plan.bucket(item.bucket)[:] *= 2

    made.serve(plan.number, double)
    yield made, plan, errors
    made.close("the test is over")


@needs_library
class TestBuckets:
    def test_bucket_is_reduced_in_the_background(self, buckets):
        _, plan, _ = buckets
        start(plan.number, 0, 4.0)
        assert wait_for_bucket(plan.number, 0).gradients[0].tolist() == [8.0] * 5

    def test_time_of_reducing_is_counted(self, buckets):
        engine, plan, _ = buckets
        assert engine._events.seconds(SpanKind.REDUCE) == 0.0
        start(plan.number, 0)
        engine.drain()
        assert engine._events.seconds(SpanKind.REDUCE) > 0.0

    def test_time_of_waiting_is_counted(self, buckets):
        engine, plan, _ = buckets
        gate = Gate()
        engine.submit(gate)
        start(plan.number, 0)
        waiting = in_thread(lambda: wait_for_bucket(plan.number, 0))
        until_it_waits(waiting)
        gate.open.set()
        waiting.result(DEADLINE_S)
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
            (PeerLostError("lost rank 3"), "lost rank 3."),
            (ValueError("odd"), "failed in the engine: ValueError: odd."),
            (SystemExit(3), "failed in the engine: SystemExit: 3."),
        ],
        ids=["of ours", "a bug", "no exception"],
    )
    def test_error_in_a_reduction_answers_who_waits(self, buckets, error, text):
        engine, plan, _ = buckets
        engine.serve(plan.number, lambda _: failing(error)())
        start(plan.number, 0)
        answer = in_thread(lambda: wait_for_bucket(plan.number, 0)).result(DEADLINE_S)
        assert (answer.code, answer.why) == (FAILED, text)

    def test_error_in_a_reduction_breaks_the_ring(self, buckets):
        engine, plan, errors = buckets
        error = PeerLostError("lost rank 3")
        engine.serve(plan.number, lambda _: failing(error)())
        start(plan.number, 0)
        engine.drain()
        assert errors == [error]

    def test_who_waits_is_answered_though_the_ring_cannot_be_broken(self):
        """Gradients that were not reduced must never be taken for means."""
        engine = new_engine_of(lambda error: failing(OSError("no"))())
        plan = Plan(engine.native)
        engine.serve(plan.number, lambda _: failing(PeerLostError("lost rank 3"))())
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
        what = None
        try:
            engine.fail(MismatchError("odd name \udcff"))  # as os.fsdecode makes them
        except UnicodeError as error:
            what = error.reason
        assert what is None
        assert start(plan.number, 0).why == "odd name ?."

    def test_long_reason_is_cut_between_characters(self, buckets):
        engine, plan, _ = buckets
        engine.fail(MismatchError("ab" + "\N{SNOWMAN}" * 1000))
        why = start(plan.number, 0).why  # which decodes it
        assert why == "ab" + "\N{SNOWMAN}" * ((2047 - 2) // 3)

    def test_forgotten_plan_is_refused(self, buckets):
        engine, plan, _ = buckets
        engine.forget(plan.number)
        assert "given up" in start(plan.number, 0).why

    def test_plan_in_flight_is_not_forgotten(self, buckets):
        engine, plan, _ = buckets
        start(plan.number, 0, 3.0)
        engine.forget(plan.number)
        answer = wait_for_bucket(plan.number, 0)
        assert (answer.code, answer.gradients[0][0]) == (DONE, 6.0)

    def test_plan_in_flight_is_forgotten_after_a_failure(self, buckets):
        engine, plan, _ = buckets
        start(plan.number, 0, 3.0)
        engine.forget(plan.number)
        assert plan.number in engine._plans
        engine.fail(MismatchError("over"))
        # At once, or when the engine's thread has done what it was in the midst of.
        wait_until(lambda: plan.number not in engine._plans, "the plan to be forgotten")
        assert "over" in wait_for_bucket(plan.number, 0).why


# --- Collectives ----------------------------------------------------------------------------


@pytest.fixture(params=["zmq", "shm", "plain"])
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`ring_of_threads` over each transport, and with the queue that needs no library."""
    if request.param == "plain":
        monkeypatch.setattr(handoff, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.why_missing())
    transport = "shm" if request.param == "shm" else "zmq"
    return partial(ring_of_threads, transport=transport, timeout_s=TIMEOUT_S)


SIZES = [1, 2, 3]


def until_running(comm: Communicator, call: Callable[[], Work[Any]]) -> Work[Any]:
    """Hand work over; return once the engine is in the midst of it."""
    before = comm._session._recorder.standing()
    work = call()
    wait_until(
        lambda: comm._session._recorder.standing() != before, "the collective to begin", DEADLINE_S
    )
    return work


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 1009, 100_003])
def test_all_reduce_in_the_background_gives_the_array_itself(ring, size, count):
    def work(comm: Communicator) -> None:
        array = np.arange(count) * (comm.rank + 1.0)
        assert comm.all_reduce(array, async_op=True).wait() is array
        assert np.array_equal(array, np.arange(count) * sum(range(size + 1)))

    ring(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_in_the_background_gives_the_own_chunk(ring, size):
    def work(comm: Communicator) -> None:
        array = np.arange(3.0 * size)
        chunk = comm.reduce_scatter(array, async_op=True).wait()
        assert chunk.base is array
        assert (chunk == size * np.arange(3.0 * comm.rank, 3.0 * comm.rank + 3)).all()

    ring(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_in_the_background_joins_the_arrays(ring, size):
    def work(comm: Communicator) -> None:
        joined = comm.all_gather(np.full((comm.rank, 2), comm.rank), async_op=True).wait()
        assert joined.tolist() == [[rank] * 2 for rank in range(size) for _ in range(rank)]

    ring(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_in_the_background_gives_the_array_itself(ring, size):
    def work(comm: Communicator) -> None:
        array = np.full(5, float(comm.rank))
        assert comm.broadcast(array, root=size - 1, async_op=True).wait() is array
        assert (array == size - 1).all()

    ring(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_calls_keep_the_order_of_the_program(ring, size):
    """The same array, step after step, in the background and not: each needs the one before."""

    def work(comm: Communicator) -> None:
        array, expected = np.full(2000, float(comm.rank)), float(sum(range(size)))
        for _ in range(4):
            comm.all_reduce(array, async_op=True)
            comm.all_reduce(array, "max", async_op=True)
            comm.all_reduce(array)
            assert (array == expected * size).all()
            comm.reduce_scatter(array.copy(), async_op=True)
            comm.barrier()
            comm.broadcast(array, root=size - 1, async_op=True)
            assert comm.all_gather(array[:1]).tolist() == [expected * size] * size
            array[:] = comm.rank

    ring(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_many_calls_in_the_background_each_give_their_own_result(ring, size):
    def work(comm: Communicator) -> None:
        arrays = [np.full(10 + 997 * (i % 5), float(i + comm.rank)) for i in range(40)]
        pending = [comm.all_reduce(array, async_op=True) for array in arrays]
        for i, each in reversed(list(enumerate(pending))):
            assert (each.wait() == size * i + sum(range(size))).all()

    ring(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_result_is_there_after_a_later_call_that_was_not_handed_over(ring, size):
    def work(comm: Communicator) -> None:
        pending = comm.all_reduce(np.ones(3), async_op=True)
        comm.barrier()
        assert pending.done()

    ring(size, work)


def test_handing_over_returns_at_once_while_other_work_runs(ring):
    """The other rank begins only after this one has handed over everything."""
    go = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            first = until_running(comm, lambda: comm.all_reduce(np.ones(3), async_op=True))
            more = in_thread(lambda: comm.all_reduce(np.ones(4), async_op=True))
            try:
                pending = more.result(DEADLINE_S)
                assert not first.done()
            finally:
                go.set()
        else:
            assert go.wait(2 * DEADLINE_S)
            first = comm.all_reduce(np.ones(3), async_op=True)
            pending = comm.all_reduce(np.ones(4), async_op=True)
        assert [first.wait().sum(), pending.wait().sum()] == [6, 8]

    ring(2, work)


def test_memory_is_given_out_while_work_runs(ring):
    go = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            first = until_running(comm, lambda: comm.all_reduce(np.ones(3), async_op=True))
            try:
                assert in_thread(lambda: comm.empty(5)).result(DEADLINE_S).shape == (5,)
            finally:
                go.set()
        else:
            assert go.wait(2 * DEADLINE_S)
            first = comm.all_reduce(np.ones(3), async_op=True)
        first.wait()

    ring(2, work)


def test_bad_argument_is_refused_at_once_and_leaves_the_ring_usable(ring):
    def work(comm: Communicator) -> None:
        with pytest.raises(ArrayError):
            comm.all_reduce([1.0], async_op=True)
        with pytest.raises(ArrayError):
            comm.broadcast(np.ones(3), root=2, async_op=True)
        assert comm.all_reduce(np.ones(3), async_op=True).wait().tolist() == [2.0] * 3

    ring(2, work)


def test_work_is_counted_when_it_is_done(ring):
    def work(comm: Communicator) -> None:
        before = comm.statistics().collectives
        for _ in range(3):
            pending = comm.all_reduce(np.ones(3), async_op=True)
        pending.wait()
        comm.engine.drain()
        assert comm.statistics().collectives == before + 3

    ring(2, work)


def test_no_thread_is_started_before_there_is_work_for_it(ring):
    def work(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3))
        assert f"ringreduce {comm.rank}/2" not in engine_threads()
        comm.all_reduce(np.ones(3), async_op=True).wait()
        assert f"ringreduce {comm.rank}/2" in engine_threads()
        comm.close()
        assert f"ringreduce {comm.rank}/2" not in engine_threads()

    ring(2, work)


def test_time_blocked_is_what_the_engine_and_the_caller_have_waited():
    with Communicator(Config()) as comm:
        comm.blocked_for(2.0)
        comm.blocked_for(0.5)
        comm._session.events.part(SpanKind.REDUCE, 8.0, 12.0)
        assert comm.statistics().waited_s == pytest.approx(2.5, abs=1e-6)
        assert comm.statistics().reducing_s == pytest.approx(6.5, abs=1e-6)


# --- A broken ring --------------------------------------------------------------------------


def test_work_of_a_ring_that_breaks_fails_with_the_cause(ring):
    def work(comm: Communicator) -> None:
        pending = [comm.all_reduce(np.ones(3 + comm.rank), async_op=True) for _ in range(4)]
        for each in pending:
            with pytest.raises(MismatchError, match="3 float64"):
                each.wait(DEADLINE_S)

    ring(2, work)


def test_work_handed_to_a_broken_ring_fails_at_once(ring):
    def work(comm: Communicator) -> None:
        with pytest.raises(MismatchError) as first:
            comm.all_reduce(np.ones(3 + comm.rank))
        with pytest.raises(MismatchError) as again:
            comm.all_reduce(np.ones(3), async_op=True).wait(DEADLINE_S)
        assert str(again.value) == str(first.value)

    ring(2, work)


def test_call_after_work_that_failed_raises_its_error(ring):
    def work(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        with pytest.raises(MismatchError, match="3 float64"):
            comm.barrier()

    ring(2, work)


@needs_library
def test_threads_that_wait_for_buckets_are_told_why_the_ring_broke():
    with Communicator(Config()) as comm:
        plan = Plan(comm.engine.native, 2)
        start(plan.number, 1)
        waiting = in_thread(lambda: wait_for_bucket(plan.number, 1))
        until_it_waits(waiting)
        comm.fail(MismatchError("has other gradients"))
        assert waiting.result(DEADLINE_S).why == "has other gradients."


@needs_library
def test_threads_that_wait_for_buckets_are_told_though_no_rank_can_be(monkeypatch):
    with Communicator(Config()) as comm:
        plan = Plan(comm.engine.native, 2)
        start(plan.number, 1)
        waiting = in_thread(lambda: wait_for_bucket(plan.number, 1))
        until_it_waits(waiting)
        monkeypatch.setattr(
            comm._session.collectives, "abort", lambda cause: failing(OSError("no"))()
        )
        with pytest.raises(OSError, match="no"):
            comm.fail(MismatchError("has other gradients"))
        assert waiting.result(DEADLINE_S).why == "has other gradients."


# --- Close ----------------------------------------------------------------------------------


def close_with_pending_work(ring: Callable[..., Any]) -> list[Any]:
    """What each piece of work of rank 0, and a call of the others, raised: rank 0 has closed."""

    def outcome(call: Callable[[], Any]) -> BaseException | None:
        try:
            call()
        except RingReduceError as error:
            return error
        return None

    left = threading.Event()

    def work(comm: Communicator) -> Any:
        if comm.rank == 0:
            first = until_running(comm, lambda: comm.all_reduce(np.ones(3), async_op=True))
            pending = [first, *(comm.all_reduce(np.ones(3), async_op=True) for _ in range(2))]
            in_thread(comm.close).result(DEADLINE_S)
            left.set()
            return [outcome(lambda each=each: each.wait(0.0)) for each in pending]
        assert left.wait(2 * DEADLINE_S)
        # The call that rank 0 was in; it may be over here before the abort comes.
        return outcome(lambda: (comm.all_reduce(np.ones(3)), comm.barrier()))

    return ring(3, work)


def test_close_ends_the_collective_that_runs(ring):
    (running, *_), *_ = close_with_pending_work(ring)
    assert isinstance(running, PeerLostError)
    assert "closed its communicator in the middle of a collective" in str(running)


def test_close_refuses_what_had_not_begun(ring):
    (_, *pending), *_ = close_with_pending_work(ring)
    assert [type(error) for error in pending] == [ClosedError] * 2


def test_close_with_pending_work_is_told_to_the_other_ranks(ring):
    _, *others = close_with_pending_work(ring)
    assert [(type(error), error.peer) for error in others] == [(PeerLostError, 0)] * 2


def test_closed_communicator_takes_no_work(ring):
    def work(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3), async_op=True).wait()
        comm.barrier()
        comm.close()
        with pytest.raises(ClosedError):
            comm.all_reduce(np.ones(3), async_op=True)

    ring(2, work)


def test_no_engine_is_started_by_a_communicator_that_is_being_closed(monkeypatch):
    """`close` has found that there is none; just then work is handed over."""
    comm = Communicator(Config())
    late: list[Future[Any]] = []

    class Lock:
        """The communicator's; who takes it first is `close`, and work comes before it has it."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock

        def __enter__(self) -> None:
            if not late:
                late.append(Future())
                late[0] = in_thread(lambda: comm.all_reduce(np.ones(3), async_op=True))
                wait_until(late[0].done, "work to be handed over", DEADLINE_S)
            self._lock.acquire()

        def __exit__(self, *exception: object) -> None:
            self._lock.release()

    monkeypatch.setattr(comm._session.calls, "lock", Lock(comm._session.calls.lock))
    comm.close()
    with pytest.raises(ClosedError):
        late[0].result(DEADLINE_S)
    assert engine_threads() == set()


# --- The end of the process -----------------------------------------------------------------

# Of a process that has work left, to end; the ring's own time limit is TIMEOUT_S.
EXIT_S = 20.0


def test_process_ends_while_work_of_a_lone_rank_is_pending():
    program = (
        "import numpy, ringreduce\n"
        "comm = ringreduce.Communicator(ringreduce.Config())\n"
        "arrays = [numpy.ones(1000) for _ in range(100)]\n"
        "work = [comm.all_reduce(array, async_op=True) for array in arrays]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=EXIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_process_ends_though_a_peer_never_answers(tmp_path: Path, transport: str) -> None:
    program = """
    WHOLE_END = True
    ring = join()
    say("ready")
    if RANK == 0:
        before = ring._session._recorder.standing()
        work = [ring.all_reduce(np.ones(1000), async_op=True) for _ in range(3)]
        while ring._session._recorder.standing() == before:
            os.sched_yield()
    else:
        hold()
        attempt("result", lambda: (ring.all_reduce(np.ones(1000)), ring.barrier()))
    """
    with Ring(tmp_path, 2, program, timeout_s=TIMEOUT_S, transport=transport) as ring:
        ring.wait("ready", [1])
        assert ring.workers[0].wait(EXIT_S) == 0
        assert ring.workers[0].stderr == ""
        ring.workers[1].stdin.close()
        [told] = ring.wait("result", [1])
        assert_lost([told], 0)


FORK = """
import os, sys, threading
from ringreduce.communicator.communicator import Communicator
from ringreduce.vocabulary.config import Config
from tests.effects.test_handoff import Plan, in_thread, start, until_it_waits, wait

comm = Communicator(Config())
plan = Plan(comm.engine.native, 2)
start(plan.number, 1)
waiting = in_thread(lambda: wait(plan.number, 1))
until_it_waits(waiting)
if (child := os.fork()) == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
comm.close()
"""


@needs_library
def test_forked_child_ends_though_threads_of_its_parent_wait(tmp_path: Path) -> None:
    """Those threads are not in the child, and nobody would ever see them leave."""
    # In a session of its own, so that a child that hangs can be ended too.
    process = subprocess.Popen(
        [sys.executable, "-c", FORK],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=EXIT_S)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert output == "7\n"


# --- Real processes -------------------------------------------------------------------------


@pytest.fixture(params=["zmq", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "shm" and native.library() is None:
        pytest.skip(native.why_missing())
    return str(request.param)


def test_rank_killed_while_work_is_pending_is_named_by_every_wait(
    tmp_path: Path, transport: str
) -> None:
    program = """
    ring = join()
    work = []
    if RANK != 1:
        work = [ring.all_reduce(np.ones(1000), async_op=True) for _ in range(3)]
    say("ready")
    if RANK == 1:
        signal.pause()
    attempt("first", work[0].wait)
    attempt("last", work[2].wait)
    attempt("later", lambda: ring.all_reduce(np.ones(3), async_op=True).wait())
    hold()
    """
    with Ring(tmp_path, 3, program, transport=transport) as ring:
        ring.wait("ready")
        ring.workers[1].signal(signal.SIGKILL)
        # The wait for the last rank to be ready counts too; it is no part of the finding.
        assert_lost([{**fact, "seconds": 0.0} for fact in ring.wait("first", [0, 2])], 1)
        assert_lost(ring.wait("last", [0, 2]), 1)
        assert_lost(ring.wait("later", [0, 2]), 1)


def test_ctrl_c_ends_a_wait_for_work(tmp_path: Path, transport: str) -> None:
    program = """
    ring = join()
    if RANK == 0:
        work = ring.all_reduce(np.ones(3), async_op=True)
        # Said within what is interrupted: it may be so at once.
        attempt("result", lambda: (say("ready"), work.wait()))
        attempt("drained", lambda: (say("again"), ring.barrier()))
    else:
        hold()
    """
    with Ring(tmp_path, 2, program, transport=transport, timeout_s=TIMEOUT_S) as ring:
        ring.wait("ready", [0])
        ring.workers[0].signal(signal.SIGINT)
        [first] = ring.wait("result", [0])
        assert first["kind"] == "KeyboardInterrupt"
        ring.wait("again", [0])
        # Now it waits for its own engine, in order to call a barrier after that.
        ring.workers[0].signal(signal.SIGINT)
        [second] = ring.wait("drained", [0])
        assert second["kind"] == "KeyboardInterrupt"
