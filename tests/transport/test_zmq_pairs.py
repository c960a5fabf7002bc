"""Pairs of ranks over sockets: who may connect, what arrives, and when a call stops."""

import secrets
import socket as sockets
import threading
from typing import Any

import numpy as np
import pytest
import zmq

import ringreduce as rr
from ringreduce.testing import ring_of_threads
from ringreduce.transport.security import Admission
from ringreduce.transport.zmq_pairs import ZmqPairs
from tests.fuzzing import mutate_frame
from tests.rings import Ring, on_each_rank


def pairs_of(comm: rr.Communicator) -> ZmqPairs:
    pairs = comm._session.collectives.pairs
    return pairs


def test_a_communicator_has_no_socket_or_thread_for_pairs_before_their_first_use():
    def work(comm):
        comm.barrier()
        assert pairs_of(comm)._sockets is None
        assert not pairs_of(comm).traffic().bytes_sent
        comm.all_to_all(np.arange(2))
        assert pairs_of(comm)._sockets is None

    before = threading.active_count()
    ring_of_threads(2, work, transport="zmq")
    assert threading.active_count() == before


@pytest.mark.parametrize("secret", ["", secrets.token_hex(32)], ids=["open", "secret"])
@on_each_rank(2, transport="zmq", given=["secret"])
def test_a_port_is_shut_once_its_rank_has_connected(comm, secret):
    if comm.rank == 0:
        comm.send(np.arange(3), 1)
    else:
        comm.recv(np.zeros(3, int), 0)
        end = pairs_of(comm)._receiving[0, 0]
        assert end.socket.is_locked
        host, _, port = end.address.removeprefix("tcp://").rpartition(":")
        # The kernel drops the attempt: it is not even refused.
        with pytest.raises(TimeoutError):
            sockets.create_connection((host, int(port)), 0.3)
    comm.barrier()


def test_only_the_rank_that_is_due_gets_in_and_once(caplog, monkeypatch):
    """Not with the password of the ring's ports, which an eavesdropper may know by now."""
    listens, tried = threading.Event(), threading.Event()
    found = ZmqPairs.found

    def find(pairs, listening):
        found(pairs, listening)
        listens.set()

    monkeypatch.setattr(ZmqPairs, "found", find)

    def work(comm):
        pairs = pairs_of(comm)
        if comm.rank == 0:
            pending = comm.recv(np.zeros(3, int), 1, async_op=True)
            assert tried.wait(20)
            assert pairs._sockets._authenticator.refused == 2
            comm.barrier()
            assert pending.wait().tolist() == [0, 1, 2]
        else:
            assert listens.wait(20)
            address, admission = pairs._addresses[0, 0], pairs._security.data
            with zmq.Context() as context:
                for channel in (0, (1 << 16) + 1):
                    visit(context, admission, channel, address)
            tried.set()
            comm.barrier()
            comm.send(np.arange(3), 0)

    ring_of_threads(2, work, transport="zmq", encryption="on")
    assert "refused a connection" in caplog.text


def visit(context: zmq.Context[Any], admission: Admission, channel: int, address: str) -> None:
    """Knock at rank 0's port, until an answer."""
    with context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        admission.join(socket, 0, channel)
        refused = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        with socket.get_monitor_socket(int(refused | zmq.EVENT_DISCONNECTED)) as events:
            socket.connect(address)
            assert events.poll(15_000)
        socket.disable_monitor()


@pytest.mark.parametrize("what", ["key", "number"])
@on_each_rank(2, transport="zmq", encryption="on")
def test_a_sealed_frame_that_does_not_open_is_named_on_both_ends(comm, what):
    """Another key, or a frame before it is missing."""
    if comm.rank == 0:
        comm.send(np.arange(3), 1)
        channel = pairs_of(comm)._sending[1, 0].channel
        channel.seal_nonce[0] += what == "number"
        channel.seal_key[0] ^= what == "key"
        comm.send(np.arange(3), 1)
        with pytest.raises(rr.CorruptionError, match="was told by rank 1"):
            comm.recv(np.arange(3), 1)
    else:
        comm.recv(np.zeros(3, int), 0)
        with pytest.raises(rr.CorruptionError, match=r"a frame from rank 0 .* in recv #1, tag 0"):
            comm.recv(np.zeros(3, int), 0)


def test_a_broken_ring_ends_what_is_pending_with_its_error():
    def work(comm):
        if comm.rank == 2:
            comm.barrier()
            raise comm._session.fail(rr.PeerLostError("gives up", rank=2, size=3, peer=2))
        pending = [comm.recv(np.ones(3), each, async_op=True) for each in (1 - comm.rank, 2)]
        comm.barrier()
        for each in pending:
            with pytest.raises(rr.PeerLostError, match="was told by rank 2: rank 2 of 3 gives up"):
                each.wait(20)

    with pytest.raises(rr.PeerLostError, match="gives up"):
        ring_of_threads(3, work, transport="zmq")


@pytest.mark.full
@pytest.mark.parametrize("encryption", ["off", "on"])
def test_wrong_frames_of_a_rank_are_one_named_error(encryption, chance):
    """Nothing is written outside the array that is received into, and nobody crashes."""

    def work(comm):
        if comm.rank == 0:
            comm.send(np.arange(3), 1)
            end = pairs_of(comm)._sending[1, 0]
            words = np.array(list(end.transfer.header), np.uint64)
            words[3] = 1  # The sequence number due.
            _, parts = mutate_frame(chance, words, [np.arange(3).tobytes()])
            end.socket.socket.send_multipart(parts, zmq.DONTWAIT)
            # A frame of another epoch is dropped: both wait for the same time then.
            with pytest.raises(rr.RingReduceError, match=r"rank 0 of 2 (was|waited)"):
                comm.recv(np.zeros(3, int), 1)
        else:
            guarded = np.full(64, 7)
            comm.recv(guarded[30:33], 0)
            with pytest.raises(rr.RingReduceError, match="rank 1 of 2 "):
                comm.recv(guarded[30:33], 0)
            assert (np.delete(guarded, slice(30, 33)) == 7).all()

    for _ in range(40):
        limits = {"timeout_s": 0.6, "busy_timeout_s": 0.6}
        ring_of_threads(2, work, transport="zmq", encryption=encryption, **limits)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_signal_in_a_recv_closes_the_communicator_or_breaks_it(tmp_path, transport):
    program = """
    import gc, signal
    leaving, breaking = join(0), join(1)
    signal.signal(signal.SIGUSR1, lambda *_: leaving.close())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    def signal_once_it_waits(ring, number):
        def wait():
            while ring._session.messages.pending() is None:
                time.sleep(0.001)
            os.kill(os.getpid(), number)
        threading.Thread(target=wait, daemon=True).start()

    if RANK == 0:
        signal_once_it_waits(leaving, signal.SIGUSR1)
        attempt("left", lambda: leaving.recv(np.zeros(3), 1))
        assert leaving.closed
        attempt("again", lambda: leaving.recv(np.zeros(3), 1))
        gc.collect()  # In a finalizer Python would ignore the KeyboardInterrupt.
        signal_once_it_waits(breaking, signal.SIGINT)
        attempt("cut", lambda: breaking.recv(np.zeros(3), 1))
        attempt("broken", lambda: breaking.send(np.zeros(3), 1))
    else:
        attempt("left", lambda: leaving.recv(np.zeros(3), 0))
        attempt("again", lambda: leaving.send(np.zeros(1 << 20), 0))
        attempt("cut", breaking.barrier)
        attempt("broken", lambda: breaking.send(np.zeros(3), 0))
    """
    with Ring(tmp_path, 2, program, transport=transport, rings=2) as ring:
        own, other = ring.wait("left")
        assert own["kind"] in ("PeerLostError", "ClosedError"), own
        assert "was left by rank 0" in other["text"]
        own, other = ring.wait("again")
        assert own["kind"] == "ClosedError"
        assert "was left by rank 0" in other["text"]
        own, other = ring.wait("cut")
        assert own["kind"] == "KeyboardInterrupt"
        for fact in (other, *ring.wait("broken")):
            assert fact["kind"] == "PeerLostError"
            assert "was interrupted in a send or recv by KeyboardInterrupt" in fact["text"]
        ring.release()
