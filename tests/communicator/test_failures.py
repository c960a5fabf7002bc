"""Rings of real processes in which one fails: every other says so, soon, and names it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ringreduce.effects import native
from tests.rings import SOON_S, Ring, assert_lost
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
        (2, 1, "broadcast"),
        (3, 0, "barrier"),
        in_full(5, 2, "barrier"),
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


def test_where_there_are_several_hosts_that_of_the_rank_is_named(tmp_path: Path) -> None:
    program = WAITING.format(victim=2, operation="barrier")
    with Ring(tmp_path, 3, program, transport="auto", hosts=("one", "one", "two")) as ring:
        ring.wait("ready")
        ring.workers[2].signal(signal.SIGKILL)
        for fact in ring.wait("result", [0, 1]):
            assert fact["text"].count("Rank 2 is on two.") == 1, fact


# A large message goes around the ring, a small one is exchanged.
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


@pytest.mark.parametrize(("size", "count", "streams"), [(3, 4 << 20, 3), (4, 100, 1)])
def test_a_rank_killed_in_the_middle_of_its_data_is_named(
    tmp_path: Path, size: int, count: int, streams: int
) -> None:
    """Over sockets; of shared memory test_shm has the same."""
    program = ROUNDS_OF_SUMS.format(count=count)
    with Ring(tmp_path, size, program, streams=streams) as ring:
        ring.wait("round", times=2)
        ring.workers[1].signal(signal.SIGKILL)
        results = ring.wait("result", ring.others(1))
        assert [fact["kind"] for fact in results] == ["PeerLostError"] * (size - 1), results
        assert [fact["peer"] for fact in results] == [1] * (size - 1), results


ROUNDS_OF_ENCODED = """
from ringreduce.pure.encodings import Coding, encoding_of
ring = join()
data = np.zeros(4 << 20, np.float32)
kept = np.zeros((2, data.size), np.float32)
def call():
    ring.all_reduce(data, coding=Coding(encoding_of("int8"), kept))
    say("round")
attempt("result", lambda: until_error(call))
hold()
"""


@pytest.mark.parametrize("hosts", [(), in_full(("one", "one", "two", "two"))])
def test_a_rank_killed_among_encoded_data_is_named(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    size, transport = (4, "auto") if hosts else (3, "zmq")
    with Ring(tmp_path, size, ROUNDS_OF_ENCODED, transport=transport, hosts=hosts) as ring:
        ring.wait("round", times=2)
        ring.workers[1].signal(signal.SIGKILL)
        results = ring.wait("result", ring.others(1))
        assert [fact["kind"] for fact in results] == ["PeerLostError"] * (size - 1), results
        assert [fact["peer"] for fact in results] == [1] * (size - 1), results


def test_a_rank_that_dies_while_the_ring_forms_is_noticed(tmp_path: Path, transport: str) -> None:
    # It has met the others, but dies before it has sent them anything.
    program = """
    if RANK == 1:
        from ringreduce.transport.shm import ShmLink
        from ringreduce.transport.zeromq import ZmqLink
        ShmLink.run = ZmqLink.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
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
def test_a_rank_that_ends_with_an_exception_is_named_with_it(tmp_path: Path, ending: str) -> None:
    with Ring(tmp_path, 3, EARLY.format(ending=ending), transport="auto") as ring:
        results = ring.wait("result", [0, 2])
        assert_lost(results, 1)
        assert all("rank 1, which ended with ValueError: bad data" in f["text"] for f in results)
        assert ring.workers[1].wait() == 1


LEAVES_BLOCK = """
    with ring:
        sys.exit()
"""


CLOSED = ("MismatchError", "rank 1, which closed its communicator after 1 call ")
EXITED = ("PeerLostError", "rank 1, which ended with SystemExit")


@pytest.mark.parametrize(
    ("ending", "kind", "said"),
    [("sys.exit(0)", *CLOSED), ("ring.close(); hold()", *CLOSED), (LEAVES_BLOCK, *EXITED)],
)
def test_a_rank_that_makes_fewer_calls_is_named(
    tmp_path: Path, ending: str, kind: str, said: str
) -> None:
    with Ring(tmp_path, 3, EARLY.format(ending=ending)) as ring:
        for fact in ring.wait("result", [0, 2]):
            assert (fact["kind"], fact["peer"]) == (kind, 1), fact
            assert said in fact["text"]
            assert fact["seconds"] < SOON_S
        for fact in ring.wait("again", [0, 2]):
            assert fact["kind"] == kind
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


def test_a_stopped_rank_is_timed_out_and_learns_of_it(tmp_path: Path) -> None:
    """Over sockets; of shared memory test_half_open has the same."""
    program = ROUNDS_OF_SUMS.format(count=100_000)
    with Ring(tmp_path, 3, program, timeout_s=2.0) as ring:
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
        before = ring._session._recorder.current_call()

        def watch():
            while ring._session._recorder.current_call() == before:
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


@pytest.mark.skipif(native.library() is None, reason="a call runs in C only with the library")
def test_ctrl_c_when_c_gives_a_late_call_back_is_told(tmp_path: Path) -> None:
    program = """
    ring = join()
    ring.all_reduce(np.ones(3))  # From now on it runs in C.
    if RANK == 0:
        hold()
    else:
        calls = ring._session.calls
        run = calls._in_c

        def run_and_interrupt(*arguments):
            given = run(*arguments)
            say("given", is_late=given is False)
            signal.raise_signal(signal.SIGINT)

        calls._in_c = run_and_interrupt
    attempt("result", lambda: ring.all_reduce(np.ones(3)))
    attempt("again", ring.barrier)
    """
    with Ring(tmp_path, 2, program, transport="shm") as ring:
        assert ring.wait("given", [1])[0]["is_late"]
        assert ring.wait("result", [1])[0]["kind"] == "KeyboardInterrupt"
        assert_lost(ring.wait("again", [1]), 1)
        ring.release()
        # Rank 0 may have its result: what rank 1 gave was there.
        assert_lost(ring.wait("again", [0]), 1)
        assert "KeyboardInterrupt" in ring.said(0, "again")[0]["text"]
