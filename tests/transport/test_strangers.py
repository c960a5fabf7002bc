"""Bytes from strangers, at a ring that runs, with a secret or without, and at one that still forms.

Nothing may crash, hang, take memory beyond its limits or change a result. Only a ring without a
secret may end, with an error that names the stranger's frame.
"""

import contextlib
import os
import secrets
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import zmq

import ringreduce as rr
from ringreduce.pure import wire
from ringreduce.transport import listening
from tests.fuzzing import STRANGERS, blast, bounded_memory, frame, mutate_bytes, mutate_frame
from tests.processes import run_python, wait_until
from tests.proxy import LONG, greeting, ready, wrap
from tests.rings import Ring, outcomes
from tests.scope import in_full

SECRET = secrets.token_hex(32)
# Rounds of a sum until the test lets a rank stop them; every result is checked. Ports stay open, as
# they do where the kernel cannot shut them.
ROUNDS = """
from ringreduce.transport import listening
listening.shut = lambda listener: False
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
def rounds():
    for number in range(1 << 62):
        data = np.full(50_000, ring.rank + 1.0)
        ring.all_reduce(data)
        assert (data == sum(range(1, SIZE + 1))).all()
        if number % 20 == 0:
            say("rounds")
        if ring.all_reduce(np.array([int(over.is_set())]), "max")[0]:
            return
ring = join()
say("ready", address=ring._session.collectives._link.address)
attempt("result", rounds)
ring.close()
"""
# Of those below, what a ring without a secret takes for a member's.
TAKEN = {"random bytes", "ZMTP 1", "ZMTP 2", "NULL and a frame", "NULL, reserved flags"}
TAKEN |= {"a PUSH socket"}


def port(ring: Ring) -> int:
    """The port at which rank 1 receives."""
    return int(ring.wait("ready", [1])[0]["address"].rpartition(":")[2])


def pids(ring: Ring) -> list[int]:
    return [worker.pid for worker in ring.workers]


def assert_unhurt(ring: Ring) -> None:
    """The ring completes further rounds, and has raised nothing."""
    rounds = max(len(ring.said(rank, "rounds")) for rank in range(ring.size))
    ring.wait("rounds", times=rounds + 2)
    assert not any(ring.said(rank, "result") for rank in range(ring.size))


def end_well(ring: Ring) -> None:
    ring.tell()
    assert [fact["kind"] for fact in ring.wait("result")] == ["", ""]
    ring.release()


@pytest.fixture(scope="class", params=["", "off", "on"], ids=["open", "PLAIN", "CURVE"])
def open_ring(request, tmp_path_factory):
    """A running ring whose ports stay open; it must end well.

    It takes all processors, so it is not there for other tests.
    """
    settings = {"secret": SECRET, "encryption": request.param} if request.param else {}
    with Ring(tmp_path_factory.mktemp("open"), 2, ROUNDS, **settings) as ring:
        ring.wait("rounds")
        ring.has_secret = bool(request.param)
        yield ring
        end_well(ring)


class TestRunningRing:
    def test_no_stranger_hurts_a_running_ring(self, open_ring):
        """Every named attempt, a few at a time; refusals take time."""
        attempts = [
            STRANGERS[name] for name in STRANGERS if open_ring.has_secret or name not in TAKEN
        ]
        with bounded_memory(*pids(open_ring)), ThreadPoolExecutor(8) as pool:
            for attempt in [pool.submit(work, port(open_ring)) for work in attempts]:
                attempt.result(60)
        assert len(attempts) >= 40
        with socket.create_connection(("127.0.0.1", port(open_ring))):
            assert_unhurt(open_ring)  # Also while one stays and says nothing.

    @pytest.mark.parametrize("open_ring", ["off", "on"], indirect=True, ids=["PLAIN", "CURVE"])
    @pytest.mark.parametrize("times", [1, in_full(10)])
    def test_no_stream_of_random_frames_gets_into_a_running_ring(self, open_ring, chance, times):
        """What looks like right frames at first, with the handshakes of all mechanisms."""
        with bounded_memory(*pids(open_ring)):
            for _ in range(times * 100):
                pieces = [greeting(chance.choice((b"NULL", b"PLAIN", b"CURVE"))), ready()]
                for _ in range(100):
                    parts = mutate_frame(chance, frame(), [bytes(100)])[1]
                    pieces += [wrap(part, LONG) for part in parts]
                stream = b"".join(pieces)
                if chance.random() < 0.5:
                    stream = mutate_bytes(chance, stream)
                blast(port(open_ring), stream)
        assert_unhurt(open_ring)


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_strangers_find_no_door_once_the_ring_stands(tmp_path):
    """Ten thousand that knock cost neither a descriptor nor a thread nor an answer."""
    program = ROUNDS.replace("listening.shut = lambda listener: False", "")
    assert program != ROUNDS
    with Ring(tmp_path, 2, program, secret=SECRET) as ring:
        ring.wait("rounds")
        process = psutil.Process(ring.workers[1].pid)
        before = process.num_fds(), process.num_threads()
        with bounded_memory(*pids(ring)):
            for _ in range(50):
                with contextlib.ExitStack() as stack:
                    knocking = [stack.enter_context(socket.socket()) for _ in range(200)]
                    for stranger in knocking:
                        stranger.setblocking(False)
                        stranger.connect_ex(("127.0.0.1", port(ring)))
                    # Without an answer the kernel still tries when we leave: SYN_SENT.
                    for stranger in knocking:
                        assert stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\2"
        assert (process.num_fds(), process.num_threads()) == before
        assert_unhurt(ring)
        end_well(ring)


# What a stranger sends in one message, and what the ranks then say of it.
FOREIGN = {
    "short": ([b"short"], "bytes that are no frame"),
    "empty": ([b""], "bytes that are no frame"),
    "random": ([os.urandom(64)], "bytes that are no frame"),
    "other job": ([bytes(frame())], "a frame of another job"),
    "three parts": ([bytes(frame()), bytes(100_000), b"more"], "a frame of another job"),
    "version": ([bytes(frame(version=9))], f"a frame of wire version 9, not {wire.WIRE_VERSION}"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_frame_of_a_stranger_is_a_protocol_error_on_every_rank(monkeypatch, name):
    monkeypatch.setattr(listening, "shut", lambda listener: False)
    parts, text = FOREIGN[name]

    def work(comm):
        address = comm.all_gather_object(comm._session.collectives._link.address)[1]
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            if comm.rank == 0:
                stranger.connect(address)
                stranger.send_multipart(parts)
            with pytest.raises(rr.ProtocolError) as caught:
                [comm.all_reduce(np.ones(50_000)) for _ in iter(int, 1)]
        assert f"received {text} on {address}" in str(caught.value)
        comm.barrier()

    for error in outcomes(2, work, transport="zmq", secret=""):
        assert isinstance(error, rr.ProtocolError)
        assert f"received {text} on " in str(error)


FORMING = """
if RANK == 1:
    sys.stdin.readline()
ring = join()
say("joined", sum=float(ring.all_reduce(np.ones(30000)).sum()))
hold()
"""


@pytest.mark.parametrize(
    ("encryption", "times"), [("on", 5), in_full("off", 20), in_full("on", 20)]
)
def test_no_stranger_hurts_a_ring_that_forms(tmp_path, encryption, times, chance):
    """Rank 0 waits for rank 1, with its rendezvous and its data port open to all."""
    with Ring(tmp_path, 2, FORMING, secret=SECRET, encryption=encryption) as ring:
        waiting = psutil.Process(ring.workers[0].pid)

        def open_ports():
            """Those that accept connections; the standby port is shut."""
            found = waiting.net_connections("tcp")
            ports = {it.laddr.port for it in found if it.status == psutil.CONN_LISTEN}
            for port in list(ports):
                try:
                    socket.create_connection(("127.0.0.1", port), 0.2).close()
                except TimeoutError:
                    ports.remove(port)
            return ports

        # The rendezvous, the data port and the control channel's, which one neighbour shares.
        wait_until(lambda: len(open_ports()) >= 3, "rank 0 to listen")
        ports = open_ports()
        with bounded_memory(waiting.pid), ThreadPoolExecutor(8) as pool:
            attempts = [pool.submit(work, port) for port in ports for work in STRANGERS.values()]
            for attempt in attempts:
                attempt.result(60)
            for port in ports:
                for _ in range(times):
                    stream = greeting(b"CURVE") + ready() + wrap(bytes(64), LONG) * 20
                    blast(port, mutate_bytes(chance, stream))
        ring.tell(1)
        assert [fact["sum"] for fact in ring.wait("joined")] == [60000.0] * 2
        ring.release()


@pytest.mark.full
def test_a_storm_at_a_data_port_does_not_wedge_a_link():
    """A queue of a thousand events once did: libzmq waited for room, and closing for libzmq."""
    program = """
    import socket
    from tests.transport.test_zeromq import make_link
    link = make_link(0, 2)
    address = "127.0.0.1", int(link.address.rpartition(":")[2])
    for _ in range(2500):
        socket.create_connection(address, 10).close()
    link.close()
    print("closed")
    """
    done = run_python(program)
    assert done.stdout == "closed\n", done.stderr
