"""send and recv: between two ranks, beside the collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.errors import (
    ArrayError,
    ClosedError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
)
from ringreduce.vocabulary.types import DTYPE_NAMES, dtype_named
from tests.scope import in_full

OnRanks = Callable[..., list[Any]]
# None, one, primes; a message of its own and behind the header; several frames.
COUNTS = (0, 1, 2, 7, 1009, 16_411, 700_001)


def values(rank: int, count: int, dtype: str = "int32") -> np.ndarray:
    """Numbers below 127 that differ between ranks and places."""
    return ((np.arange(count) * 7 + rank * 13) % 127).astype(dtype_named(dtype))


@pytest.mark.parametrize("size", [in_full(2), 3, in_full(5)])
def test_every_rank_gets_what_another_one_sends(on_ranks: OnRanks, size: int) -> None:
    """Around the ring, and to a rank that no link leads to."""

    def work(comm: Communicator) -> None:
        own = comm.rank
        for distance in range(1, min(size, 4)):
            to, source = (own + distance) % size, (own - distance) % size
            for tag, count in enumerate(COUNTS):
                array, into = values(own, count), np.full(count, -1, np.int32)
                sending = comm.send(array, to, tag=tag, async_op=True)
                assert comm.recv(into, source, tag=tag) is into
                assert np.array_equal(into, values(source, count))
                assert sending.wait() is None
                assert np.array_equal(array, values(own, count))
        comm.barrier()

    on_ranks(size, work)


def test_every_dtype_and_shape(on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> None:
        for dtype in DTYPE_NAMES:
            if comm.rank == 0:
                comm.send(values(0, 12, dtype).reshape(3, 4), 1)
            else:
                into = np.zeros((2, 6), dtype_named(dtype))
                comm.recv(into, 0)
                assert np.array_equal(into.reshape(-1), values(0, 12, dtype))
        if comm.rank == 0:
            comm.send(np.array(3.0), 1)
        else:
            assert comm.recv(np.zeros(()), 0) == 3.0

    on_ranks(2, work)


def test_an_array_may_be_changed_once_it_was_sent(on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> None:
        array = np.zeros(1_000_003)
        for n in range(8):
            if comm.rank == 0:
                array[:] = n
                comm.send(array, 1)
            else:
                assert (comm.recv(array, 0) == n).all()

    on_ranks(2, work)


def test_messages_arrive_in_the_order_of_sending(on_ranks: OnRanks) -> None:
    """In the background and not, with tags that change, objects between arrays."""

    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            pending = [comm.send(np.array([n]), 1, tag=n % 3, async_op=True) for n in range(50)]
            comm.send_object({"then": 50}, 1, tag=7)
            comm.send(np.array([51]), 1, tag=8)
            assert all(each.done() for each in pending)
        else:
            found = [np.zeros(1, int) for _ in range(51)]
            pending = [
                comm.recv(into, 0, tag=n % 3, async_op=True) for n, into in enumerate(found[:50])
            ]
            assert comm.recv_object(0, tag=7) == {"then": 50}
            comm.recv(found[50], 0, tag=8)
            assert [each.wait()[0] for each in pending] == list(range(50))
            assert found[50][0] == 51

    on_ranks(2, work)


def test_16_mib_each_way_whatever_is_begun_first(on_ranks: OnRanks) -> None:
    """Both receive first, both send first, and buckets of gradients in between."""
    count = 1 << 22

    def work(comm: Communicator) -> None:
        other = 1 - comm.rank
        for receives_first in (True, False):
            array, into = values(comm.rank, count), np.zeros(count, np.int32)
            gradients = [np.full(100_003, comm.rank + n, np.float32) for n in range(4)]
            buckets = [comm.all_reduce(each, async_op=True) for each in gradients[:2]]
            begin = [
                lambda into=into: comm.recv(into, other, tag=3, async_op=True),
                lambda array=array: comm.send(array, other, tag=3, async_op=True),
            ]
            both = [call() for call in (begin if receives_first else begin[::-1])]
            buckets += [comm.all_reduce(each, async_op=True) for each in gradients[2:]]
            for each in both:
                each.wait()
            assert np.array_equal(into, values(other, count))
            for n, bucket in enumerate(buckets):
                assert (bucket.wait() == 2 * n + 1).all()

    on_ranks(2, work)


def test_a_pending_recv_holds_up_neither_collectives_nor_the_other_direction(
    on_ranks: OnRanks,
) -> None:
    def work(comm: Communicator) -> None:
        size, own = comm.size, comm.rank
        ahead, behind = (own + 1) % size, (own - 1) % size
        into = np.zeros(3, int)
        pending = comm.recv(into, behind, tag=1, async_op=True)
        assert comm.all_reduce(np.ones(4)).tolist() == [size] * 4
        found = comm.all_to_all(np.full(size, own))
        assert found.tolist() == list(range(size))
        rows = comm.all_to_all(np.full((size, 10_007), own))
        assert (rows == np.arange(size)[:, None]).all()
        # The other way round the ring, where size is over 2.
        other = comm.recv(np.zeros(1, int), ahead, async_op=True) if size > 2 else None
        if other is not None:
            comm.send(np.full(1, own), behind)
            assert other.wait()[0] == ahead
        assert not pending.done()
        comm.barrier()
        comm.send(np.full(3, own), ahead, tag=1)
        assert (pending.wait() == behind).all()

    on_ranks(3, work)


def test_groups_have_messages_of_their_own(on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> None:
        group = comm.split("all", key=-comm.rank)
        assert group is not None
        own = group.rank
        pending = comm.recv(np.zeros(1, int), (comm.rank + 1) % 3, async_op=True)
        sending = group.send(np.full(20_011, own), (own + 1) % 3, async_op=True)
        assert (group.recv(np.zeros(20_011, int), (own - 1) % 3) == (own - 1) % 3).all()
        sending.wait()
        assert not pending.done()
        group.barrier()
        comm.send(np.full(1, comm.rank), (comm.rank - 1) % 3)
        assert pending.wait()[0] == (comm.rank + 1) % 3

    on_ranks(3, work)


WRONG: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "itself": (lambda c: c.send(np.ones(1), c.rank), "got rank . to send to or receive from"),
    "no rank": (lambda c: c.recv(np.ones(1), 2), "got rank 2"),
    "negative": (lambda c: c.recv(np.ones(1), -1), "got rank -1"),
    "text": (lambda c: c.recv_object("1"), "got rank '1'"),
    "tag": (lambda c: c.send(np.ones(1), 1 - c.rank, tag=-1), "got tag -1"),
    "large tag": (lambda c: c.send(np.ones(1), 1 - c.rank, tag=1 << 63), "got tag"),
    "fraction": (lambda c: c.send_object(1, 1 - c.rank, tag=0.5), "got tag 0.5"),
    "list": (lambda c: c.send([1], 1 - c.rank), "send got list"),
    "read only": (lambda c: c.recv(np.frombuffer(b"12", "u1"), 1 - c.rank), "a read-only array"),
    "not contiguous": (lambda c: c.send(np.ones((2, 2)).T, 1 - c.rank), "not C-contiguous"),
    "object": (lambda c: c.send_object(object(), 1 - c.rank), "cannot send a object"),
}


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    def work(comm: Communicator) -> None:
        for call, text in WRONG.values():
            with pytest.raises(ArrayError, match=text):
                call(comm)
        assert comm.all_reduce(np.ones(2)).tolist() == [2, 2]

    ring_of_threads(2, work)
    with pytest.raises(ArrayError, match="The other ranks are none"):
        ring_of_threads(1, lambda comm: comm.send(np.ones(1), 0))


DISAGREEING: dict[str, tuple[Callable[[Communicator], Any], Callable[[Communicator], Any], str]] = {
    "tags": (
        lambda c: c.send(np.ones(3), 1, tag=4),
        lambda c: c.recv(np.ones(3), 0, tag=5),
        r"is in recv #0 of 3 float64, tag 5 while rank 0 is in send #0 of 3 float64, tag 4",
    ),
    "counts": (
        lambda c: c.send(np.ones(2), 1),
        lambda c: c.recv(np.ones(3), 0),
        r"recv #0 of 3 float64, tag 0 while rank 0 is in send #0 of 2 float64, tag 0",
    ),
    "dtypes": (
        lambda c: c.send(np.ones(3, np.float32), 1),
        lambda c: c.recv(np.ones(3), 0),
        r"recv #0 of 3 float64, tag 0 while rank 0 is in send #0 of 3 float32, tag 0",
    ),
    "objects": (
        lambda c: c.send_object(1, 1),
        lambda c: c.recv(np.ones(3), 0),
        r"recv #0 of 3 float64, tag 0 while rank 0 is in send_object #0, tag 0",
    ),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_ranks_that_disagree_are_named_on_both(on_ranks: OnRanks, name: str) -> None:
    sends, receives, text = DISAGREEING[name]

    def work(comm: Communicator) -> None:
        def disagree() -> None:
            (receives if comm.rank else sends)(comm)
            comm.barrier()

        with pytest.raises(MismatchError, match=text):
            disagree()
        # It stays broken, and says the same.
        with pytest.raises(MismatchError, match=text):
            comm.send(np.ones(1), 1 - comm.rank)
        with pytest.raises(MismatchError, match=text):
            comm.barrier()

    on_ranks(2, work)


@pytest.mark.parametrize("transport", ["zmq", in_full("auto")])
def test_what_nobody_sends_is_an_error_that_names_the_rank(transport: str) -> None:
    ended = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            done = r"Rank 1 (is alive, in user code|has shown)"
            with pytest.raises(PeerTimeoutError, match=done) as failed:
                comm.recv(np.ones(5), 1, tag=9)
            due = "40 bytes from rank 1" if transport == "zmq" else "rank 1 on the same host"
            assert f"s for {due}" in str(failed.value)
            assert "in recv #0, tag 9" in str(failed.value)
            assert failed.value.peer == 1
            ended.set()
        else:
            assert ended.wait(20)
            with pytest.raises(PeerTimeoutError, match="was told by rank 0"):
                comm.barrier()

    ring_of_threads(2, work, transport=transport, timeout_s=0.3, busy_timeout_s=0.6)


CYCLES: dict[str, tuple[int, Callable[[Communicator], Any], str]] = {
    "both send": (
        2,
        lambda c: c.send(np.ones(1 << 21), 1 - c.rank),
        "rank 1 sends to rank 0. Let one of them receive first; arrays can be sent with async_op",
    ),
    "three receive": (
        3,
        lambda c: c.recv(np.ones(3), (c.rank + 1) % 3, tag=2),
        "rank 2 receives from rank 0. Let one of them send first.",
    ),
}


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("transport", ["zmq", in_full("auto")])
def test_ranks_that_wait_for_each_other_learn_why_none_goes_on(transport: str, name: str) -> None:
    size, call, text = CYCLES[name]

    def work(comm: Communicator) -> str:
        with pytest.raises(PeerTimeoutError) as failed:
            call(comm)
        return str(failed.value)

    # A rank that waits for this one is not busy elsewhere.
    limits = {"timeout_s": 0.4, "busy_timeout_s": 20.0}
    for found in ring_of_threads(size, work, transport=transport, **limits):
        assert "Ranks wait for each other: rank " in found
        assert text in found or f"{text.split('. ')[0]}, " in found


def test_closing_ends_a_recv_that_waits_and_breaks_no_other_rank(on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            pending = comm.recv(np.ones(1), 2, async_op=True)
            later = comm.recv(np.ones(1), 2, async_op=True)
            blocked = threading.Thread(target=lambda: comm.recv(np.ones(1), 1))
            raised: list[BaseException] = []
            threading.excepthook, hook = (
                lambda args: raised.append(args.exc_value),
                (threading.excepthook),
            )
            blocked.start()
            comm.barrier()
            comm.close()
            blocked.join(20)
            threading.excepthook = hook
            for error, kind in ((raised[0], (PeerLostError, ClosedError)),):
                assert isinstance(error, kind), error
            for each in (pending, later):
                with pytest.raises((PeerLostError, ClosedError)):
                    each.wait(20)
            with pytest.raises(ClosedError):
                comm.recv(np.ones(1), 1)
        else:
            comm.barrier()
            other = 3 - comm.rank
            sending = comm.send(np.full(7, comm.rank), other, async_op=True)
            assert (comm.recv(np.zeros(7, int), other) == other).all()
            sending.wait()

    on_ranks(3, work)


def test_what_was_sent_arrives_though_its_sender_has_left(on_ranks: OnRanks) -> None:
    closed = threading.Event()

    def work(comm: Communicator) -> None:
        for first in range(2):
            # Connected before, since the first recv connects.
            if comm.rank == 0:
                comm.send(np.arange(first), 1)
            else:
                comm.recv(np.zeros(first, int), 0)
        if comm.rank == 0:
            for n in range(3):
                comm.send(np.full(1000, n), 1)
            comm.close()
            closed.set()
        else:
            assert closed.wait(20)
            for n in range(3):
                assert (comm.recv(np.zeros(1000, int), 0) == n).all()
            with pytest.raises(MismatchError, match="was left by rank 0"):
                comm.recv(np.zeros(1), 0)

    on_ranks(2, work)


def test_a_rank_that_has_left_gets_and_sends_nothing(on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank < 2:
            call = comm.send if comm.rank else comm.recv
            # Of several hosts, the rank's stands in between.
            advice = (
                r"in (send #0, tag 0.* Let rank 2 call recv|recv #0, tag 0.* Let rank 2 call send)"
            )
            with pytest.raises(MismatchError, match=f"was left by rank 2, .*{advice} before it"):
                call(np.ones(1 << 20), 2)

    on_ranks(3, work)


def test_a_group_is_of_no_use_after_its_parent(on_ranks: OnRanks) -> None:
    def work(comm: Communicator) -> None:
        group = comm.split(0)
        assert group is not None
        if group.rank:
            group.send(np.ones(3), 0)
        else:
            group.recv(np.ones(3), 1)
        comm.barrier()
        comm.close()
        with pytest.raises(ClosedError):
            group.send(np.ones(3), 1 - group.rank)

    on_ranks(2, work)


def test_a_recv_within_a_recv_is_refused() -> None:
    """As in a signal handler; it would wait for the one that it has interrupted."""

    def work(comm: Communicator) -> None:
        direction = comm._session.messages._direction(False, 1 - comm.rank)
        direction.caller = threading.get_ident()
        with pytest.raises(MismatchError, match="in a signal handler, within another one"):
            comm.recv(np.ones(1), 1 - comm.rank)
        direction.caller = None
        work = comm.send(np.ones(1), 1 - comm.rank, async_op=True)
        assert comm.recv(np.zeros(1), 1 - comm.rank).tolist() == [1]
        work.wait()

    ring_of_threads(2, work)
