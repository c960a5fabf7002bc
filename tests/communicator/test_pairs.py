"""send and recv: between two ranks, beside the collectives."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.types import DTYPE_NAMES, dtype_named
from tests.communicator.test_moving import values
from tests.rings import on_each_rank, outcome
from tests.scope import in_full

# None, one, primes; a message of its own and behind the header; several frames; in shared memory
# what fits a slot, what does not, and what goes through several.
COUNTS = (0, 1, 7, 1009, 8191, 8192, 8193, 16_411, 32_768, 32_769, 700_001)


@pytest.mark.parametrize("size", [in_full(2), 3, in_full(5)])
@pytest.mark.parametrize("registered", [False, True])
@on_each_rank(over="on_ranks")
def test_every_rank_gets_what_another_one_sends(comm, size, registered):
    """Around the ring, and to a rank that no link leads to."""
    own = comm.rank
    for distance in range(1, min(size, 4)):
        to, source = (own + distance) % size, (own - distance) % size
        for tag, count in enumerate(COUNTS):
            array = comm.empty(count, np.int32) if registered else np.empty(count, np.int32)
            array[:], into = values(own, count), np.full(count, -1, np.int32)
            sending = comm.send(array, to, tag=tag, async_op=True)
            assert comm.recv(into, source, tag=tag) is into
            assert np.array_equal(into, values(source, count))
            assert sending.wait() is None
            assert np.array_equal(array, values(own, count))
            array[:] = 0  # It is this rank's own again.
    comm.barrier()


@on_each_rank(2, over="on_ranks")
def test_every_dtype_and_shape(comm):
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
    # An array may be changed once it was sent.
    array = np.zeros(1_000_003)
    for n in range(8):
        if comm.rank == 0:
            array[:] = n
            comm.send(array, 1)
        else:
            assert (comm.recv(array, 0) == n).all()


@on_each_rank(3, over="on_ranks")
def test_large_messages_of_all_pairs_do_not_hold_up_collectives(comm):
    """Every rank sends to every other before anyone receives."""
    own, others = comm.rank, [(comm.rank + 1) % 3, (comm.rank + 2) % 3]
    array = np.full(4 << 20, own, np.float32)
    pending = [comm.send(array, other, async_op=True) for other in others]
    assert (comm.all_reduce(np.ones(100_003)) == 3).all()
    for other in others:
        assert (comm.recv(np.empty_like(array), other) == other).all()
    for each in pending:
        each.wait()


@on_each_rank(2, over="on_ranks")
def test_messages_arrive_in_the_order_of_sending(comm):
    """In the background and not, with tags that change, objects between arrays."""
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


@on_each_rank(2, over="on_ranks")
def test_16_mib_each_way_whatever_is_begun_first(comm):
    """Both receive first, both send first, and buckets of gradients in between."""
    count = 1 << 22
    other = 1 - comm.rank
    for receives_first in (True, False):
        array, into = values(comm.rank, count, "int32"), np.zeros(count, np.int32)
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


@on_each_rank(3, over="on_ranks")
def test_a_pending_recv_holds_up_neither_collectives_nor_other_messages(comm):
    """Those of the other direction, and of groups."""
    size, own = comm.size, comm.rank
    ahead, behind = (own + 1) % size, (own - 1) % size
    pending = comm.recv(np.zeros(3, int), behind, tag=1, async_op=True)
    assert comm.all_reduce(np.ones(4)).tolist() == [size] * 4
    assert comm.all_to_all(np.full(size, own)).tolist() == list(range(size))
    rows = comm.all_to_all(np.full((size, 10_007), own))
    assert (rows == np.arange(size)[:, None]).all()
    # The other way round the ring.
    other = comm.recv(np.zeros(1, int), ahead, async_op=True)
    comm.send(np.full(1, own), behind)
    assert other.wait()[0] == ahead
    group = comm.split("all", key=-own)
    place = group.rank
    sending = group.send(np.full(20_011, place), (place + 1) % 3, async_op=True)
    assert (group.recv(np.zeros(20_011, int), (place - 1) % 3) == (place - 1) % 3).all()
    sending.wait()
    assert not pending.done()
    comm.barrier()
    comm.send(np.full(3, own), ahead, tag=1)
    assert (pending.wait() == behind).all()
    comm.barrier()
    comm.close()
    with pytest.raises(rr.ClosedError):  # A group is of no use after its parent.
        group.send(np.ones(3), (place + 1) % 3)


WRONG: dict[str, tuple[Callable[[rr.Communicator], Any], str]] = {
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


def test_what_cannot_be_is_refused_before_anything_is_sent():
    def work(comm):
        for call, text in WRONG.values():
            with pytest.raises(rr.ArrayError, match=text):
                call(comm)
        assert comm.all_reduce(np.ones(2)).tolist() == [2, 2]

    ring_of_threads(2, work)
    with pytest.raises(rr.ArrayError, match="The other ranks are none"):
        ring_of_threads(1, lambda comm: comm.send(np.ones(1), 0))


@pytest.mark.parametrize("transport", ["zmq", in_full("auto")])
@on_each_rank(2, given=["transport"], timeout_s=0.3, busy_timeout_s=0.6)
def test_what_nobody_sends_is_an_error_that_names_the_rank(comm, event, transport):
    if comm.rank == 0:
        done = r"Rank 1 (is alive, in user code|has shown)"
        with pytest.raises(rr.PeerTimeoutError, match=done) as failed:
            comm.recv(np.ones(5), 1, tag=9)
        due = "40 bytes from rank 1" if transport == "zmq" else "rank 1 on the same host"
        assert f"s for {due}" in str(failed.value)
        assert "in recv #0, tag 9" in str(failed.value)
        assert failed.value.peer == 1
        event.set()
    else:
        assert event.wait(20)
        with pytest.raises(rr.PeerTimeoutError, match="was told by rank 0"):
            comm.barrier()


CYCLES: dict[str, tuple[int, Callable[[rr.Communicator], Any], str]] = {
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
def test_ranks_that_wait_for_each_other_learn_why_none_goes_on(transport, name):
    size, call, text = CYCLES[name]

    def work(comm):
        with pytest.raises(rr.PeerTimeoutError) as failed:
            call(comm)
        return str(failed.value)

    # A rank that waits for this one is not busy elsewhere.
    limits = {"timeout_s": 0.4, "busy_timeout_s": 20.0}
    for found in ring_of_threads(size, work, transport=transport, **limits):
        assert "Ranks wait for each other: rank " in found
        assert text in found or f"{text.split('. ')[0]}, " in found


@pytest.mark.parametrize("method", ["send", "recv"])
@on_each_rank(3, over="on_ranks")
def test_closing_ends_a_message_that_waits_and_breaks_no_other_rank(comm, method):
    if comm.rank == 0:
        pending = [comm.recv(np.ones(1), 2, async_op=True) for _ in range(2)]
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(getattr(comm, method), np.ones(1 << 22), 1)
            comm.barrier()
            comm.close()
            errors = [blocked.exception(20), *(outcome(each.wait) for each in pending)]
        assert all(isinstance(each, (rr.PeerLostError, rr.ClosedError)) for each in errors), errors
        with pytest.raises(rr.ClosedError):
            getattr(comm, method)(np.ones(1), 1)
    else:
        comm.barrier()
        other = 3 - comm.rank
        sending = comm.send(np.full(7, comm.rank), other, async_op=True)
        assert (comm.recv(np.zeros(7, int), other) == other).all()
        sending.wait()


@on_each_rank(2, over="on_ranks")
def test_what_was_sent_arrives_though_its_sender_has_left(comm, event):
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
        event.set()
    else:
        assert event.wait(20)
        for n in range(3):
            assert (comm.recv(np.zeros(1000, int), 0) == n).all()
        with pytest.raises(rr.MismatchError, match="was left by rank 0"):
            comm.recv(np.zeros(1), 0)


@on_each_rank(3, over="on_ranks")
def test_a_rank_that_has_left_gets_and_sends_nothing(comm):
    if comm.rank < 2:
        call = comm.send if comm.rank else comm.recv
        # Of several hosts, the rank's stands in between.
        advice = r"in (send #0, tag 0.* Let rank 2 call recv|recv #0, tag 0.* Let rank 2 call send)"
        with pytest.raises(rr.MismatchError, match=f"was left by rank 2, .*{advice} before it"):
            call(np.ones(1 << 20), 2)


@on_each_rank(2)
def test_a_recv_within_a_recv_is_refused(comm):
    """As in a signal handler; it would wait for the one that it has interrupted."""
    direction = comm._session.messages._direction(False, 1 - comm.rank)
    direction.caller = threading.get_ident()
    with pytest.raises(rr.MismatchError, match="in a signal handler, within another one"):
        comm.recv(np.ones(1), 1 - comm.rank)
    direction.caller = None
    work = comm.send(np.ones(1), 1 - comm.rank, async_op=True)
    assert comm.recv(np.zeros(1), 1 - comm.rank).tolist() == [1]
    work.wait()
