"""Rings of real processes in which one fails: every other says so, soon, and names it."""

import math
import os
import signal
import time

import pytest

from ringreduce.effects import native
from tests.rings import Ring, assert_lost
from tests.scope import in_full

BOTH = pytest.mark.parametrize("transport", ["zmq", "shm"])

# --- A rank dies ----------------------------------------------------------------------------

# Its `calls` are what each rank raises about the victim, one after the other.
WAITING = """
VICTIM, calls = {victim}, None
ring = join()
{before}
say("ready")
if RANK == VICTIM:
    signal.pause()
for number, call in enumerate(calls or [lambda: {call}, ring.barrier]):
    attempt(f"result {{number}}", call)
hold()
"""
WORK = """
work = [ring.all_reduce(np.ones(1000), async_op=True) for _ in range(3) if RANK != VICTIM]
calls = RANK != VICTIM and [*(each.wait for each in work),
                            lambda: ring.all_reduce(np.ones(3), async_op=True).wait()]
"""
IN_C = """
def bucket():
    ring._session.engine.submit(lambda: ring.all_reduce(data, "mean", signature=5)).wait()
data, calls = np.ones(1000), [bucket, bucket]
for _ in range(20):
    bucket()
assert ring._session.collectives.small.nbytes > 0
"""
# Rank 0 sends the victim a large message, rank 2 receives what never came nor connected.
MESSAGES = """
if RANK < 2:
    small = np.zeros(10)
    ring.recv(small, 0) if RANK else ring.send(small, 1)
calls = [lambda: ring.recv(np.zeros(10), 1) if RANK else ring.send(np.zeros(1 << 24), 1),
         ring.barrier]
"""
WAITS: dict[str, tuple[int, int, str, str]] = {
    "broadcast": (2, 1, "", "ring.broadcast(np.ones(1000), root=VICTIM)"),
    "barrier": (3, 0, "", "ring.barrier()"),
    "work in the background": (3, 1, WORK, ""),
    "a bucket that runs in C": (3, 1, IN_C, ""),
    "messages": (3, 1, MESSAGES, ""),
}


@BOTH
@pytest.mark.parametrize("name", WAITS)
def test_a_killed_rank_is_named_by_all_that_wait_for_it(tmp_path, transport, name):
    if name == "a bucket that runs in C" and (transport == "zmq" or native.library() is None):
        pytest.skip("over sockets nothing runs in C")
    size, victim, before, call = WAITS[name]
    program = WAITING.format(victim=victim, before=before, call=call or None)
    with Ring(tmp_path, size, program, transport=transport) as ring:
        ring.wait("ready")
        killed_s = time.monotonic()
        ring.kill(victim)
        facts = ring.wait("result 0", ring.others(victim))
        # The wait for the last rank to be ready is no part of the finding.
        assert_lost(facts, victim, since_s=killed_s)
        last = 3 if before == WORK else 1
        for number in range(1, last + 1):
            again = ring.wait(f"result {number}", ring.others(victim))
            assert_lost(again, victim, within_s=0.5)


def test_where_there_are_several_hosts_that_of_the_rank_is_named(tmp_path):
    program = WAITING.format(victim=2, before="", call="ring.barrier()")
    with Ring(tmp_path, 3, program, transport="auto", hosts=("one", "one", "two")) as ring:
        ring.wait("ready")
        ring.kill(2)
        for fact in ring.wait("result 0", [0, 1]):
            assert fact["text"].count("Rank 2 is on two.") == 1, fact


ROUNDS = """
from ringreduce.pure.encodings import Coding, encoding_of
ring = join()
data = ring.empty({count}, np.{dtype}) if {registered} else np.empty({count}, np.{dtype})
data[:] = 0
kept = np.zeros((2, data.size), np.float32)
def call():
    {call}
    say("round")
attempt("result", lambda: until_error(call))
attempt("again", ring.barrier)
hold()
"""
CODED = "ring.all_reduce(data, coding=Coding(encoding_of('int8'), kept))"
TWO_LANES = {"transport": "auto", "hosts": "ababa"}  # Rank 4 has none.


@pytest.mark.parametrize(
    ("size", "victim", "fields", "settings"),
    [
        # A large message goes around the ring, a small one is exchanged.
        (3, 1, {"count": 4 << 20}, {"streams": 3}),
        (4, 1, {"count": 100}, {}),
        (3, 1, {"count": 4 << 20, "dtype": "float32", "call": CODED}, {}),
        in_full(
            *(4, 1, {"count": 4 << 20, "dtype": "float32", "call": CODED}),
            {"transport": "auto", "hosts": "aabb"},
        ),
        (3, 1, {"count": 10}, {"transport": "shm"}),
        (3, 1, {"count": 2 << 20, "registered": True}, {"transport": "shm"}),
        (3, 1, {"count": 3 << 19, "call": "ring.all_to_all(data)"}, {"transport": "shm"}),
        (5, 3, {"count": 1 << 18}, TWO_LANES),
        (5, 4, {"count": 1 << 18}, TWO_LANES),
    ],
)
def test_a_rank_killed_in_the_middle_of_its_data_is_named(tmp_path, size, victim, fields, settings):
    usual = {"dtype": "float64", "registered": False, "call": "ring.all_reduce(data)"}
    with Ring(tmp_path, size, ROUNDS.format(**usual | fields), **settings) as ring:
        ring.wait("round", times=3)
        killed_s = time.monotonic()
        ring.kill(victim)
        facts = ring.wait("result", ring.others(victim))
        # Promised is one second; three times that for a machine that does other things too.
        assert_lost(facts, victim, within_s=3.0, since_s=killed_s)
        assert_lost(ring.wait("again", ring.others(victim)), victim, within_s=0.5)


@BOTH
def test_a_rank_that_dies_while_the_ring_forms_is_noticed(tmp_path, transport):
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
LEAVES_BLOCK = """
    with ring:
        sys.exit()
"""
RAISED = ("PeerLostError", "rank 1, which ended with ValueError: bad data", 1)
CLOSED = ("MismatchError", "rank 1, which closed its communicator after 1 call ", 0)
EXITED = ("PeerLostError", "rank 1, which ended with SystemExit", 0)


@pytest.mark.parametrize(
    ("ending", "transport", "kind", "said", "code"),
    [
        ("raise ValueError('bad data')", "auto", *RAISED),
        (FINALLY, "auto", *RAISED),
        ("sys.exit(0)", "zmq", *CLOSED),
        ("ring.close(); hold()", "zmq", *CLOSED),
        (LEAVES_BLOCK, "zmq", *EXITED),
    ],
)
def test_a_rank_that_ends_early_is_named_with_the_reason(
    tmp_path, ending, transport, kind, said, code
):
    with Ring(tmp_path, 3, EARLY.format(ending=ending), transport=transport) as ring:
        facts = ring.wait("result", [0, 2])
        assert_lost(facts, 1, kind)
        assert all(said in fact["text"] for fact in facts), facts
        assert_lost(ring.wait("again", [0, 2]), 1, kind, within_s=0.5)
        for worker in ring.workers:
            worker.stdin.close()
        assert [worker.wait(10) for worker in ring.workers] == [0, code, 0]


# --- A rank has children --------------------------------------------------------------------


@BOTH
def test_a_killed_rank_is_noticed_though_a_forked_child_of_it_lives(tmp_path, transport):
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
            ring.kill(1)
            assert_lost(ring.wait("result", [0, 2]), 1, within_s=math.inf)
            os.kill(child, 0)  # It lives, or this test shows nothing.
        finally:
            os.kill(child, signal.SIGKILL)


@BOTH
def test_programs_that_a_rank_starts_inherit_nothing_of_ours(tmp_path, transport):
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


# --- A rank is interrupted ------------------------------------------------------------------


@BOTH
def test_ctrl_c_in_a_waiting_rank_is_prompt_and_told(tmp_path, transport):
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
def test_ctrl_c_when_c_gives_a_late_call_back_is_told(tmp_path):
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
