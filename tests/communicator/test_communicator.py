"""The public object: what it refuses, what it counts, how it ends; and the process's own one."""

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import ringreduce as rr
from ringreduce.pure import payload
from ringreduce.testing import ring_of_threads
from tests.rings import on_each_rank, outcome


def read_only() -> np.ndarray:
    array = np.ones(4)
    array.flags.writeable = False
    return array


BAD_ARRAYS: dict[str, tuple[Any, str]] = {
    "list": ([1.0, 2.0], "got list, not a numpy array"),
    "none": (None, "got NoneType, not a numpy array"),
    "number": (1.0, "got float, not a numpy array"),
    "numpy number": (np.float32(1), "got float32, not a numpy array"),
    "object": (np.array([1, None]), "dtype object"),
    "complex": (np.ones(4, complex), "dtype complex128"),
    "text": (np.array(["a"]), "dtype str"),
    "foreign byte order": (np.ones(4, ">f4"), "float32 in foreign byte order"),
    "strided": (np.ones(8)[::2], r"not C-contiguous \(shape \(4,\), strides \(16,\)\)"),
    "transposed": (np.ones((2, 3)).T, r"not C-contiguous \(shape \(3, 2\), strides \(8, 24\)\)"),
    "reversed": (np.ones(4)[::-1], "not C-contiguous"),
    "repeated": (np.broadcast_to(np.ones(1), (4,)), "not C-contiguous"),
}
METHODS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def assert_usable(comm: rr.Communicator) -> None:
    assert (comm.all_reduce(np.ones(3)) == comm.size).all()


@pytest.mark.parametrize("size", [1, 2])
@on_each_rank()
def test_bad_arguments_are_refused_and_leave_the_ring_usable(comm, size):
    def assert_refused(text, method, *arguments, **options):
        with pytest.raises(rr.ArrayError, match=text) as caught:
            getattr(comm, method)(*arguments, **options)
        assert (comm.all_reduce(np.ones(3)) == comm.size).all()
        return caught.value.rank

    for method in METHODS:
        for array, text in BAD_ARRAYS.values():
            assert_refused(text, method, array)
    for method in ("all_reduce", "reduce_scatter"):
        assert_refused(f"{method} got a read-only array", method, read_only())
        for op in ("average", None, 1):
            assert_refused("as reduction operator", method, np.ones(3), op)
    for root in (-1, 2, 1.5, "first", None):
        rank = assert_refused(f"got root {root!r}", "broadcast", np.ones(3), root)
        assert rank == comm.rank
        assert_refused(f"got root {root!r}", "broadcast_object", "x", root)
    for method, count in itertools.product(
        ("all_reduce", "reduce_scatter", "broadcast"), (3, 100_003)
    ):
        for signature in (-1, 1 << 64):
            assert_refused("signature", method, np.ones(count), signature=signature)
    # A read-only array is refused by a broadcast's receiver alone.
    if size == 1:
        assert comm.broadcast(read_only()).sum() == 4
    else:
        text = "broadcast got a read-only array"
        assert_refused(text, "broadcast", read_only(), root=1 - comm.rank)


@pytest.mark.parametrize("hosts", ["", "aba"], ids=["one host", "two hosts"])
@on_each_rank(3, given=["hosts"])
def test_equal_signatures_change_nothing(comm, hosts):
    assert comm.broadcast(np.full(5, comm.rank), 1, signature=7).tolist() == [1] * 5
    assert comm.reduce_scatter(np.ones(3), signature=7).tolist() == [3.0]


def unencodable() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return [object(), endless, "\ud800", 1 << 70, {"a": lambda: 0}]


# What each rank passes, of which only rank 1's value cannot be sent.
OBJECT_CALLS: dict[str, Callable[[rr.Communicator, Any], Any]] = {
    "broadcast": lambda comm, value: comm.broadcast_object(value, root=1),
    "all_gather": lambda comm, value: comm.all_gather_object(value if comm.rank == 1 else 0),
    "gather": lambda comm, value: comm.gather_object(value if comm.rank == 1 else 0, root=0),
    "scatter": lambda comm, value: comm.scatter_object([0, value, 0], root=1),
}


@pytest.mark.parametrize("name", OBJECT_CALLS)
@on_each_rank(3)
def test_object_that_cannot_be_encoded_is_refused_on_all_ranks_and_leaves_the_ring_usable(
    comm, name
):
    """Of a gather a rank that is neither the root nor the one at fault learns nothing."""

    for value in unencodable():
        why = f"rank 1 of 3 cannot send a {type(value).__name__} to other ranks"
        if name == "gather" and comm.rank == 2:
            assert OBJECT_CALLS[name](comm, value) is None
            continue
        with pytest.raises(rr.ArrayError, match=why) as caught:
            OBJECT_CALLS[name](comm, value)
        assert (caught.value.rank, caught.value.size) == (comm.rank, 3)
    assert_usable(comm)


@pytest.mark.parametrize("name", OBJECT_CALLS)
def test_object_over_the_limit_is_refused_and_leaves_the_ring_usable(monkeypatch, name):
    monkeypatch.setattr(payload, "OBJECT_BYTES_MAX", 1000)

    def work(comm):
        # And 3 bytes of MessagePack.
        OBJECT_CALLS[name](comm, b"x" * 997)
        error = outcome(lambda: OBJECT_CALLS[name](comm, b"x" * 998))
        if name != "gather" or comm.rank < 2:
            assert isinstance(error, rr.ArrayError)
            assert "of 1001 bytes; the limit is 1000" in str(error)
        assert_usable(comm)

    ring_of_threads(3, work)


@on_each_rank(2)
def test_an_extension_of_messagepack_travels_as_before(comm):
    found = comm.broadcast_object(msgspec.msgpack.Ext(7, b"data") if comm.rank == 0 else None)
    assert (found.code, found.data) == (7, b"data")


def all_calls(comm: rr.Communicator) -> list[Any]:
    return [
        lambda: comm.all_reduce(np.ones(3)),
        lambda: comm.reduce_scatter(np.ones(3)),
        lambda: comm.all_gather(np.ones(3)),
        lambda: comm.broadcast(np.ones(3)),
        lambda: comm.barrier(),
        lambda: comm.broadcast_object(1),
        lambda: comm.all_gather_object(1),
    ]


@pytest.mark.parametrize("size", [1, 2])
@on_each_rank()
def test_closed_communicator_says_so_in_every_collective(comm, size):
    comm.barrier()
    with comm:
        assert not comm.closed
    comm.close()  # Again, which does nothing.
    assert comm.closed
    for call in all_calls(comm):
        with pytest.raises(rr.ClosedError, match=r"after close\(\)") as caught:
            call()
        assert (caught.value.rank, caught.value.size) == (comm.rank, size)


@on_each_rank(2, timeout_s=60)
def test_broken_communicator_raises_the_same_error_again_at_once(comm):
    with pytest.raises(rr.MismatchError) as first:
        comm.all_reduce(np.ones(3 + comm.rank))
    # Both sides are told.
    assert "3 float64, sum" in str(first.value)
    assert "4 float64, sum" in str(first.value)
    started = time.monotonic()
    for call in all_calls(comm):
        with pytest.raises(rr.MismatchError) as again:
            call()
        assert str(again.value) == str(first.value)
        assert again.value is not first.value
        assert again.value.__cause__ is comm.failure
    assert time.monotonic() - started < 2
    with pytest.raises(rr.ArrayError):  # A bad argument still is one.
        comm.all_reduce([1.0])


def test_an_old_exception_is_no_reason_to_leave(monkeypatch):
    """As an interactive session, or a test run, keeps the last one."""
    monkeypatch.setattr(sys, "last_value", ValueError("long ago"), raising=False)

    def work(comm):
        if comm.rank == 1:
            comm.close()
            return
        with pytest.raises(rr.MismatchError) as caught:
            comm.barrier()
        assert "after 1 call and makes no more" in str(caught.value)

    ring_of_threads(2, work, timeout_s=60)


@on_each_rank(3)
def test_failure_found_by_a_layer_above_reaches_every_rank(comm):
    """File names that are no UTF-8 come as lone surrogates, in texts that are none."""
    if comm.rank == 1:
        comm._session.fail(rr.MismatchError("cannot read \udcff", rank=1, size=3))
    with pytest.raises(rr.MismatchError, match="cannot read") as caught:
        comm.barrier()
    assert caught.value.origin == (None if comm.rank == 1 else 1)


def test_exception_in_the_middle_of_a_collective_breaks_the_ring(monkeypatch):
    """After Ctrl-C, say, the ranks are out of step for good."""

    def interrupt():
        raise KeyboardInterrupt

    with rr.Communicator(rr.Config()) as comm:
        monkeypatch.setattr(comm._session.collectives, "barrier", interrupt)
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
        with pytest.raises(
            rr.PeerLostError, match="interrupted in a collective by KeyboardInterrupt"
        ):
            comm.all_reduce(np.ones(3))


def test_statistics_of_a_world_of_one_count_completed_calls_alone():
    with rr.Communicator(rr.Config()) as comm:
        new = comm.statistics()
        assert (new.collectives, new.seconds, new.frames_received) == (0, 0.0, 0)
        assert (new.bytes_sent, new.bytes_received) == (0, 0)
        for call in all_calls(comm):
            call()
        with pytest.raises(rr.ArrayError):
            comm.all_reduce([1.0])
        assert comm.statistics().collectives == 7


@pytest.mark.parametrize("size", [2, 3])
@on_each_rank(transport="zmq")
def test_statistics_count_the_bytes_that_the_algorithm_promises(comm, size):
    """2 nbytes (size - 1) / size each way on every link."""
    count = 6 * 10_000  # divisible by both sizes
    nbytes = 8 * count
    before = comm.statistics()
    comm.all_reduce(np.ones(count))
    after = comm.statistics()
    expected = 2 * nbytes * (size - 1) // size
    assert after.bytes_sent - before.bytes_sent == expected
    assert after.bytes_received - before.bytes_received == expected
    assert after.frames_received - before.frames_received == 2 * (size - 1)
    assert after.collectives == before.collectives + 1
    assert after.seconds > before.seconds


def test_repr_tells_place_and_state():
    with rr.Communicator(rr.Config()) as comm:
        assert repr(comm) == "<Communicator rank 0 of 1, open>"
        comm._session.fail(rr.MismatchError("differ"))
        assert repr(comm) == "<Communicator rank 0 of 1, broken>"
    assert repr(comm) == "<Communicator rank 0 of 1, closed>"


def test_places_on_the_host_are_counted_or_given():
    def places(comm):
        return comm.local_rank, comm.local_size

    assert ring_of_threads(3, places) == [(0, 3), (1, 3), (2, 3)]
    assert ring_of_threads(2, places, local_rank=0, local_size=1) == [(0, 1), (0, 1)]


def test_mean_of_narrow_integers_over_more_ranks_than_they_hold_is_refused(monkeypatch):
    """200 is no int8; a world of one pretends to be that large."""
    with rr.Communicator(rr.Config()) as communicator:
        monkeypatch.setattr(rr.Communicator, "size", 200)
        with pytest.raises(rr.ArrayError, match="int8"):
            communicator.all_reduce(np.ones(3, np.int8), "mean")
        with pytest.raises(rr.ArrayError, match="int8"):
            communicator.reduce_scatter(np.ones(3, np.int8), "mean")
        communicator.all_reduce(np.ones(3, np.int8))


@pytest.mark.full
@on_each_rank(2, segment_bytes=1 << 22)
def test_buffer_over_2_gib_is_reduced_to_its_last_element(comm):
    """Offsets and lengths beyond 32 bits, in the loop, the header and the kernels."""
    count = 2**31 + 11
    marks = [0, 1, count // 2, count // 2 + 1, 2**31 - 1, 2**31, count - 2, count - 1]
    array = np.full(count, comm.rank + 1, np.int8)
    array[marks] = np.arange(len(marks)) * (comm.rank + 1)
    comm.all_reduce(array)
    assert array[marks].tolist() == [3 * i for i in range(len(marks))]
    for start in (2, count // 2 + 2, 2**31 - 1000):
        assert (array[start : start + 900] == 3).all()


@pytest.fixture
def no_default(monkeypatch):
    """No variable of a launch, and no communicator of this process before or after."""
    for name in ("RANK", "SIZE", "RENDEZVOUS", "JOB_ID", "LOCAL_RANK", "LOCAL_SIZE", "TIMEOUT_S"):
        monkeypatch.delenv(f"RINGREDUCE_{name}", raising=False)
    rr.shutdown()
    yield
    rr.shutdown()


QUESTIONS = ("rank", "size", "local_rank", "local_size", "default_communicator")


@pytest.mark.usefixtures("no_default")
class TestProcess:
    """``ringreduce.init()`` and what asks for its communicator."""

    def test_init_without_a_launch_makes_a_world_of_one_that_answers_questions(self):
        comm = rr.init()
        assert comm.all_reduce(np.full(3, 5.0)).tolist() == [5, 5, 5]
        assert rr.is_initialized()
        assert [getattr(rr, name)() for name in QUESTIONS] == [0, 1, 0, 1, comm]
        assert rr.init() is comm

    def test_init_again_with_other_settings_is_refused_with_both(self):
        comm = rr.init(timeout_s=5)
        with pytest.raises(rr.ConfigError, match=r"timeout_s=5.*timeout_s=6.*shutdown\(\)"):
            rr.init(timeout_s=6)
        assert rr.default_communicator() is comm

    def test_init_after_close_or_shutdown_makes_a_new_one(self):
        first = rr.init()
        first.close()
        assert not rr.is_initialized()
        with pytest.raises(rr.ClosedError, match="no ring"):
            rr.rank()
        second = rr.init()
        assert second is not first
        second.barrier()
        rr.shutdown()
        rr.shutdown()  # Of nothing.
        assert second.closed
        assert not rr.is_initialized()

    @pytest.mark.parametrize("question", QUESTIONS)
    def test_question_before_init_is_refused(self, question):
        with pytest.raises(rr.ClosedError, match=r"Call ringreduce.init\(\) first"):
            getattr(rr, question)()

    def test_init_in_a_broken_launch_is_refused(self, monkeypatch):
        monkeypatch.setenv("RINGREDUCE_RANK", "0")
        with pytest.raises(rr.ConfigError, match="RINGREDUCE_SIZE"):
            rr.init()
        assert not rr.is_initialized()


def test_a_rank_alone_on_its_host_does_not_complain_of_memory(caplog):
    def work(comm):
        array = comm.empty(1000)
        array[:] = comm.rank
        return float(comm.all_reduce(array)[0])

    with caplog.at_level("WARNING", logger="ringreduce"):
        assert ring_of_threads(3, work, hosts=["a", "b", "a"], timeout_s=60) == [3.0] * 3
    assert [record.message for record in caplog.records] == []


def test_an_abort_after_a_failure_answers_background_work_with_that_failure(monkeypatch):
    """Two texts would be two errors: that of the call, and that of an op that waits."""
    with rr.Communicator(rr.Config()) as communicator:
        told = []
        monkeypatch.setattr(
            communicator._session.engine, "fail", lambda _, error: told.append(error)
        )
        first = communicator._session.fail(rr.ConfigError("found here"))
        communicator._session.ring_ended(rr.ConfigError("heard of later"))
        assert told == [first, first]
