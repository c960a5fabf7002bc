"""Collectives in the background: their order, and how a ring that breaks or closes ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.effects import handoff, native
from ringreduce.engine.engine import Work
from ringreduce.pure.spans import SpanKind
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import (
    ArrayError,
    ClosedError,
    MismatchError,
    PeerLostError,
    RingReduceError,
)
from tests.effects.test_handoff import Plan, in_thread, needs_library, start, until_it_waits
from tests.effects.test_handoff import wait as wait_for_bucket
from tests.engine.engines import DEADLINE_S, TIMEOUT_S, engine_threads, failing
from tests.processes import wait_until


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
    before = comm._session._recorder.current_call()
    work = call()
    wait_until(
        lambda: comm._session._recorder.current_call() != before,
        "the collective to begin",
        DEADLINE_S,
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
        comm._session.engine.drain()
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
        comm._session.blocked_for(2.0)
        comm._session.blocked_for(0.5)
        comm._session.blocked_for(0.25, 1.0)
        comm._session.events.part(SpanKind.REDUCE, 8.0, 12.0)
        assert comm.statistics().waited_s == pytest.approx(2.75, abs=1e-6)
        assert comm.statistics().reducing_s == pytest.approx(7.5, abs=1e-6)


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
        plan = Plan(comm._session.engine.native, 2)
        start(plan.number, 1)
        waiting = in_thread(lambda: wait_for_bucket(plan.number, 1))
        until_it_waits(waiting)
        comm._session.fail(MismatchError("has other gradients"))
        assert waiting.result(DEADLINE_S).why == "has other gradients."


@needs_library
def test_threads_that_wait_for_buckets_are_told_though_no_rank_can_be(monkeypatch):
    with Communicator(Config()) as comm:
        plan = Plan(comm._session.engine.native, 2)
        start(plan.number, 1)
        waiting = in_thread(lambda: wait_for_bucket(plan.number, 1))
        until_it_waits(waiting)
        monkeypatch.setattr(comm._session.collectives, "abort", lambda: failing(OSError("no"))())
        with pytest.raises(OSError, match="no"):
            comm._session.fail(MismatchError("has other gradients"))
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
