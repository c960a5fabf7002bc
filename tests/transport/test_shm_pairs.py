"""Messages between two ranks of a host: in order, checked, apart from the collectives."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.effects import native
from ringreduce.pure.wire import Header, Kind
from ringreduce.testing import ring_of_threads
from ringreduce.transport.segment import Heap
from ringreduce.transport.shm_pairs import ShmPairs
from ringreduce.vocabulary.errors import ArrayError, MismatchError, PeerLostError, RingReduceError
from ringreduce.vocabulary.types import dtype_code
from tests.rings import Ring, assert_lost

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the native library")

MIB = 1 << 20


def pairs_of(comm: Communicator) -> ShmPairs:
    return comm._session.collectives.links[0].pairs


def header(sender: int, array: np.ndarray, tag: int = 0) -> Header:
    code = dtype_code(array.dtype)
    return Header(Kind.SEND, 1, sender, dtype=code, count=array.size, signature=tag)


def values(sender: int, count: int, dtype: str) -> np.ndarray:
    return ((np.arange(count) * 7 + sender * 13) % 127).astype(dtype)


@pytest.mark.parametrize("registered", [False, True])
def test_messages_of_all_sizes_arrive_in_order_both_ways(registered):
    counts = [0, 1, 1009, 8191, 8192, 8193, 32768, 32769, 300_007]

    def work(comm: Communicator) -> None:
        pairs, other = pairs_of(comm), 1 - comm.rank

        def send() -> None:
            for dtype in ("float32", "int8"):
                for count in counts:
                    array = comm.empty(count, dtype) if registered else np.empty(count, dtype)
                    array[:] = values(comm.rank, count, dtype)
                    pairs.send(other, header(comm.rank, array, count), array)
                    array[:] = 0  # Ours again.

        sending = threading.Thread(target=send)
        sending.start()
        for dtype in ("float32", "int8"):
            for count in counts:
                array = np.empty(count, dtype)
                pairs.recv(other, header(other, array, count), array)
                assert np.array_equal(array, values(other, count, dtype))
        sending.join()
        assert comm.statistics().bytes_received >= 5 * 300_007

    ring_of_threads(2, work, transport="shm")


def test_large_messages_of_all_pairs_do_not_hold_up_collectives():
    """Every rank sends to every other before anyone receives."""

    def work(comm: Communicator) -> None:
        pairs, own = pairs_of(comm), comm.rank
        others = [place for place in range(comm.size) if place != own]
        array = np.full(4 * MIB, own, np.float32)
        threads = [
            threading.Thread(target=pairs.send, args=(place, header(own, array), array))
            for place in others
        ]
        for thread in threads:
            thread.start()
        total = comm.all_reduce(np.ones(100_003))
        assert (total == comm.size).all()
        received = np.empty_like(array)
        for place in others:
            pairs.recv(place, header(place, received), received)
            assert (received == place).all()
        for thread in threads:
            thread.join()

    ring_of_threads(3, work, transport="shm")


WRONG = {
    "tag": lambda pairs, array: pairs.recv(0, header(0, array, 6), array),
    "count": lambda pairs, array: pairs.recv(0, header(0, array[1:], 5), array[1:]),
    "dtype": lambda pairs, array: pairs.recv(
        0, header(0, array.view(np.int32), 5), array.view(np.int32)
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_another_message_than_the_one_due_is_a_mismatch_on_both_ends(what):
    def work(comm: Communicator) -> None:
        link, array = comm._session.collectives.links[0], np.zeros(100_000, np.float32)
        small = array[:10]
        if comm.rank == 0:
            link.pairs.send(1, header(0, small, 5), small)
            # The watcher would say why.
            with pytest.raises(PeerLostError, match="lost the connection with rank 1 on the same"):
                link.pairs.send(1, header(0, array, 5), array)
        else:
            link.pairs.recv(0, header(0, small, 5), small)
            with pytest.raises(MismatchError, match=r"is in recv #1 of .* is in send #1 of"):
                WRONG[what](link.pairs, array)
            link.abort()

    ring_of_threads(2, work, transport="shm")


def test_message_outlives_a_sender_that_has_closed():
    """A small one is sent when it lies in the channel."""
    sent, closed = threading.Event(), threading.Event()

    def work(comm: Communicator) -> None:
        pairs, array = pairs_of(comm), np.arange(100)
        if comm.rank == 0:
            pairs.send(1, header(0, array), array)
            sent.set()
            comm.close()
            closed.set()
            return
        assert sent.wait(20)
        assert closed.wait(20)
        received = np.empty_like(array)
        pairs.recv(0, header(0, received), received)
        assert np.array_equal(received, array)
        with pytest.raises(RingReduceError, match="lost the connection with rank 0"):
            pairs.recv(0, header(0, received), received)

    ring_of_threads(2, work, transport="shm")


@pytest.mark.parametrize("method", ["send", "recv"])
def test_closing_ends_a_message_of_another_thread(method):
    def work(comm: Communicator) -> None:
        pairs, array = pairs_of(comm), np.zeros(MIB)
        failed: list[BaseException] = []

        def call() -> None:
            try:
                getattr(pairs, method)(1, header(0, array), array)
            except RingReduceError as error:
                failed.append(error)

        if comm.rank == 0:
            thread = threading.Thread(target=call)
            thread.start()
            comm._session.collectives.links[0].close()
            thread.join()
            assert isinstance(failed[0], PeerLostError)
            assert "closed its communicator" in str(failed[0])
            call()
            assert len(failed) == 2
        comm_done.wait()

    comm_done = threading.Barrier(2, timeout=20)
    ring_of_threads(2, work, transport="shm")


def test_no_memory_for_a_channel_is_said_before_anything_is_sent(monkeypatch):
    def work(comm: Communicator) -> None:
        pairs, array = pairs_of(comm), np.zeros(10)
        if comm.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(Heap, "reserve", lambda heap, nbytes: None)
                with pytest.raises(ArrayError, match="no shared memory left to send to rank 1"):
                    pairs.send(1, header(0, array), array)
            pairs.send(1, header(0, array), array)
        else:
            pairs.recv(0, header(0, array), array)

    ring_of_threads(2, work, transport="shm")


def test_a_rank_killed_while_others_wait_for_its_messages_is_named(tmp_path: Path) -> None:
    """Rank 0 sends it a large message, rank 2 receives: one in small ones, one in none."""
    program = """
    from tests.transport.test_shm_pairs import header, pairs_of
    ring = join()
    pairs, large, small = pairs_of(ring), np.zeros(1 << 20), np.zeros(10)
    if RANK == 1:
        pairs.send(2, header(1, small), small)
        pairs.recv(0, header(0, small), small)
        say("round")
        hold()
    if RANK == 0:
        pairs.send(1, header(0, small), small)
        attempt("result", lambda: pairs.send(1, header(0, large), large))
    else:
        pairs.recv(1, header(1, small), small)
        attempt("result", lambda: pairs.recv(1, header(1, small), small))
    hold()
    """
    with Ring(tmp_path, 3, program, transport="shm") as ring:
        ring.wait("round", [1])
        ring.workers[1].signal(signal.SIGKILL)
        assert_lost(ring.wait("result", [0, 2]), 1)
