"""Collectives in the background: their order, and how a ring that breaks or closes ends them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.effects import handoff, native
from ringreduce.engine.engine import Work
from ringreduce.pure.spans import SpanKind
from ringreduce.testing import ring_of_threads
from tests.effects.test_handoff import Plan, in_library, in_thread, needs_library, start
from tests.effects.test_handoff import wait as wait_for_bucket
from tests.engine.engines import DEADLINE_S, TIMEOUT_S, engine_threads, failing
from tests.processes import wait_until
from tests.rings import on_each_rank, outcome


@pytest.fixture(params=["zmq", "shm", "plain"])
def ring(request, monkeypatch):
    """`ring_of_threads` over each transport, and with the queue that needs no library."""
    if request.param == "plain":
        monkeypatch.setattr(handoff, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.why_missing())
    transport = "shm" if request.param == "shm" else "zmq"
    return partial(ring_of_threads, transport=transport, timeout_s=TIMEOUT_S)


SIZES = [1, 2, 3]


def until_running(comm: rr.Communicator, call: Callable[[], Work[Any]]) -> Work[Any]:
    """Hand work over; return once the engine is in the midst of it."""
    before = comm._session._recorder.current_call()
    work = call()
    wait_until(
        lambda: comm._session._recorder.current_call() != before,
        "the collective to begin",
        DEADLINE_S,
    )
    return work


@pytest.mark.parametrize("size", SIZES)
@on_each_rank(over="ring")
def test_collectives_in_the_background_give_what_others_do(comm, size):
    own = comm.rank
    for count in (0, 1, 1009, 100_003):
        array = np.arange(count) * (own + 1.0)
        assert comm.all_reduce(array, async_op=True).wait() is array
        assert np.array_equal(array, np.arange(count) * sum(range(size + 1)))
    array = np.arange(3.0 * size)
    chunk = comm.reduce_scatter(array, async_op=True).wait()
    assert chunk.base is array
    assert (chunk == size * np.arange(3.0 * own, 3.0 * own + 3)).all()
    joined = comm.all_gather(np.full((own, 2), own), async_op=True).wait()
    assert joined.tolist() == [[rank] * 2 for rank in range(size) for _ in range(rank)]
    array = np.full(5, float(own))
    assert comm.broadcast(array, root=size - 1, async_op=True).wait() is array
    assert (array == size - 1).all()


@pytest.mark.parametrize("size", SIZES)
@on_each_rank(over="ring")
def test_calls_keep_the_order_of_the_program(comm, size):
    """The same array, step after step, in the background and not: each needs the one before."""
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
    before = comm.statistics().collectives
    arrays = [np.full(10 + 997 * (i % 5), float(i + comm.rank)) for i in range(40)]
    pending = [comm.all_reduce(array, async_op=True) for array in arrays]
    comm.barrier()
    assert all(each.done() for each in pending)
    assert comm.statistics().collectives == before + 41
    for i, each in enumerate(pending):
        assert (each.wait() == size * i + sum(range(size))).all()


@on_each_rank(2, over="ring")
def test_handing_over_returns_at_once_while_other_work_runs(comm, event):
    """And memory is given out; the other rank begins only after this one is through with it."""
    if comm.rank == 0:
        first = until_running(comm, lambda: comm.all_reduce(np.ones(3), async_op=True))
        try:
            assert in_thread(lambda: comm.empty(5)).result(DEADLINE_S).shape == (5,)
            more = in_thread(lambda: comm.all_reduce(np.ones(4), async_op=True))
            pending = more.result(DEADLINE_S)
            assert not first.done()
        finally:
            event.set()
    else:
        assert event.wait(2 * DEADLINE_S)
        first = comm.all_reduce(np.ones(3), async_op=True)
        pending = comm.all_reduce(np.ones(4), async_op=True)
    assert [first.wait().sum(), pending.wait().sum()] == [6, 8]


@on_each_rank(2, over="ring")
def test_bad_argument_is_refused_at_once_and_leaves_the_ring_usable(comm):
    with pytest.raises(rr.ArrayError):
        comm.all_reduce([1.0], async_op=True)
    with pytest.raises(rr.ArrayError):
        comm.broadcast(np.ones(3), root=2, async_op=True)
    assert comm.all_reduce(np.ones(3), async_op=True).wait().tolist() == [2.0] * 3


@on_each_rank(2, over="ring")
def test_no_thread_is_started_before_there_is_work_for_it(comm):
    comm.all_reduce(np.ones(3))
    assert f"ringreduce {comm.rank}/2" not in engine_threads()
    comm.all_reduce(np.ones(3), async_op=True).wait()
    assert f"ringreduce {comm.rank}/2" in engine_threads()
    comm.close()
    assert f"ringreduce {comm.rank}/2" not in engine_threads()


def test_time_blocked_is_what_the_engine_and_the_caller_have_waited():
    with rr.Communicator(rr.Config()) as comm:
        comm._session.blocked_for(2.0, 2.0)
        comm._session.blocked_for(0.5, 0.5)
        comm._session.blocked_for(0.25, 1.0)
        comm._session.events.part(SpanKind.REDUCE, 8.0, 12.0)
        assert comm.statistics().waited_s == pytest.approx(2.75, abs=1e-6)
        assert comm.statistics().reducing_s == pytest.approx(7.5, abs=1e-6)


# --- A broken ring --------------------------------------------------------------------------


@on_each_rank(2, over="ring")
def test_work_of_a_ring_that_breaks_fails_with_the_cause_and_later_calls_too(comm):
    pending = [comm.all_reduce(np.ones(3 + comm.rank), async_op=True) for _ in range(4)]
    errors = [outcome(comm.barrier), *(outcome(lambda e=e: e.wait(DEADLINE_S)) for e in pending)]
    later = comm.all_reduce(np.ones(3), async_op=True)
    errors.append(outcome(lambda: later.wait(DEADLINE_S)))
    assert {type(error) for error in errors} == {rr.MismatchError}
    [text] = {str(error) for error in errors}
    assert "3 float64" in text


@needs_library
@pytest.mark.parametrize("can_tell_others", [True, False])
def test_threads_that_wait_for_buckets_are_told_why_the_ring_broke(monkeypatch, can_tell_others):
    with rr.Communicator(rr.Config()) as comm:
        plan = Plan(comm._session.engine.native, 2)
        start(plan.number, 1)
        waiting = in_library(lambda: wait_for_bucket(plan.number, 1))
        if can_tell_others:
            comm._session.fail(rr.MismatchError("has other gradients"))
        else:
            monkeypatch.setattr(comm._session.collectives, "abort", failing(OSError("no")))
            with pytest.raises(OSError, match="no"):
                comm._session.fail(rr.MismatchError("has other gradients"))
        assert waiting.result(DEADLINE_S).why == "has other gradients."


# --- Close ----------------------------------------------------------------------------------


def test_close_ends_what_runs_refuses_what_had_not_begun_and_tells_the_others(ring):
    left = threading.Event()

    def work(comm):
        if comm.rank == 0:
            first = until_running(comm, lambda: comm.all_reduce(np.ones(3), async_op=True))
            pending = [first, *(comm.all_reduce(np.ones(3), async_op=True) for _ in range(2))]
            in_thread(comm.close).result(DEADLINE_S)
            left.set()
            with pytest.raises(rr.ClosedError):
                comm.all_reduce(np.ones(3), async_op=True)
            return [outcome(lambda each=each: each.wait(0.0)) for each in pending]
        assert left.wait(2 * DEADLINE_S)
        # The call that rank 0 was in; it may be over here before the abort comes.
        return outcome(lambda: (comm.all_reduce(np.ones(3)), comm.barrier()))

    (running, *pending), *others = ring(3, work)
    assert isinstance(running, rr.PeerLostError)
    assert "closed its communicator in the middle of a collective" in str(running)
    assert [type(error) for error in pending] == [rr.ClosedError] * 2
    assert [(type(error), error.peer) for error in others] == [(rr.PeerLostError, 0)] * 2


def test_no_engine_is_started_by_a_communicator_that_is_being_closed(monkeypatch):
    """`close` has found that there is none; just then work is handed over."""
    comm = rr.Communicator(rr.Config())
    late: list[Future[Any]] = []

    class Lock:
        """The communicator's; who takes it first is `close`, and work comes before it has it."""

        def __init__(self, lock):
            self._lock = lock

        def __enter__(self):
            if not late:
                late.append(Future())
                late[0] = in_thread(lambda: comm.all_reduce(np.ones(3), async_op=True))
                wait_until(late[0].done, "work to be handed over", DEADLINE_S)
            self._lock.acquire()

        def __exit__(self, *exception):
            self._lock.release()

    monkeypatch.setattr(comm._session.calls, "lock", Lock(comm._session.calls.lock))
    comm.close()
    with pytest.raises(rr.ClosedError):
        late[0].result(DEADLINE_S)
    assert engine_threads() == set()
