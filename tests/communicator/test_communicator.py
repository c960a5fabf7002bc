"""The public object: what it refuses, what it counts, how it ends; and the process's own one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import ringreduce
from ringreduce.communicator.communicator import Communicator
from ringreduce.pure import payload
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import (
    ArrayError,
    ClosedError,
    ConfigError,
    MismatchError,
    PeerLostError,
)


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


def assert_usable(comm: Communicator) -> None:
    assert (comm.all_reduce(np.ones(3)) == comm.size).all()


@pytest.mark.parametrize("size", [1, 2])
def test_bad_array_is_refused_by_every_collective_and_leaves_the_ring_usable(size):
    def work(comm: Communicator) -> None:
        for method in METHODS:
            for array, text in BAD_ARRAYS.values():
                with pytest.raises(ArrayError, match=text):
                    getattr(comm, method)(array)
            assert_usable(comm)

    ring_of_threads(size, work)


@pytest.mark.parametrize("method", ["all_reduce", "reduce_scatter"])
def test_read_only_array_is_refused_where_it_would_be_written(method):
    def work(comm: Communicator) -> None:
        with pytest.raises(ArrayError, match=f"{method} got a read-only array"):
            getattr(comm, method)(read_only())
        assert_usable(comm)

    ring_of_threads(2, work)


def test_read_only_array_is_refused_by_a_broadcasts_receiver_alone():
    comm = Communicator(Config())
    assert comm.broadcast(read_only()).sum() == 4

    def work(comm: Communicator) -> None:
        with pytest.raises(ArrayError, match="broadcast got a read-only array"):
            comm.broadcast(read_only(), root=1 - comm.rank)
        assert_usable(comm)

    ring_of_threads(2, work)


@pytest.mark.parametrize("method", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", ["average", None, 1])
def test_unknown_operator_is_refused_and_leaves_the_ring_usable(method, op):
    def work(comm: Communicator) -> None:
        with pytest.raises(ArrayError, match="as reduction operator"):
            getattr(comm, method)(np.ones(3), op)
        assert_usable(comm)

    ring_of_threads(2, work)


@pytest.mark.parametrize("root", [-1, 2, 1.5, "first", None])
def test_bad_root_is_refused_and_leaves_the_ring_usable(root):
    def work(comm: Communicator) -> None:
        with pytest.raises(ArrayError, match="got root") as caught:
            comm.broadcast(np.ones(3), root)
        assert repr(root) in str(caught.value)
        assert caught.value.rank == comm.rank
        with pytest.raises(ArrayError, match="got root"):
            comm.broadcast_object("x", root)
        assert_usable(comm)

    ring_of_threads(2, work, timeout_s=3)


@pytest.mark.parametrize("signature", [-1, 1 << 64])
def test_signature_beyond_64_bits_is_refused_and_leaves_the_ring_usable(signature):
    def work(comm: Communicator) -> None:
        for count in (3, 100_003):
            with pytest.raises(ArrayError, match="signature"):
                comm.all_reduce(np.ones(count), signature=signature)
            with pytest.raises(ArrayError, match="signature"):
                comm.reduce_scatter(np.ones(count), signature=signature)
            with pytest.raises(ArrayError, match="signature"):
                comm.broadcast(np.ones(count), signature=signature)
        assert_usable(comm)

    ring_of_threads(2, work)


@pytest.mark.parametrize("hosts", [(), ("a", "b", "a")], ids=["one host", "two hosts"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("count", [3, 100_003])
def test_signatures_that_differ_are_a_mismatch(count, name, hosts):
    def work(comm: Communicator) -> None:
        def call() -> None:
            # Of three ranks two agree, and they may be neighbours.
            getattr(comm, name)(np.ones(count), signature=comm.rank // 2)
            # A root that only sends may be done before anyone sees that it differs.
            comm.barrier()

        with pytest.raises(MismatchError):
            call()

    ring_of_threads(3, work, hosts=hosts)


@pytest.mark.parametrize("hosts", [(), ("a", "b", "a")], ids=["one host", "two hosts"])
def test_equal_signatures_change_nothing(hosts):
    def work(comm: Communicator) -> None:
        assert comm.broadcast(np.full(5, comm.rank), 1, signature=7).tolist() == [1] * 5
        assert comm.reduce_scatter(np.ones(3), signature=7).tolist() == [3.0]

    ring_of_threads(3, work, hosts=hosts)


def unencodable() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return [object(), endless, "\ud800", 1 << 70, {"a": lambda: 0}]


# What each rank passes, of which only rank 1's value cannot be sent.
OBJECT_CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "broadcast": lambda comm, value: comm.broadcast_object(value, root=1),
    "all_gather": lambda comm, value: comm.all_gather_object(value if comm.rank == 1 else 0),
    "gather": lambda comm, value: comm.gather_object(value if comm.rank == 1 else 0, root=0),
    "scatter": lambda comm, value: comm.scatter_object([0, value, 0], root=1),
}


@pytest.mark.parametrize("name", OBJECT_CALLS)
def test_object_that_cannot_be_encoded_is_refused_on_all_ranks_and_leaves_the_ring_usable(name):
    """Of a gather a rank that is neither the root nor the one at fault learns nothing."""

    def work(comm: Communicator) -> None:
        for value in unencodable():
            why = f"rank 1 of 3 cannot send a {type(value).__name__} to other ranks"
            if name == "gather" and comm.rank == 2:
                assert OBJECT_CALLS[name](comm, value) is None
                continue
            with pytest.raises(ArrayError, match=why) as caught:
                OBJECT_CALLS[name](comm, value)
            assert (caught.value.rank, caught.value.size) == (comm.rank, 3)
        assert_usable(comm)

    ring_of_threads(3, work)


@pytest.mark.parametrize("name", OBJECT_CALLS)
def test_object_over_the_limit_is_refused_and_leaves_the_ring_usable(monkeypatch, name):
    monkeypatch.setattr(payload, "OBJECT_BYTES_MAX", 1000)

    def work(comm: Communicator) -> None:
        # And 3 bytes of MessagePack.
        OBJECT_CALLS[name](comm, b"x" * 997)
        if name != "gather" or comm.rank < 2:
            with pytest.raises(ArrayError, match="of 1001 bytes; the limit is 1000"):
                OBJECT_CALLS[name](comm, b"x" * 998)
        else:
            OBJECT_CALLS[name](comm, b"x" * 998)
        assert_usable(comm)

    ring_of_threads(3, work)


def test_an_extension_of_messagepack_travels_as_before():
    def work(comm: Communicator) -> None:
        found = comm.broadcast_object(msgspec.msgpack.Ext(7, b"data") if comm.rank == 0 else None)
        assert (found.code, found.data) == (7, b"data")

    ring_of_threads(2, work)


def all_calls(comm: Communicator) -> list[Any]:
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
def test_closed_communicator_says_so_in_every_collective(size):
    def work(comm: Communicator) -> None:
        comm.close()
        for call in all_calls(comm):
            with pytest.raises(ClosedError, match=r"after close\(\)") as caught:
                call()
            assert (caught.value.rank, caught.value.size) == (comm.rank, size)

    ring_of_threads(size, work)


def test_closing_again_does_nothing():
    def work(comm: Communicator) -> None:
        comm.barrier()
        comm.close()
        comm.close()
        assert comm.closed

    ring_of_threads(2, work)


def test_context_manager_closes():
    with Communicator(Config()) as comm:
        assert not comm.closed
    assert comm.closed


def test_broken_communicator_raises_the_same_error_again_at_once():
    def work(comm: Communicator) -> None:
        with pytest.raises(MismatchError) as first:
            comm.all_reduce(np.ones(3 + comm.rank))
        started = time.monotonic()
        for call in all_calls(comm):
            with pytest.raises(MismatchError) as again:
                call()
            assert str(again.value) == str(first.value)
            assert again.value is not first.value
            assert again.value.__cause__ is comm.failure
        assert time.monotonic() - started < 2

    ring_of_threads(2, work, timeout_s=60)


def test_an_old_exception_is_no_reason_to_leave(monkeypatch):
    """As an interactive session, or a test run, keeps the last one."""
    monkeypatch.setattr(sys, "last_value", ValueError("long ago"), raising=False)

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.close()
            return
        with pytest.raises(MismatchError) as caught:
            comm.barrier()
        assert "after 1 call and makes no more" in str(caught.value)

    ring_of_threads(2, work, timeout_s=60)


def test_mismatch_tells_both_sides():
    def work(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(np.ones(3 + comm.rank))
        return str(caught.value)

    texts = ring_of_threads(2, work)
    assert all("3 float64, sum" in text and "4 float64, sum" in text for text in texts)


def test_bad_argument_to_a_broken_communicator_is_still_a_bad_argument():
    with Communicator(Config()) as comm:
        comm._session.fail(MismatchError("differ"))
        with pytest.raises(ArrayError):
            comm.all_reduce([1.0])


def test_failure_found_by_a_layer_above_reaches_every_rank():
    def work(comm: Communicator) -> int | None:
        if comm.rank == 1:
            comm._session.fail(MismatchError("has other gradients", rank=1, size=3))
        with pytest.raises(MismatchError, match="has other gradients") as caught:
            comm.barrier()
        return caught.value.origin

    assert ring_of_threads(3, work) == [1, None, 1]


def test_failure_whose_text_is_none_reaches_every_rank():
    """File names that are no UTF-8 come as lone surrogates."""

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            comm._session.fail(MismatchError("cannot read \udcff"))
        with pytest.raises(MismatchError, match="cannot read"):
            comm.barrier()

    ring_of_threads(2, work)


def test_exception_in_the_middle_of_a_collective_breaks_the_ring(monkeypatch):
    """After Ctrl-C, say, the ranks are out of step for good."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with Communicator(Config()) as comm:
        monkeypatch.setattr(comm._session.collectives, "barrier", interrupt)
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
        with pytest.raises(PeerLostError, match="interrupted in a collective by KeyboardInterrupt"):
            comm.all_reduce(np.ones(3))


def test_statistics_of_a_new_world_of_one_are_zero():
    with Communicator(Config()) as comm:
        statistics = comm.statistics()
    assert (statistics.collectives, statistics.seconds) == (0, 0.0)
    assert (statistics.frames_received, statistics.bytes_sent, statistics.bytes_received) == (
        (0, 0, 0)
    )


def test_statistics_count_completed_calls_alone():
    with Communicator(Config()) as comm:
        for call in all_calls(comm):
            call()
        with pytest.raises(ArrayError):
            comm.all_reduce([1.0])
        assert comm.statistics().collectives == 7


@pytest.mark.parametrize("size", [2, 3])
def test_statistics_count_the_bytes_that_the_algorithm_promises(size):
    """2 nbytes (size - 1) / size each way on every link."""
    count = 6 * 10_000  # divisible by both sizes
    nbytes = 8 * count

    def work(comm: Communicator) -> None:
        before = comm.statistics()
        comm.all_reduce(np.ones(count))
        after = comm.statistics()
        expected = 2 * nbytes * (size - 1) // size
        assert after.bytes_sent - before.bytes_sent == expected
        assert after.bytes_received - before.bytes_received == expected
        assert after.frames_received - before.frames_received == 2 * (size - 1)
        assert after.collectives == before.collectives + 1
        assert after.seconds > before.seconds

    ring_of_threads(size, work, transport="zmq")


def test_repr_tells_place_and_state():
    with Communicator(Config()) as comm:
        assert repr(comm) == "<Communicator rank 0 of 1, open>"
        comm._session.fail(MismatchError("differ"))
        assert repr(comm) == "<Communicator rank 0 of 1, broken>"
    assert repr(comm) == "<Communicator rank 0 of 1, closed>"


def test_places_on_the_host_are_counted_when_the_ring_forms():
    places = ring_of_threads(3, lambda comm: (comm.rank, comm.local_rank, comm.local_size))
    assert places == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_places_on_the_host_may_be_given():
    places = ring_of_threads(
        2, lambda comm: (comm.local_rank, comm.local_size), local_rank=0, local_size=1
    )
    assert places == [(0, 1), (0, 1)]


def test_mean_of_narrow_integers_over_more_ranks_than_they_hold_is_refused(monkeypatch):
    """200 is no int8; a world of one pretends to be that large."""
    with Communicator(Config()) as communicator:
        monkeypatch.setattr(Communicator, "size", 200)
        with pytest.raises(ArrayError, match="int8"):
            communicator.all_reduce(np.ones(3, np.int8), "mean")
        with pytest.raises(ArrayError, match="int8"):
            communicator.reduce_scatter(np.ones(3, np.int8), "mean")
        communicator.all_reduce(np.ones(3, np.int8))


@pytest.mark.full
def test_buffer_over_2_gib_is_reduced_to_its_last_element():
    """Offsets and lengths beyond 32 bits, in the loop, the header and the kernels."""
    count = 2**31 + 11
    marks = [0, 1, count // 2, count // 2 + 1, 2**31 - 1, 2**31, count - 2, count - 1]

    def work(comm: Communicator) -> None:
        array = np.full(count, comm.rank + 1, np.int8)
        array[marks] = np.arange(len(marks)) * (comm.rank + 1)
        comm.all_reduce(array)
        assert array[marks].tolist() == [3 * i for i in range(len(marks))]
        for start in (2, count // 2 + 2, 2**31 - 1000):
            assert (array[start : start + 900] == 3).all()

    ring_of_threads(2, work, segment_bytes=1 << 22)


@pytest.fixture
def no_default(monkeypatch):
    """No variable of a launch, and no communicator of this process before or after."""
    for name in ("RANK", "SIZE", "RENDEZVOUS", "JOB_ID", "LOCAL_RANK", "LOCAL_SIZE", "TIMEOUT_S"):
        monkeypatch.delenv(f"RINGREDUCE_{name}", raising=False)
    ringreduce.shutdown()
    yield
    ringreduce.shutdown()


@pytest.mark.usefixtures("no_default")
class TestProcess:
    """``ringreduce.init()`` and what asks for its communicator."""

    def test_init_without_a_launch_makes_a_world_of_one(self):
        comm = ringreduce.init()
        assert (comm.rank, comm.size) == (0, 1)
        assert comm.all_reduce(np.full(3, 5.0)).tolist() == [5, 5, 5]

    def test_questions_are_answered_by_the_default(self):
        comm = ringreduce.init()
        assert ringreduce.default_communicator() is comm
        assert ringreduce.is_initialized()
        places = [ringreduce.rank(), ringreduce.size()]
        places += [ringreduce.local_rank(), ringreduce.local_size()]
        assert places == [0, 1, 0, 1]

    def test_init_again_returns_the_same(self):
        assert ringreduce.init() is ringreduce.init()

    def test_init_again_with_other_settings_is_refused_with_both(self):
        comm = ringreduce.init(timeout_s=5)
        with pytest.raises(ConfigError, match=r"timeout_s=5.*timeout_s=6.*shutdown\(\)"):
            ringreduce.init(timeout_s=6)
        assert ringreduce.default_communicator() is comm

    def test_init_after_close_makes_a_new_one(self):
        first = ringreduce.init()
        first.close()
        second = ringreduce.init()
        assert second is not first
        second.barrier()

    @pytest.mark.parametrize(
        "question", ["rank", "size", "local_rank", "local_size", "default_communicator"]
    )
    def test_question_before_init_is_refused(self, question):
        with pytest.raises(ClosedError, match=r"Call ringreduce.init\(\) first"):
            getattr(ringreduce, question)()

    def test_question_after_close_is_refused(self):
        ringreduce.init().close()
        assert not ringreduce.is_initialized()
        with pytest.raises(ClosedError, match="no ring"):
            ringreduce.rank()

    def test_shutdown_closes_the_default(self):
        comm = ringreduce.init()
        ringreduce.shutdown()
        assert comm.closed
        assert not ringreduce.is_initialized()

    def test_shutdown_without_init_does_nothing(self):
        ringreduce.shutdown()
        assert not ringreduce.is_initialized()

    def test_init_in_a_broken_launch_is_refused(self, monkeypatch):
        monkeypatch.setenv("RINGREDUCE_RANK", "0")
        with pytest.raises(ConfigError, match="RINGREDUCE_SIZE"):
            ringreduce.init()
        assert not ringreduce.is_initialized()


def test_a_rank_alone_on_its_host_does_not_complain_of_memory(caplog):
    def work(comm: Communicator) -> float:
        array = comm.empty(1000)
        array[:] = comm.rank
        return float(comm.all_reduce(array)[0])

    with caplog.at_level("WARNING", logger="ringreduce"):
        assert ring_of_threads(3, work, hosts=["a", "b", "a"], timeout_s=60) == [3.0] * 3
    assert [record.message for record in caplog.records] == []


def test_an_abort_after_a_failure_answers_background_work_with_that_failure(monkeypatch):
    """Two texts would be two errors: that of the call, and that of an op that waits."""
    with ringreduce.Communicator(Config()) as communicator:
        told = []
        monkeypatch.setattr(
            communicator._session.engine, "fail", lambda _, error: told.append(error)
        )
        first = communicator._session.fail(ringreduce.ConfigError("found here"))
        communicator._session.ring_ended(ringreduce.ConfigError("heard of later"))
        assert told == [first, first]
