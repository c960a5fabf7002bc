"""Faults of processes, networks and machines on real rings: noticed soon, named, and cleaned up.

What is promised and what was measured is in docs/reliability.md; bounds here are three
times what is promised, for a machine that does other things too. `test_failures` has the same
faults at every place and size, without the clock.
"""

import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from ringreduce.effects import native
from ringreduce.vocabulary.config import TIMES
from tests.figures import record
from tests.processes import DEADLINE_S, launcher, run_python, wait_gone, wait_until
from tests.rings import Ring, assert_lost
from tests.scope import in_full

# --- Killed ---------------------------------------------------------------------------------

# The victim's second thread watches where its call stands, and kills it there.
KILLED = """
import ctypes
from ringreduce.transport import shm
PLACE, VICTIM = {place!r}, {victim}
ring = join()

def is_there():
    if PLACE == "in shared memory":
        link, facts = ring._session.collectives._link, shm._Facts()
        shm.functions()["shm_look"](link._ranks.group, ctypes.addressof(facts))
        return 1 <= facts.step < facts.steps - 1
    step = {{"in reduce-scatter": SIZE - 2, "in all-gather": SIZE}}[PLACE]
    return ring._session.collectives._link._record.step == step

def watch():
    while not is_there():
        os.sched_yield()
    say("dies", at=time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)

data = np.zeros(4 << 20)
rounds = 0
def call():
    global rounds
    ring.all_reduce(data)
    rounds += 1
    if RANK == VICTIM and rounds == 3:
        threading.Thread(target=watch, daemon=True).start()
attempt("result", lambda: until_error(call))
attempt("again", ring.barrier)
hold()
"""


@pytest.mark.parametrize(
    ("transport", "place", "victim"),
    [("zmq", "in reduce-scatter", 0), ("zmq", "in all-gather", 1), ("shm", "in shared memory", 0)],
)
def test_a_killed_rank_is_named_by_all_within_a_second(tmp_path, transport, place, victim):
    program = KILLED.format(place=place, victim=victim)
    with Ring(tmp_path, 3, program, transport=transport) as ring:
        results = ring.wait("result", ring.others(victim))
        [dies] = ring.said(victim, "dies")
        seconds = assert_lost(results, victim, within_s=3.0, since_s=dies["at"])
        record(f"SIGKILL {place}, {transport}", *seconds)
        assert_lost(ring.wait("again", ring.others(victim)), victim, within_s=0.5)


# --- Stopped --------------------------------------------------------------------------------


# Says when it is out of the ring, and whether its memory is its own from then on.
STOPPED = """
import logging
logging.basicConfig(level=logging.WARNING)
ring = join()
data = {memory}
data[:] = 0
def call():
    ring.all_reduce(data)
    say("round")
attempt("result", lambda: until_error(call))
data[:] = 7.0
say("filled")
sys.stdin.readline()
say("kept", whole=bool((data == 7.0).all()))
attempt("again", ring.barrier)
hold()
ring.close()
"""


# What a rank that wakes writes into registered arrays of others is in test_shm.
@pytest.mark.parametrize(
    ("transport", "victim", "memory"),
    [
        ("shm", 1, "np.empty(4 << 20)"),
        in_full("hosts", 2, "ring.empty(1 << 20, np.float64)"),
        ("zmq", 1, "np.empty(1 << 20)"),
    ],
)
def test_a_stopped_rank_is_warned_of_and_then_named_by_all(tmp_path, transport, victim, memory):
    """It corrupts nothing when it is woken."""
    program = STOPPED.format(memory=memory)
    with Ring(tmp_path, 3, program, transport=transport, timeout_s=2.0) as ring:
        ring.wait("round", times=3)
        stopped_s, others = time.monotonic(), ring.others(victim)
        ring.workers[victim].signal(signal.SIGSTOP)
        results = ring.wait("result", others)
        ring.wait("filled", others)
        ring.workers[victim].signal(signal.SIGCONT)
        woken_s = time.monotonic()
        [late] = ring.wait("result", [victim])
        assert late["kind"] in ("PeerTimeoutError", "PeerLostError"), late
        assert late["at"] - woken_s < 3.0
        ring.tell()
        assert [fact["whole"] for fact in ring.wait("kept")] == [True] * 3
        assert_lost(ring.wait("again", others), victim, "PeerTimeoutError", within_s=0.5)
        ring.release()
        assert any(re.search(r"waited 2\.\d s for", fact["text"]) for fact in results)
        assert any("RINGREDUCE_TIMEOUT_S" in fact["text"] for fact in results)
        seconds = assert_lost(results, victim, "PeerTimeoutError", 2.0 + 3.0, stopped_s)
        record(f"SIGSTOP, limit 2 s, {transport}", *seconds)
        for rank in others:
            warning = ring.workers[rank].stderr
            assert f"rank {victim}" in warning
            assert "WARNING" in warning


def test_a_short_pause_is_no_fault(tmp_path):
    program = """
    ring = join()
    for number in range(400):
        data = np.full(20_000, RANK + 1.0)
        ring.all_reduce(data)
        assert (data == sum(range(1, SIZE + 1))).all()
        say("round")
    """
    with Ring(tmp_path, 3, program, timeout_s=6.0) as ring:
        for rank in range(3):
            ring.wait("round", times=20 * (rank + 1))
            ring.workers[rank].signal(signal.SIGSTOP)
            # Nothing can tell us that the others wait: they say nothing then.
            with pytest.raises(AssertionError, match="in vain"):
                wait_until(lambda: False, "the pause to end", 0.5 * TIMES.silent_s)
            ring.workers[rank].signal(signal.SIGCONT)
        for worker in ring.workers:
            assert worker.wait(30) == 0, worker.stderr
            assert worker.stderr == ""


# --- Nothing is left ------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc and /dev/shm")
def test_nothing_is_left_when_all_are_killed(tmp_path):
    program = """
    import os
    import ringreduce
    ring = ringreduce.init()
    data = ring.empty(1 << 18)
    data[:] = 0
    print("joined", os.getpid(), flush=True)
    while True:
        ring.all_reduce(data)
    """
    (tmp_path / "worker.py").write_text(textwrap.dedent(program))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = set(os.listdir("/dev/shm"))
    with launcher(tmp_path, "run", "-n", "2", "worker.py", TMPDIR=str(temporary)) as job:
        job.wait_shown("joined", times=2)
        workers = [int(pid) for pid in re.findall(r"joined (\d+)", job.stdout)]
        family = [process.pid for process in psutil.Process(job.pid).children(recursive=True)]
        assert set(workers) < set(family)
        # Abstract addresses that the ranks listen on.
        opened = [it for pid in workers for it in psutil.Process(pid).net_connections("unix")]
        sockets = {it.laddr for it in opened if "ringreduce" in it.laddr}
        assert sockets or native.library() is None
        killed_s = time.monotonic()
        job.signal(signal.SIGKILL)
        wait_gone(family, 6.0)
        record("launcher killed: nobody left", time.monotonic() - killed_s)
    # Of a process that counts as gone some threads may still be about to.
    unix = Path("/proc/net/unix")
    wait_until(lambda: not any(map(unix.read_text().__contains__, sockets)), "no socket", 2.0)
    assert os.listdir(temporary) == []
    # Other programs of this machine have theirs, but not for ever.
    wait_until(lambda: not set(os.listdir("/dev/shm")) - before, "/dev/shm to be as it was")


# --- The machine has no more ----------------------------------------------------------------

# A child for each limit: it must end by itself, with a sum or with an error of ours.
EXHAUSTED = """
import json, os, resource, signal, sys
import numpy as np
from ringreduce import RingReduceError
from ringreduce.testing import ring_of_threads

def work(ring):
    return bool((ring.all_reduce(np.full(100_000, ring.rank + 1.0)) == 3).all())

# A program that has many files open itself.
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(150)]

def child(soft, hard):
    taken = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + soft, taken + hard))
    try:
        join_s = 20.0 if hard == 200 else 1.0  # The first must work, of others the ranks fail.
        limits = {"join_timeout_s": join_s, "timeout_s": 5.0}
        results = ring_of_threads(2, work, transport=sys.argv[1], **limits)
        outcome = "sums" if results == [True, True] else "wrong"
    except BaseException as error:
        ours = isinstance(error, RingReduceError)
        outcome = f"{'' if ours else 'foreign '}{type(error).__name__}: {error}"
    os.write(1, (json.dumps(outcome) + "\\n").encode())
    os._exit(7)

work_once = ring_of_threads(2, work, transport=sys.argv[1])  # compiled code is loaded
for limits in json.loads(sys.argv[2]):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        child(*limits)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != 7:
        print(json.dumps(f"ended with {os.waitstatus_to_exitcode(status)}"), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("transport", ["zmq", in_full("auto")])
def test_too_many_open_files_is_an_error_and_never_the_end_of_the_process(transport):
    """Where the limit may be raised, it is."""
    soft = [1, 3, *range(5, 120, 13), 200]  # One is the meeting's own.
    raised = [(1, 200)] * 4
    limits = json.dumps([*((number, number) for number in soft), *raised])
    done = run_python(EXHAUSTED, transport, limits, timeout_s=DEADLINE_S * 2)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(soft) + len(raised), done.stderr
    for found in outcomes:
        assert found.startswith(("sums", "ConfigError", "RendezvousError")), outcomes
    assert "ulimit -n" in outcomes[0]
    assert outcomes[-5:] == ["sums"] * 5


# A limit on the size of files is what stands in for a full memory.
NO_MEMORY = """
import logging, resource
logging.basicConfig(level=logging.WARNING)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
ring = join()
data = ring.empty(100_000, np.float64)
data[:] = RANK + 1.0
assert (ring.all_reduce(data) == 3).all()
say("over", transport=ring.transport)
hold()
"""


@pytest.mark.skipif(native.library() is None, reason="needs the native library")
def test_without_memory_to_share_the_ring_goes_on_and_says_so(tmp_path):
    with Ring(tmp_path, 2, NO_MEMORY, transport="auto") as ring:
        assert {fact["transport"] for fact in ring.wait("over")} == {"zmq"}
        ring.release()
        for worker in ring.workers:
            assert "has no memory to share" in worker.stderr
