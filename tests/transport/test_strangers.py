"""Bytes from strangers without the key, at a ring that runs and at one that still forms.

Nothing may crash, hang, take memory beyond its limits or change a result.
"""

from __future__ import annotations

import random
import resource
import secrets
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.communicator.test_open_ring import ROUNDS
from tests.fuzzing import (
    STRANGERS,
    blast,
    bounded_memory,
    frame,
    greeting,
    message,
    mutate_bytes,
    mutate_frame,
    pids,
    ready,
)
from tests.processes import clean_environment, wait_until
from tests.rings import Ring
from tests.scope import in_full

SECRET = secrets.token_hex(32)
# How often the tests of streams do what they do.
TIMES = (1, pytest.param(10, marks=pytest.mark.full))


@pytest.fixture(scope="class", params=["off", "on"], ids=["PLAIN", "CURVE"])
def open_ring(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ring]:
    """A running ring with a secret whose ports stay open; it must end well.

    It takes all processors, so it is not there for other tests.
    """
    directory = tmp_path_factory.mktemp("open")
    with Ring(directory, 2, ROUNDS, secret=SECRET, encryption=request.param) as ring:
        ring.wait("rounds")
        yield ring
        ring.end_well()


class TestRunningRing:
    def test_no_stranger_hurts_a_running_ring(self, open_ring: Ring) -> None:
        """Every named attempt, a few at a time; refusals take time."""
        port = open_ring.port(1)
        with bounded_memory(*pids(open_ring)), ThreadPoolExecutor(8) as pool:
            for attempt in [pool.submit(work, port) for work in STRANGERS.values()]:
                attempt.result(60)
        assert len(STRANGERS) >= 40
        open_ring.assert_unhurt()

    @pytest.mark.parametrize("times", TIMES)
    def test_no_stream_of_random_frames_gets_into_a_running_ring(
        self, open_ring: Ring, chance: random.Random, times: int
    ) -> None:
        """What looks like right frames at first, with the handshakes of all mechanisms."""
        port, header = open_ring.port(1), frame()
        with bounded_memory(*pids(open_ring)):
            for _ in range(times * 100):
                pieces = [greeting(chance.choice((b"NULL", b"PLAIN", b"CURVE"))), ready()]
                for _ in range(100):
                    parts = mutate_frame(chance, header, [bytes(100)])[1]
                    pieces += [message(part) for part in parts]
                stream = b"".join(pieces)
                blast(port, mutate_bytes(chance, stream) if chance.random() < 0.5 else stream)
        open_ring.assert_unhurt()


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_strangers_find_no_door_once_the_ring_stands(tmp_path: Path) -> None:
    """Ten thousand that knock cost neither a descriptor nor a thread nor an answer."""
    program = ROUNDS.replace("listening.shut = lambda listener: False", "")
    assert program != ROUNDS
    with Ring(tmp_path, 2, program, secret=SECRET) as ring:
        ring.wait("rounds")
        port = ring.port(1)
        process = psutil.Process(ring.workers[1].pid)
        before = process.num_fds(), process.num_threads()
        with bounded_memory(*pids(ring)):
            for _ in range(50):
                knocking = [socket.socket() for _ in range(200)]
                for stranger in knocking:
                    stranger.setblocking(False)
                    stranger.connect_ex(("127.0.0.1", port))
                # Without an answer the kernel still tries when we leave.
                states = {
                    stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                    for stranger in knocking
                }
                assert states == {2}, "not SYN_SENT alone"
                for stranger in knocking:
                    stranger.close()
        assert (process.num_fds(), process.num_threads()) == before
        ring.assert_unhurt()
        ring.end_well()


FORMING = """
from ringreduce.transport import listening
if RANK == 1:
    sys.stdin.readline()
ring = join()
say("joined", sum=float(ring.all_reduce(np.ones(30000)).sum()))
hold()
"""


def is_open(port: int) -> bool:
    """Whether the port accepts connections; the standby port is shut."""
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("encryption", [in_full("off"), "on"])
def test_no_stranger_hurts_a_ring_that_forms(
    tmp_path: Path, encryption: str, chance: random.Random
) -> None:
    """Rank 0 waits for rank 1, with its rendezvous and its data port open to all."""
    with Ring(tmp_path, 2, FORMING, secret=SECRET, encryption=encryption) as ring:
        waiting = psutil.Process(ring.workers[0].pid)

        def listening() -> list[int]:
            found = waiting.net_connections("tcp")
            ports = {it.laddr.port for it in found if it.status == psutil.CONN_LISTEN}
            return [port for port in ports if is_open(port)]

        # The rendezvous, the data port and the control channel's, which one neighbour shares.
        wait_until(lambda: len(listening()) >= 3, "rank 0 to listen")
        ports = listening()
        with bounded_memory(waiting.pid), ThreadPoolExecutor(8) as pool:
            attempts = [pool.submit(work, port) for port in ports for work in STRANGERS.values()]
            for attempt in attempts:
                attempt.result(60)
            for port in ports:
                for _ in range(20):
                    stream = greeting(b"CURVE") + ready() + message(bytes(64)) * 20
                    blast(port, mutate_bytes(chance, stream))
        ring.workers[1].stdin.write(b"\n")
        ring.workers[1].stdin.flush()
        assert [fact["sum"] for fact in ring.wait("joined")] == [60000.0] * 2
        ring.release()


@pytest.mark.full
def test_a_storm_at_a_data_port_does_not_wedge_a_link() -> None:
    """A queue of a thousand events once did: libzmq waited for room, and closing for libzmq."""
    program = """
    import socket
    from ringreduce.effects.events import Events
    from ringreduce.pure.timeouts import Timeouts
    from ringreduce.transport.security import Security
    from ringreduce.transport.stalls import Waiting
    from ringreduce.transport.zeromq import ZmqLink
    from ringreduce.transport.listening import Bind
    settings = {"bind": Bind(("127.0.0.1",)), "segment_bytes": 4096}
    waiting = Waiting(Timeouts(5.0, 5.0), Events())
    link = ZmqLink(**settings, waiting=waiting, security=Security(size=2))
    address = "127.0.0.1", int(link.address.rpartition(":")[2])
    for _ in range(2500):
        socket.create_connection(address, 10).close()
    link.close()
    print("closed")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
        check=False,
    )
    assert done.stdout == "closed\n", done.stderr


@pytest.mark.parametrize(
    ("soft", "hard", "expected"), [in_full(48, 512, "formed"), (48, 48, "ConfigError")]
)
def test_too_few_descriptors_are_made_more_or_named(soft: int, hard: int, expected: str) -> None:
    """libzmq would end the process."""
    program = """
    from ringreduce.vocabulary.errors import RingReduceError
    from ringreduce.testing import ring_of_threads
    try:
        ring_of_threads(2, lambda comm: comm.barrier(), transport="zmq")
        print("formed")
    except RingReduceError as error:
        print(type(error).__name__, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    assert done.stdout.startswith(expected), done.stderr
    if expected != "formed":
        assert "Raise the limit of open files (ulimit -n)" in done.stdout
