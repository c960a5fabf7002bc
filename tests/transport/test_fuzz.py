"""Bytes that nobody should send: from strangers without the key, and from a rank that errs.

Rings are alive while it happens: a running one, one that still forms, and the compiled loop of a
real link. Nothing may crash, hang, take memory beyond its limits or change a result; a rank that
errs may end the job, with one named error on every rank.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from ringreduce._version import __version__
from ringreduce.bootstrap.admission import Members
from ringreduce.bootstrap.messages import read_hello
from ringreduce.communicator.communicator import Communicator
from ringreduce.pure import wire
from ringreduce.pure.membership import whole
from ringreduce.pure.notification import ABORT_BYTES_MAX, abort_error
from ringreduce.pure.patience import Patience
from ringreduce.pure.schedule import Schedule
from ringreduce.testing import ring_of_threads
from ringreduce.transport import loop, records
from ringreduce.transport.calls import RingCall
from ringreduce.transport.frames import INLINE_BYTES_MAX, SEALED_OVERHEAD_BYTES
from ringreduce.transport.listening import LOOPBACK
from ringreduce.transport.security import MATERIAL_BYTES, Security
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import RingReduceError
from tests.communicator.test_failures import ROUNDS, assert_unhurt
from tests.fuzzing import (
    STRANGERS,
    blast,
    frame,
    greeting,
    message,
    mutate_bytes,
    mutate_frame,
    ready,
)
from tests.processes import clean_environment, wait_until
from tests.rings import SOON_S, Ring
from tests.scope import in_full
from tests.sealing import Sealer

SECRET = secrets.token_hex(32)
# What a process may grow by while strangers are at it: buffers of TCP and of libzmq for those
# who are in the middle of a handshake, and Python's own ups and downs.
_GROWTH_BYTES = 96 << 20
# How often the tests of frames do what they do.
TIMES = (1, pytest.param(10, marks=pytest.mark.full))


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Another sequence each time; FUZZ_SEED repeats the one that a failed test has printed."""
    seed = int(os.environ.get("FUZZ_SEED", secrets.randbits(32)))
    print(f"FUZZ_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


@contextmanager
def bounded_memory(*pids: int) -> Iterator[None]:
    before = {pid: psutil.Process(pid).memory_info().rss for pid in pids}
    yield
    for pid in pids:
        grown = psutil.Process(pid).memory_info().rss - before[pid]
        assert grown < _GROWTH_BYTES, f"process {pid} grew by {grown >> 20} MiB"


def pids(ring: Ring) -> list[int]:
    return [worker.pid for worker in ring.workers]


# --- Strangers ------------------------------------------------------------------------------


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
        end_well(ring)


def end_well(ring: Ring) -> None:
    for worker in ring.workers:
        worker.stdin.write(b"\n")
        worker.stdin.flush()
    for fact in ring.wait("result"):
        assert fact["kind"] == "", fact
    for worker in ring.workers:
        assert worker.wait(10) == 0, worker.stderr


class TestRunningRing:
    def test_no_stranger_hurts_a_running_ring(self, open_ring: Ring) -> None:
        """Every named attempt, a few at a time; refusals take time."""
        port = open_ring.port(1)
        with bounded_memory(*pids(open_ring)), ThreadPoolExecutor(8) as pool:
            for attempt in [pool.submit(work, port) for work in STRANGERS.values()]:
                attempt.result(60)
        assert len(STRANGERS) >= 40
        assert_unhurt(open_ring)

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
        assert_unhurt(open_ring)


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_strangers_find_no_door_once_the_ring_stands(tmp_path: Path) -> None:
    """Ten thousand that knock cost neither a descriptor nor a thread nor an answer."""
    program = ROUNDS.replace("door.shut = lambda listener: False", "")
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
        assert_unhurt(ring)
        end_well(ring)


FORMING = """
from ringreduce.transport import door
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
    from ringreduce.pure.patience import Patience
    from ringreduce.transport.security import Security
    from ringreduce.transport.zeromq import ZmqLink
    from ringreduce.transport.listening import LOOPBACK
    settings = {"bind": LOOPBACK, "segment_bytes": 4096}
    link = ZmqLink(**settings, patience=Patience(5.0, 5.0), security=Security(size=2))
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


# --- A rank that errs: frames ---------------------------------------------------------------

ERRING = """
from ringreduce.pure import wire
from ringreduce.transport.zeromq import ZmqLink
from tests.transport.test_fuzz import ERRORS

def erring(name):
    def run(link, call, buffer, sequence):
        call.number(sequence)
        header, memory = np.array(call._record.outgoing), buffer.view(np.uint8)
        start, end = call._record.first_start, call._record.first_end
        header[5], header[6] = call.schedule.offset, end - start
        for parts in ERRORS[name](header, memory[start:end].tobytes()):
            link._connections.outgoing[0].socket.send_multipart(parts)
    return run

open_rings = []
for number, name in enumerate(NAMES):
    ring = join(number)
    open_rings.append(ring)
    if RANK == 1:
        ZmqLink.run = erring(name)
    x = np.ones(30_000)
    attempt(name, lambda: ring.all_reduce(x))
    attempt(name + " again", ring.barrier)
hold()
"""


def words(header: np.ndarray, **changes: int) -> bytes:
    """`header` with other fields, as bytes."""
    fields = {**vars(wire.decode(header)), **changes}
    return wire.encode(wire.Header(**fields)).tobytes()


def one(**changes: int) -> Any:
    return lambda header, data: [[words(header, **changes), data]]


def instead(*frames: Any) -> Any:
    """Frames that do not depend on the right one's data."""
    return lambda header, data: [make(header) for make in frames]


def control(kind: int, *payload: bytes) -> Any:
    return lambda header, data: [[words(header, kind=kind) + b"".join(payload)]]


_ABORT, _GOODBYE = int(wire.Kind.ABORT), int(wire.Kind.GOODBYE)

# What rank 1 of 3 sends to rank 2 instead of its first frame of an all_reduce.
ERRORS: dict[str, Any] = {
    "wrong rank": one(rank=0),
    "its receiver's rank": one(rank=2),
    "rank n": one(rank=3),
    "rank 2^31": one(rank=1 << 31),
    "rank -1": one(rank=0xFFFFFFFF),
    "future epoch": one(epoch=1),
    "last epoch of all": one(epoch=0xFFFF),
    "last group of all": one(group=0xFFFF),
    "old sequence": lambda h, d: [[words(h, sequence=int(h[3]) - 1), d]],
    "future sequence": lambda h, d: [[words(h, sequence=int(h[3]) + 1), d]],
    "last sequence of all": one(sequence=(1 << 64) - 1),
    "replayed frame": lambda h, d: [[h.tobytes(), d], [h.tobytes(), d]],
    "skipped step": one(step=1),
    "segment beyond the end": one(segment=0xFFFFFFFF),
    "operation that is none": one(kind=99),
    "dtype that is none": one(dtype=255),
    "dtype of another width": one(dtype=1),
    "operator that is none": one(op=255),
    "wrong count": one(count=29_999),
    "count 2^63": one(count=1 << 63),
    "length 0": one(nbytes=0),
    "length 2^63": one(nbytes=1 << 63),
    "length one more": lambda h, d: [[words(h, nbytes=len(d) + 1), d + b"x"]],
    "a byte short": lambda h, d: [[h.tobytes(), d[:-1]]],
    "a byte long": lambda h, d: [[h.tobytes(), d + b"x"]],
    "no payload": lambda h, d: [[h.tobytes()]],
    "empty payload": lambda h, d: [[h.tobytes(), b""]],
    "payload in the header's part": lambda h, d: [[h.tobytes() + d]],
    "three parts": lambda h, d: [[h.tobytes(), d, b"more"]],
    "a thousand parts": lambda h, d: [[h.tobytes(), *[b"x"] * 1000]],
    "parts the wrong way round": lambda h, d: [[d, h.tobytes()]],
    "other job": one(job=1),
    "other magic": one(magic=1),
    "other version": one(version=255),
    "other signature": one(signature=1),
    "short header": lambda h, d: [[h.tobytes()[:63], d]],
    "empty message": lambda h, d: [[b""]],
    "abort that says nothing": control(_ABORT),
    "abort of random bytes": control(_ABORT, random.Random(2).randbytes(1000)),
    "abort of great depth": control(_ABORT, b"\x91" * 16_000),
    "abort of great length": control(_ABORT, b"\xdb\xff\xff\xff\xff", bytes(1 << 19)),
    "abort without UTF-8": control(
        _ABORT, b"\x84\xa5error\xa1\xff\xa6origin\x00\xa4text\xa2\xff\xfe\xa4peer\xc0"
    ),
    "abort of an unknown error": control(
        _ABORT, msgspec.msgpack.encode({"error": "x", "origin": 2**40, "text": "?", "peer": -1})
    ),
    "goodbye with a payload": control(_GOODBYE, bytes(1000)),
    "control that is none": control(200),
}
# A few at a time in one ring of processes: each needs a ring of its own.
KINDS = ("ProtocolError", "MismatchError", "PeerLostError")
_BATCHES = [list(ERRORS)[start::4] for start in range(4)]


@pytest.mark.parametrize("names", _BATCHES, ids=[names[0] for names in _BATCHES])
def test_a_rank_that_errs_is_one_named_error_on_every_other(
    tmp_path: Path, names: list[str]
) -> None:
    program = f"NAMES = {names!r}\n{ERRING}"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with Ring(
        tmp_path, 3, program, rings=len(names), secret=SECRET, environment=environment
    ) as ring:
        ring.wait(f"{names[-1]} again", [0, 2])
        for name in names:
            for rank in (0, 2):
                [fact], [again] = ring.said(rank, name), ring.said(rank, f"{name} again")
                assert fact["kind"] in KINDS, (name, fact)
                assert "rank 1" in fact["text"] or "rank 2" in fact["text"], (name, fact)
                assert fact["seconds"] < SOON_S, (name, fact)
                # One error, kept.
                assert (again["kind"], again["text"]) == (fact["kind"], fact["text"]), (name, again)


def test_numbers_that_are_none_arrive_as_they_are() -> None:
    """NaN, infinities and denormals are data, not errors."""
    odd = np.array([np.nan, np.inf, -np.inf, 5e-324, -0.0] * 6000)

    def work(comm: Communicator) -> np.ndarray:
        array = odd.copy() if comm.rank else np.zeros_like(odd)
        return comm.all_reduce(array)

    for result in ring_of_threads(2, work, transport="zmq"):
        np.testing.assert_array_equal(result, odd + 0.0)


# --- A rank that errs: the compiled loop, frame after frame ---------------------------------

_FRAMES = 90_000
_GUARD = 4096


class Loop:
    """The loop of a real link, which waits for one frame of `nbytes` of an erring rank 1."""

    def __init__(self, nbytes: int, encryption: str) -> None:
        members = [
            Security(
                secret=SECRET, job_id="ours", rank=rank, size=2, is_encrypted=encryption == "on"
            )
            for rank in range(2)
        ]
        for member in members:
            member.learn([other.public for other in members], bytes(MATERIAL_BYTES), job=77)
        segment_bytes = max(64, nbytes)
        self.link = ZmqLink(
            bind=LOOPBACK,
            segment_bytes=segment_bytes,
            patience=Patience(10.0, 10.0),
            security=members[0],
        )
        # Nobody has to be there: nothing is sent, and the frames come from here.
        addresses = dict.fromkeys(range(2), self.link.address)
        self.link.connect(job=77, addresses=addresses, membership=whole(2))
        self.context = zmq.Context()
        self.peer = self.context.socket(zmq.PUSH)
        self.peer.setsockopt(zmq.SNDTIMEO, 10_000)
        members[1].data.join(self.peer, 0)
        is_sealed = encryption == "on"
        self.sealer = Sealer(members[1].frame_key(1, 0, 0)) if is_sealed else None
        self.peer.connect(self.link.address)
        self.receiver = self.link._connections.incoming[0].socket

        self.header = wire.encode(
            wire.Header(
                kind=wire.Kind.ALL_REDUCE, job=77, rank=1, sequence=3, dtype=1, count=nbytes // 4,
                nbytes=nbytes, signature=9,
            )
        )  # fmt: skip
        self.payload = bytes(range(256)) * (nbytes // 256)
        self.memory = np.full(nbytes + 2 * _GUARD, 0xA5, np.uint8)
        self.untouched = self.memory.tobytes()
        # One chunk, which is copied.
        ours = replace(wire.decode(self.header), rank=0)
        self.call = RingCall(ours, Schedule(-1, (0,), (0,)), (0, nbytes), size=2, itemsize=1)
        self.record = self.link._record
        self.arguments = (
            ctypes.addressof(self.record),
            self.call.address,
            self.memory.ctypes.data + _GUARD,
        )

    def right(self) -> list[bytes]:
        frame, start = self.header.tobytes() + self.payload, wire.HEADER_BYTES
        if self.sealer is not None:
            frame = self.sealer.seal(self.header.tobytes(), self.payload)
            start = SEALED_OVERHEAD_BYTES
        if len(self.payload) > INLINE_BYTES_MAX:
            return [frame[:start], frame[start:]]
        return [frame]

    def mutated(self, chance: random.Random) -> list[bytes]:
        """A wrong message; where frames are sealed, half of them are sealed rightly."""
        if self.sealer is None:
            return self._mutated(chance, len(self.payload) > INLINE_BYTES_MAX)
        if chance.random() < 0.5:
            sealed, changed = b"".join(self.right()), b""
            while changed in (b"", sealed):
                changed = mutate_bytes(chance, sealed)
            cut = chance.choice((0, SEALED_OVERHEAD_BYTES, chance.randrange(len(changed))))
            return [changed[:cut], changed[cut:]] if cut else [changed]
        [message, *rest] = self._mutated(chance, False)
        # What is sealed has a header.
        message = message.ljust(wire.HEADER_BYTES, b"?")
        header, payload = message[: wire.HEADER_BYTES], message[wire.HEADER_BYTES :]
        return [self.sealer.seal(header, payload), *rest]

    def _mutated(self, chance: random.Random, is_separate: bool) -> list[bytes]:
        right = [self.header.tobytes(), self.payload]
        if is_separate:
            parts = mutate_frame(chance, self.header, [self.payload])[1]
        else:
            right = [b"".join(right)]
            _, changed = mutate_frame(chance, self.header, [])
            # A header alone is changed as such, and what follows it stays.
            parts = [changed[0] + self.payload, *changed[1:]]
        return [b"?" * wire.HEADER_BYTES] if parts == right else parts

    def run(self) -> int:
        """The status of the loop for the next message, which it must have taken wholly."""
        self.record.step = self.record.segment = 0
        assert self.receiver.poll(10_000)
        status = int(loop.run(*self.arguments))
        # Nothing was due after a frame of another epoch.
        assert status != records.WAITING or self.record.received[2] & 0xFFFF != 0
        return status

    def close(self) -> None:
        self.peer.close(linger=0)
        self.context.term()
        self.link.close()


REFUSED = {
    records.FOREIGN,
    records.MISMATCH,
    records.MISSHAPEN,
    records.CONTROL,
    records.WAITING,
}


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(
    ("nbytes", "encryption", "share"),
    [
        (1024, "off", 60),
        in_full(65_536, "off", 20),
        in_full(1024, "on", 15),
        (65_536, "on", 5),
    ],
)
def test_the_loop_refuses_every_frame_but_the_right_one(
    chance: random.Random, nbytes: int, encryption: str, share: int, times: int
) -> None:
    tried = Loop(nbytes, encryption)
    statuses: set[int] = set()
    try:
        with bounded_memory(os.getpid()):
            frames = times * _FRAMES * share // 100
            while frames:
                # As many as fit into the queues, so that neither side waits for the other.
                batch = [tried.mutated(chance) for _ in range(min(frames, 4))]
                for parts in batch:
                    tried.peer.send_multipart(parts)
                for parts in batch:
                    status = tried.run()
                    statuses.add(status)
                    refused = REFUSED | ({records.CORRUPT} if tried.sealer is not None else set())
                    assert status in refused, (status, [part[:80] for part in parts])
                    if status == records.CORRUPT:
                        # libsodium has overwritten what did not open with zeros.
                        inside = tried.memory[_GUARD:-_GUARD]
                        assert not inside.any() or (inside == 0xA5).all()
                        inside[:] = 0xA5
                    assert tried.memory.tobytes() == tried.untouched, [p[:80] for p in parts]
                frames -= len(batch)
        # A kind that stands for control is drawn once in a thousand frames.
        assert statuses >= REFUSED - {records.CONTROL}
        assert (records.CORRUPT in statuses) is (tried.sealer is not None)
        tried.peer.send_multipart(tried.right())
        assert tried.run() == records.DONE
        assert tried.memory[_GUARD:-_GUARD].tobytes() == tried.payload
        assert (tried.memory[:_GUARD] == 0xA5).all()
        assert (tried.memory[-_GUARD:] == 0xA5).all()
    finally:
        tried.close()


@pytest.mark.parametrize("times", TIMES)
def test_an_abort_that_cannot_be_read_is_an_error_of_bounded_length(
    chance: random.Random, times: int
) -> None:
    right = msgspec.msgpack.encode(
        {"error": "PeerLostError", "origin": 1, "text": "rank 1 of 3 lost it", "peer": 2}
    )
    for _ in range(times * 10_000):
        error = abort_error(mutate_bytes(chance, right)[:ABORT_BYTES_MAX], rank=0, size=3)
        assert isinstance(error, RingReduceError)
        assert len(str(error)) < 2 * ABORT_BYTES_MAX


# --- A rank that errs: the rendezvous -------------------------------------------------------


def hello(**fields: Any) -> bytes:
    usual = {
        "type": "Hello",
        "version": __version__,
        "wire_version": wire.WIRE_VERSION,
        "job_id": "ours",
        "rank": 1,
        "size": 2,
        "members": [0, 1],
        "epoch": 0,
        "address": "tcp://127.0.0.1:9",
        "control": "tcp://127.0.0.1:1,2",
        "standby": "",
        "host": "elsewhere",
        "memory": "",
        "settings": {
            "segment_bytes": 1 << 20,
            "streams": 1,
            "transport": 2,
            "encryption": 0,
            "ring_order": 0,
        },
        "encryption": "none",
        "key": "",
    }  # fmt: skip
    return msgspec.msgpack.encode({**usual, **fields})


@contextmanager
def forming() -> Iterator[tuple[Config, zmq.Socket[bytes]]]:
    """Settings of two ranks, and a socket at their rendezvous that knows the secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = Config(
            size=2,
            rendezvous=f"127.0.0.1:{listener.getsockname()[1]}",
            rendezvous_fd=listener.detach(),
            job_id="ours",
            secret=SECRET,
            transport="zmq",
            timeout_s=10.0,
            join_timeout_s=10.0,
        )
    with zmq.Context() as context, context.socket(zmq.DEALER) as erring:
        erring.setsockopt(zmq.LINGER, 0)
        erring.setsockopt(zmq.RCVTIMEO, 10_000)
        erring.setsockopt(zmq.SNDHWM, 0)
        Security.of(config).join_meeting(erring)
        erring.connect(f"tcp://{config.rendezvous}")
        yield config, erring


def form_both(config: Config, first: threading.Thread, results: list[Any]) -> None:
    """Have the right rank 1 join, and see that the ring works."""
    fields = {**vars(config), "rank": 1, "rendezvous_fd": None}
    with Communicator(Config(**fields)) as comm:
        assert comm.all_reduce(np.ones(1))[0] == 2
    first.join(20)
    assert results == [2.0]


def join_first(config: Config) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def join() -> None:
        try:
            with Communicator(config) as comm:
                results.append(float(comm.all_reduce(np.ones(1))[0]))
        except RingReduceError as error:
            results.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    return thread, results


# What a rank with the key says instead of its Hello, and the job goes on without it.
HELLOS: dict[str, list[bytes]] = {
    "nothing": [b""],
    "no msgpack": [b"\xc1"],
    "random bytes": [random.Random(3).randbytes(1000)],
    "another type": [msgspec.msgpack.encode({"type": "Table"})],
    "few fields": [msgspec.msgpack.encode({"type": "Hello"})],
    "great depth": [b"\x91" * 100_000],
    "great depth inside": [b"\x82\xa4type\xa5Hello\xa5extra" + b"\x91" * 100_000 + b"\xc0"],
    "a map of 2^32": [b"\xdf\xff\xff\xff\xff" + bytes(1000)],
    "a text of 2^32": [b"\xdb\xff\xff\xff\xff" + bytes(1000)],
    "a long list": [msgspec.msgpack.encode([1] * 100_000)],
    "a host of 1 MB": [hello(host="x" * 1_000_000, job_id="theirs")],
    "no UTF-8": [hello().replace(b"elsewhere", b"\xff\xfe\xfd\xfc\xff\xfe\xfd\xfc\xff")],
    "control characters": [hello(host="\x1b[2J\r\n" * 100, job_id="theirs")],
    "rank -1": [hello(rank=-1)],
    "rank n": [hello(rank=2)],
    "rank 2^31": [hello(rank=1 << 31)],
    "rank 2^63": [hello(rank=1 << 63)],
    "rank 0": [hello(rank=0)],
    "rank as text": [hello(rank="1")],
    "rank 1.5": [hello(rank=1.5)],
    "no key at all": [hello(key=None)],
    "settings as text": [hello(settings="all")],
    "an address as network": [hello(networks=["10.0.0.4/24", "localhost/8"])],
    "a prefix of 33": [hello(networks=["10.0.0.4/33"])],
    "networks of 1 MB": [hello(networks=["1" * 100_000] * 9)],
    "ten thousand networks": [hello(networks=["10.0.0.4/24"] * 10_000)],
    "another job": [hello(job_id="theirs")],
    "a job of 1 MB": [hello(job_id="x" * 1_000_000)],
    "many parts": [b"a", b"", b"c"],
    "a thousand parts": [b"x"] * 1000,
}


def test_no_hello_that_is_wrong_hurts_a_ring_that_forms() -> None:
    with forming() as (config, erring), bounded_memory(os.getpid()):
        first, results = join_first(config)
        for name, parts in HELLOS.items():
            erring.send_multipart(parts)
            # The answer to what comes after it shows that it was read.
            erring.send(hello(job_id=f"after {name}"))
            while (told := msgspec.msgpack.decode(erring.recv()))["type"] == "Refusal":
                assert len(told["text"]) < 2000
                assert told["text"].isprintable()
                if "another job" in told["text"]:
                    break
        while erring.poll(0):
            erring.recv()
        form_both(config, first, results)


def test_a_flood_of_hellos_is_answered_for_a_while_only() -> None:
    with forming() as (config, erring), bounded_memory(os.getpid()):
        first, results = join_first(config)
        for _ in range(5000):
            erring.send(hello(job_id="theirs"))
        form_both(config, first, results)
        answers = 0
        while erring.poll(100):
            erring.recv()
            answers += 1
        assert answers <= 260


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"size": 3}, "has size 3, rank 0 has 2"),
        ({"size": 1 << 40}, "has size 1099511627776, rank 0 has 2"),
        ({"version": "9" * 100_000}, "has ringreduce 999"),
        ({"wire_version": 255}, "has wire version 255"),
        ({"settings": {str(i): i for i in range(10_000)}}, "has settings {'0': 0"),
        ({"key": "~" * 40}, "keys that are not one for each rank"),
        ({"key": ""}, "keys that are not one for each rank"),
    ],
)
def test_a_rightful_rank_with_another_opinion_ends_it_by_name(
    fields: dict[str, Any], text: str
) -> None:
    with forming() as (config, erring):
        first, results = join_first(config)
        erring.send(hello(**fields))
        first.join(20)
        [error] = results
        assert isinstance(error, RingReduceError)
        assert text in str(error)
        assert len(str(error)) < 2000


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "ipc:///tmp/x",
        "tcp://127.0.0.1:1,2,3",
        "\0" * 99,
        "x" * 10_000,
        "tcp://no-such-host.invalid:1",
        "tcp://127.0.0.1:99999",
    ],
)
def test_a_rank_with_an_impossible_address_is_a_named_error(address: str) -> None:
    with forming() as (config, erring):
        first, results = join_first(config)
        key = zmq.curve_keypair()[0].decode()
        erring.send(hello(address=address, key=key))
        first.join(20)
        [error] = results
        assert isinstance(error, RingReduceError)
        assert "rank 1" in str(error)
        assert len(str(error)) < 2000


def test_mutated_hellos_admit_nobody_who_has_no_place(chance: random.Random) -> None:
    own = read_hello(hello(rank=0))
    assert own is not None
    config = Config(size=2, rendezvous="127.0.0.1:1", job_id="ours")
    longest = 0
    for _ in range(20_000):
        said = read_hello(mutate_bytes(chance, hello(rank=chance.choice((0, 1, 2)))))
        if said is None:
            continue
        members = Members(config, own)
        try:
            refusal = members.admit(b"x", said)
        except RingReduceError as error:
            longest = max(longest, len(str(error)))
            continue
        assert members.complete == (refusal is None)
        assert members.identities == ({b"x": 1} if refusal is None else {})
        if refusal is None:
            assert said.rank == 1
            assert (said.job_id, said.size, said.settings) == ("ours", 2, own.settings)
    assert longest < 2000


# --- Limits ---------------------------------------------------------------------------------


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
