"""Rings of real processes in which one fails: every other says so, soon, and names it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zmq

from ringreduce.effects import native
from ringreduce.pure import wire
from tests.processes import wait_until
from tests.rings import MISMATCH_S, SOON_S, Ring, assert_lost
from tests.scope import in_full


@pytest.fixture(params=["zmq", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each way that ranks of one host can reach each other."""
    if request.param == "shm" and native.library() is None:
        pytest.skip(native.why_missing())
    return str(request.param)


# --- A rank dies ----------------------------------------------------------------------------

WAITING = """
victim, operation = {victim}, "{operation}"
ring = join()
call = {{
    "all_reduce": lambda: ring.all_reduce(np.ones(1000)),
    "barrier": ring.barrier,
    "broadcast": lambda: ring.broadcast(np.ones(1000), root=victim),
    "all_to_all": lambda: ring.all_to_all(np.ones((SIZE, 100_003))),
}}[operation]
say("ready")
if RANK == victim:
    signal.pause()
attempt("result", call)
attempt("again", ring.barrier)
hold()
"""


@pytest.mark.parametrize(
    ("size", "victim", "operation"),
    [
        (2, 0, "all_reduce"),
        (2, 1, "broadcast"),
        (3, 0, "barrier"),
        (3, 1, "all_reduce"),
        (4, 3, "all_reduce"),
        (5, 2, "barrier"),
        (5, 4, "broadcast"),
        in_full(3, 1, "all_to_all"),
    ],
)
def test_a_killed_rank_is_named_by_all_that_wait_for_it(
    tmp_path: Path, transport: str, size: int, victim: int, operation: str
) -> None:
    program = WAITING.format(victim=victim, operation=operation)
    with Ring(tmp_path, size, program, transport=transport) as ring:
        ring.wait("ready")
        ring.workers[victim].signal(signal.SIGKILL)
        survivors = ring.others(victim)
        results = ring.wait("result", survivors)
        # The wait for the last rank to be ready counts too; it is no part of the finding.
        assert_lost([{**fact, "seconds": 0.0} for fact in results], victim)
        for fact in ring.wait("again", survivors):
            assert fact["kind"] == "PeerLostError"
            assert fact["seconds"] < 0.5


# Elements of 8 bytes: a large message around the ring, and a small one that is exchanged.
LARGE, SMALL = 4 << 20, 100

ROUNDS_OF_SUMS = """
ring = join()
data = np.zeros({count})
def call():
    ring.all_reduce(data)
    say("round")
attempt("result", lambda: until_error(call))
attempt("again", ring.barrier)
hold()
"""


@pytest.mark.parametrize(
    ("size", "count", "streams"), [(3, LARGE, 1), (3, LARGE, 3), (4, SMALL, 1), (5, SMALL, 2)]
)
def test_a_rank_killed_in_the_middle_of_its_data_is_named(
    tmp_path: Path, size: int, count: int, streams: int, transport: str
) -> None:
    program = ROUNDS_OF_SUMS.format(count=count)
    with Ring(tmp_path, size, program, streams=streams, transport=transport) as ring:
        ring.wait("round", times=2)
        ring.workers[1].signal(signal.SIGKILL)
        results = ring.wait("result", ring.others(1))
        assert [fact["kind"] for fact in results] == ["PeerLostError"] * (size - 1), results
        assert [fact["peer"] for fact in results] == [1] * (size - 1), results


def test_a_rank_that_dies_while_the_ring_forms_is_noticed(tmp_path: Path, transport: str) -> None:
    # It has met the others, but dies before it has sent them anything.
    program = """
    if RANK == 1:
        from ringreduce.transport.shm import HostLink
        from ringreduce.transport.zeromq import ZmqLink
        HostLink.run = ZmqLink.exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    attempt("result", join)
    hold()
    """
    with Ring(tmp_path, 3, program, transport=transport, timeout_s=8.0) as ring:
        results = ring.wait("result", [0, 2])
        assert [fact["kind"] for fact in results] == ["PeerLostError"] * 2, results


EARLY = """
ring = join()
if RANK == 1:
    {ending}
attempt("result", ring.barrier)
attempt("again", ring.barrier)
hold()
"""


# At the end of the program, and of a block that sees to it that the ring is left.
FINALLY = """
    try:
        raise ValueError("bad data")
    finally:
        ring.close()
"""


@pytest.mark.parametrize("ending", ["raise ValueError('bad data')", FINALLY])
def test_a_rank_that_ends_with_an_exception_is_named_with_it(
    tmp_path: Path, transport: str, ending: str
) -> None:
    program = EARLY.format(ending=ending)
    with Ring(tmp_path, 3, program, transport=transport) as ring:
        results = ring.wait("result", [0, 2])
        assert_lost(results, 1)
        assert all("rank 1, which ended with ValueError: bad data" in f["text"] for f in results)
        assert ring.workers[1].wait() == 1


LEAVES_BLOCK = """
    with ring:
        sys.exit()
"""


@pytest.mark.parametrize("ending", ["sys.exit(0)", "ring.close(); hold()", LEAVES_BLOCK])
def test_a_rank_that_makes_fewer_calls_is_named(
    tmp_path: Path, transport: str, ending: str
) -> None:
    with Ring(tmp_path, 3, EARLY.format(ending=ending), transport=transport) as ring:
        for fact in ring.wait("result", [0, 2]):
            assert (fact["kind"], fact["peer"]) == ("MismatchError", 1), fact
            assert "rank 1, which closed its communicator after 1 call " in fact["text"]
            assert fact["seconds"] < SOON_S
        for fact in ring.wait("again", [0, 2]):
            assert fact["kind"] == "MismatchError"
            assert fact["seconds"] < 0.5
        ring.release()


# --- A rank has children --------------------------------------------------------------------


def test_a_killed_rank_is_noticed_though_a_forked_child_of_it_lives(
    tmp_path: Path, transport: str
) -> None:
    program = """
    import gc
    ring = join()
    if RANK == 1:
        child = os.fork()
        if child == 0:
            gc.collect()
            attempt("in the child", ring.barrier)
            ring.close()
            signal.pause()
        while os.stat(1).st_size == 0:  # until the child has spoken
            os.sched_yield()
    for _ in range(3):  # The child has not disturbed anything.
        assert ring.all_reduce(np.ones(50_000))[0] == SIZE
    say("ready", child=child if RANK == 1 else 0)
    if RANK == 1:
        signal.pause()
    attempt("result", ring.barrier)
    hold()
    """
    with Ring(tmp_path, 3, program, transport=transport) as ring:
        child = ring.wait("ready")[1]["child"]
        try:
            assert ring.said(1, "in the child")[0]["kind"] == "ClosedError"
            ring.workers[1].signal(signal.SIGKILL)
            results = ring.wait("result", [0, 2])
            assert_lost([{**fact, "seconds": 0.0} for fact in results], 1)
            os.kill(child, 0)  # It lives, or this test shows nothing.
        finally:
            os.kill(child, signal.SIGKILL)


def test_programs_that_a_rank_starts_inherit_nothing_of_ours(
    tmp_path: Path, transport: str
) -> None:
    program = """
    import subprocess
    LIST = (
        "import os; paths = ['/proc/self/fd/' + name for name in os.listdir('/proc/self/fd')]; "
        "print(*(os.readlink(path) for path in paths if os.path.islink(path)), sep=chr(10))"
    )
    def opened():
        listed = subprocess.run(
            [sys.executable, "-c", LIST],
            stdout=subprocess.PIPE, close_fds=False, check=True, text=True,
        )
        return [line for line in listed.stdout.splitlines() if not line.startswith("pipe:")]
    ring = join()
    ring.all_reduce(np.ones(50_000))
    say("opened", files=opened())
    hold()
    """
    with Ring(tmp_path, 2, program, transport=transport) as ring:
        for fact in ring.wait("opened"):
            kinds = ("socket:", "anon_inode:", "/memfd:")
            assert not [name for name in fact["files"] if name.startswith(kinds)], fact
        ring.release()


# --- A rank is silent -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [100_000, in_full(SMALL)])
def test_a_stopped_rank_is_timed_out_and_learns_of_it(
    tmp_path: Path, count: int, transport: str
) -> None:
    program = ROUNDS_OF_SUMS.format(count=count)
    with Ring(tmp_path, 3, program, timeout_s=2.0, transport=transport) as ring:
        ring.wait("round", times=3)
        ring.workers[1].signal(signal.SIGSTOP)
        results = ring.wait("result", [0, 2])
        assert [fact["kind"] for fact in results] == ["PeerTimeoutError"] * 2, results
        # The rank behind it has waited for it, and says what to do.
        assert results[1]["peer"] == 1
        assert re.search(r"waited 2\.\d s for", results[1]["text"])
        assert "rank 1" in results[1]["text"]
        assert "RINGREDUCE_TIMEOUT_S" in results[1]["text"]
        for fact in ring.wait("again", [0, 2]):
            assert fact["kind"] == "PeerTimeoutError"
            assert fact["seconds"] < 0.5
        ring.workers[1].signal(signal.SIGCONT)
        [late] = ring.wait("result", [1])
        assert late["kind"] in ("PeerTimeoutError", "PeerLostError")
        ring.release()


def test_a_rank_that_never_calls_is_timed_out(tmp_path: Path, transport: str) -> None:
    program = """
    ring = join()
    say("ready")
    if RANK == 0:
        hold()
    attempt("result", ring.barrier)
    hold()
    """
    limits = {"timeout_s": 0.5, "busy_timeout_s": 1.0}
    with Ring(tmp_path, 2, program, transport=transport, **limits) as ring:
        [fact] = ring.wait("result", [1])
        assert fact["kind"] == "PeerTimeoutError"
        assert fact["peer"] == 0
        assert "in barrier #1" in fact["text"]
        assert 1.0 <= fact["seconds"] < 3.0


# --- A rank is interrupted ------------------------------------------------------------------


def test_ctrl_c_in_a_waiting_rank_is_prompt_and_told(tmp_path: Path, transport: str) -> None:
    program = """
    ring = join()
    ring.all_reduce(np.ones(100_000))  # From now on it runs in C.
    say("ready")
    if RANK == 0:
        # It comes late, and learns what has happened.
        go = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: go.set())
        go.wait()
    if RANK == 1:
        before = ring._session._recorder.standing()

        def watch():
            while ring._session._recorder.standing() == before:
                os.sched_yield()
            say("waits")

        threading.Thread(target=watch, daemon=True).start()
    attempt("result", lambda: ring.all_reduce(np.ones(100_000)))
    attempt("again", ring.barrier)
    hold()
    """
    with Ring(tmp_path, 3, program, transport=transport) as ring:
        ring.wait("ready")
        # Rank 0 does not take part yet, so rank 1 cannot have finished.
        ring.wait("waits", [1])
        ring.workers[1].signal(signal.SIGINT)
        [interrupted] = ring.wait("result", [1])
        assert interrupted["kind"] == "KeyboardInterrupt"
        assert_lost(ring.wait("again", [1]), 1)
        assert_lost(ring.wait("result", [2]), 1)
        ring.workers[0].signal(signal.SIGUSR1)
        assert_lost(ring.wait("result", [0]), 1)
        assert "KeyboardInterrupt" in ring.said(0, "result")[0]["text"]
        ring.release()


# --- The ranks disagree ---------------------------------------------------------------------

# What rank 1 does, what the others do, and a word of each that the errors must hold.
DISAGREEMENTS = {
    "operator": ("ring.all_reduce(x, 'max')", "ring.all_reduce(x, 'sum')", ", max", ", sum"),
    "mean": ("ring.all_reduce(x, 'mean')", "ring.all_reduce(x)", ", mean", ", sum"),
    "half": (
        "ring.all_reduce(x.astype('float16'))",
        "ring.all_reduce(x.astype('float32'))",
        "100 float16",
        "100 float32",
    ),
    "dtype": (
        "ring.all_reduce(x.astype('float32'))",
        "ring.all_reduce(x)",
        "100 float32",
        "100 float64",
    ),
    "length": ("ring.all_reduce(x[:99])", "ring.all_reduce(x)", "of 99 ", "of 100 "),
    "kind": ("ring.barrier()", "ring.all_reduce(x)", "barrier #1", "all_reduce #1"),
    "order": (
        "[ring.broadcast(x), ring.all_reduce(x)]",
        "[ring.all_reduce(x), ring.broadcast(x)]",
        "broadcast #1",
        "all_reduce #1",
    ),
    "signature": (
        "ring.all_reduce(x, signature=1)",
        "ring.all_reduce(x, signature=2)",
        "other gradients, shapes or root",
        "all_reduce #1",
    ),
    "large": (
        "ring.all_reduce(large[:-1])",
        "ring.all_reduce(large)",
        "of 299999 ",
        "of 300000 ",
    ),
    "small after large": (
        "[ring.all_reduce(np.ones(2_000_000)), ring.all_reduce(x[:2])]",
        "[ring.all_reduce(np.ones(2_000_000)), ring.all_reduce(x[:3])]",
        "of 2 ",
        "of 3 ",
    ),
    "root": (
        "ring.broadcast(x, root=3 - RANK)",
        "ring.broadcast(x, root=0)",
        "root",
        "broadcast #1",
    ),
    # Roots wait for nobody: of two that both are, each learns of it from its next call.
    "two roots": (
        "ring.broadcast(x, root=2)",
        "ring.broadcast(x, root=0)",
        "broadcast #1",
        "broadcast #1",
    ),
    "object": ("ring.broadcast_object(1)", "ring.barrier()", "broadcast_object #1", "barrier #1"),
    "gather": (
        "ring.all_gather(np.ones((2, 3)))",
        "ring.all_gather(np.ones((2, 4)))",
        "other gradients, shapes or root",
        "all_gather #1",
    ),
    "scatter": (
        "ring.reduce_scatter(x)",
        "ring.all_reduce(x)",
        "reduce_scatter #1",
        "all_reduce #1",
    ),
}
# How ranks reach each other, what hosts they are on, and which of them does another thing.
DISAGREEING = {
    "zmq": ("zmq", (), 1),
    "shm": ("shm", (), 1),
    "two hosts, within one": ("auto", ("a", "a", "b"), 1),
    "two hosts, between them": ("auto", ("a", "a", "b"), 2),
}


@pytest.fixture(scope="module", params=list(DISAGREEING))
def disagreements(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    """What each of three ranks raised, for each kind of disagreement; one ring for each."""
    calls = {name: case[:2] for name, case in DISAGREEMENTS.items()}
    transport, hosts, victim = DISAGREEING[request.param]
    program = f"""
    open_rings = []
    x, large = np.ones(100), np.ones(300_000)
    for number, (name, calls) in enumerate({calls!r}.items()):
        ring = join(number)
        open_rings.append(ring)
        call = calls[0] if RANK == {victim} else calls[1]
        # A rank that is not concerned yet learns of it from its next call.
        attempt(name, lambda: until_error(lambda: (eval(call), ring.barrier())))
        attempt(name + " again", ring.barrier)
    hold()
    for ring in open_rings:
        ring.close()
    """
    if transport != "zmq" and native.library() is None:
        pytest.skip(native.why_missing())
    directory = tmp_path_factory.mktemp("disagreements")
    rings = len(DISAGREEMENTS)
    with Ring(directory, 3, program, rings=rings, transport=transport, hosts=hosts) as ring:
        ring.wait(f"{list(DISAGREEMENTS)[-1]} again")
        found = {name: ring.wait(name) for name in DISAGREEMENTS}
        found |= {f"{name} again": ring.wait(f"{name} again") for name in DISAGREEMENTS}
        ring.release()
    return found


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_get_a_mismatch(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    facts = disagreements[name]
    assert [fact["kind"] for fact in facts] == ["MismatchError"] * 3, facts
    assert all(fact["seconds"] < MISMATCH_S for fact in facts), facts


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_mismatch_says_what_both_sides_do(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    *_, theirs, ours = DISAGREEMENTS[name]
    for fact in disagreements[name]:
        # Its number is that within the host, where there are several.
        text = re.sub(r"#\d+", "#1", fact["text"])
        assert theirs in text
        assert ours in text


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_after_a_mismatch_every_call_raises_it_at_once(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    for fact in disagreements[f"{name} again"]:
        assert fact["kind"] == "MismatchError"
        assert fact["seconds"] < 0.5


def test_a_rank_that_comes_late_is_told_the_cause_though_all_have_left(tmp_path: Path) -> None:
    # The abort lies in its queue when it finds that it can no longer send.
    program = """
    ring = join()
    say("ready")
    if RANK == 0:
        hold()
    attempt("result", ring.barrier if RANK == 1 else lambda: ring.all_reduce(np.ones(10)))
    ring.close()
    """
    with Ring(tmp_path, 3, program) as ring:
        ring.wait("ready")
        for rank in (2, 1):
            assert ring.workers[rank].wait() == 0
        ring.workers[0].stdin.close()
        assert ring.workers[0].wait() == 0
        [late] = ring.said(0, "result")
        assert late["kind"] == "MismatchError", late
        assert "was told by rank 2" in late["text"]


@pytest.mark.parametrize("name", ["order", "small after large"])
def test_a_mismatch_says_where_in_the_call_it_was(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    facts = disagreements[name]
    # Small arrays have no segments in shared memory, and large ones before them had many.
    places = "hop 1|exchange step 1 of [12]|(segment 1 of 1|meeting) in shared memory"
    assert any(re.search(rf", in \w+ #\d, ({places})\.", f["text"]) for f in facts), facts


# --- Strangers ------------------------------------------------------------------------------

# Rounds of a sum until the test lets rank 0 stop them; every result is checked.
# Its ports stay open, as they do where the kernel cannot shut them, and there is no secret.
ROUNDS = """
from queue import Queue
from ringreduce.transport import door
door.shut = lambda listener: False
over = Queue()
def watch():
    for line in sys.stdin:
        over.put(line)
threading.Thread(target=watch, daemon=True).start()
def rounds(ring):
    number = 0
    while True:
        data = np.full(50_000, ring.rank + 1.0)
        ring.all_reduce(data)
        assert (data == sum(range(1, SIZE + 1))).all()
        last = ring.all_reduce(np.array([int(not over.empty())]), "max")
        number += 1
        if number % 20 == 0:
            say("rounds", ring=rings)
        if last[0]:
            return
for rings in range(len(CONFIGS)):
    ring = join(rings)
    say("ready", address=ring._session.collectives._link.address)
    attempt("result", lambda: rounds(ring))
    attempt("again", ring.barrier)
    ring.close()
"""


@pytest.fixture(scope="module")
def strangers_allowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """A ring that runs on while strangers try things on it; it must end well."""
    with Ring(tmp_path_factory.mktemp("strangers"), 2, ROUNDS) as ring:
        ring.wait("rounds")
        yield ring
        for worker in ring.workers:
            worker.stdin.write(b"\n")
            worker.stdin.flush()
        for fact in ring.wait("result"):
            assert fact["kind"] == "", fact
        for worker in ring.workers:
            assert worker.wait(10) == 0, worker.stderr


def assert_unhurt(ring: Ring) -> None:
    """The ring has completed further rounds since the call, and raised nothing."""
    before = max(len(ring.said(rank, "rounds")) for rank in range(ring.size))
    wait_until(
        lambda: (
            all(len(ring.said(rank, "rounds")) >= before + 2 for rank in range(ring.size))
            or any(ring.said(rank, "result") for rank in range(ring.size))
        ),
        "further rounds",
    )
    assert not [ring.said(rank, "result") for rank in range(ring.size) if ring.said(rank, "result")]


def connection(ring: Ring, rank: int = 1) -> socket.socket:
    return socket.create_connection(("127.0.0.1", ring.port(rank)), timeout=10)


def test_strangers_that_only_connect_do_no_harm(strangers_allowed: Ring) -> None:
    for _ in range(20):
        connection(strangers_allowed).close()
    assert_unhurt(strangers_allowed)


def test_a_stranger_that_stays_and_says_nothing_does_no_harm(strangers_allowed: Ring) -> None:
    with connection(strangers_allowed):
        assert_unhurt(strangers_allowed)


@pytest.mark.parametrize(
    "data",
    [
        bytes(range(256)) * 64,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        # The greeting of ZMTP 3.1 with the mechanism NULL, and then no such thing.
        b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + b"\xff" * 500,
    ],
    ids=["bytes", "http", "broken ZMTP"],
)
def test_a_stranger_that_does_not_speak_zmtp_does_no_harm(
    strangers_allowed: Ring, data: bytes
) -> None:
    with connection(strangers_allowed) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
            # Until the other side has had enough of it.
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        assert_unhurt(strangers_allowed)


@contextlib.contextmanager
def zmq_stranger(ring: Ring, kind: int, rank: int = 1) -> Iterator[zmq.Socket[bytes]]:
    """A real ZeroMQ socket that has connected to a rank's data port."""
    with zmq.Context() as context, context.socket(kind) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.SNDTIMEO, 5000)
        stranger.connect(f"tcp://127.0.0.1:{ring.port(rank)}")
        yield stranger


def test_a_socket_of_another_kind_does_no_harm(strangers_allowed: Ring) -> None:
    with zmq_stranger(strangers_allowed, zmq.SUB):
        assert_unhurt(strangers_allowed)


def test_an_oversized_frame_is_not_even_read(strangers_allowed: Ring) -> None:
    with zmq_stranger(strangers_allowed, zmq.PUSH) as stranger:
        with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            stranger.send(bytes(64 << 20))
            closed = monitor.poll(10_000)
            stranger.disable_monitor()
        assert closed
    assert_unhurt(strangers_allowed)


def foreign_header(**fields: int) -> bytes:
    header = wire.Header(kind=wire.Kind.ALL_REDUCE, job=12345, rank=0, sequence=1)
    return wire.encode(wire.Header(**{**asdict(header), **fields})).tobytes()


# What a stranger sends in one message, and what the ranks then say of it.
FOREIGN = {
    "short": ([b"short"], "bytes that are no frame"),
    "empty": ([b""], "bytes that are no frame"),
    "random": ([os.urandom(64)], "bytes that are no frame"),
    "other job": ([foreign_header()], "a frame of another job"),
    "three parts": ([foreign_header(), bytes(100_000), b"more"], "a frame of another job"),
    "abort": ([foreign_header(kind=wire.Kind.ABORT) + b"junk"], "a frame of another job"),
    "version": ([foreign_header(version=9)], f"a frame of wire version 9, not {wire.WIRE_VERSION}"),
}


@pytest.fixture(scope="module")
def foreign_frames(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[int, list[Any], list[Any]]]:
    """The port, what both ranks raised and what they raised again; a ring for each message."""
    found = {}
    with Ring(tmp_path_factory.mktemp("foreign"), 2, ROUNDS, rings=len(FOREIGN)) as ring:
        for number, (name, (frames, _)) in enumerate(FOREIGN.items()):
            wait_until(
                lambda number=number: all(
                    any(fact["ring"] == number for fact in ring.said(rank, "rounds"))
                    for rank in (0, 1)
                ),
                f"rounds of ring {number}",
            )
            port = ring.port(1)
            with zmq_stranger(ring, zmq.PUSH) as stranger:
                stranger.send_multipart(frames)
                results = ring.wait("result", times=number + 1)
            found[name] = port, results, ring.wait("again", times=number + 1)
        ring.release()
    return found


@pytest.mark.parametrize("name", FOREIGN)
def test_frames_of_a_stranger_are_a_protocol_error_on_every_rank(
    name: str, foreign_frames: dict[str, tuple[int, list[Any], list[Any]]]
) -> None:
    port, results, again = foreign_frames[name]
    for fact in [*results, *again]:
        assert fact["kind"] == "ProtocolError", fact
        assert f"received {FOREIGN[name][1]} on tcp://127.0.0.1:{port}" in fact["text"]
    assert all(fact["seconds"] < 0.5 for fact in again), again
