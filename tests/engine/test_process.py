"""A process with work in the background: how it ends, is killed and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce.effects import native
from tests.effects.test_handoff import needs_library
from tests.engine.engines import TIMEOUT_S
from tests.rings import Ring, assert_lost

# Of a process that has work left, to end; the ring's own time limit is TIMEOUT_S.
EXIT_S = 20.0


def test_process_ends_while_work_of_a_lone_rank_is_pending():
    program = (
        "import numpy, ringreduce\n"
        "comm = ringreduce.Communicator(ringreduce.Config())\n"
        "arrays = [numpy.ones(1000) for _ in range(100)]\n"
        "work = [comm.all_reduce(array, async_op=True) for array in arrays]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=EXIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_process_ends_though_a_peer_never_answers(tmp_path: Path, transport: str) -> None:
    program = """
    WHOLE_END = True
    ring = join()
    say("ready")
    if RANK == 0:
        before = ring._session._recorder.current_call()
        work = [ring.all_reduce(np.ones(1000), async_op=True) for _ in range(3)]
        while ring._session._recorder.current_call() == before:
            os.sched_yield()
    else:
        hold()
        attempt("result", lambda: (ring.all_reduce(np.ones(1000)), ring.barrier()))
    """
    with Ring(tmp_path, 2, program, timeout_s=TIMEOUT_S, transport=transport) as ring:
        ring.wait("ready", [1])
        assert ring.workers[0].wait(EXIT_S) == 0
        assert ring.workers[0].stderr == ""
        ring.workers[1].stdin.close()
        [told] = ring.wait("result", [1])
        assert_lost([told], 0)


FORK = """
import os, sys, threading
from ringreduce.communicator.communicator import Communicator
from ringreduce.vocabulary.config import Config
from tests.effects.test_handoff import Plan, in_thread, start, until_it_waits, wait

comm = Communicator(Config())
plan = Plan(comm._session.engine.native, 2)
start(plan.number, 1)
waiting = in_thread(lambda: wait(plan.number, 1))
until_it_waits(waiting)
if (child := os.fork()) == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
comm.close()
"""


@needs_library
def test_forked_child_ends_though_threads_of_its_parent_wait(tmp_path: Path) -> None:
    """Those threads are not in the child, and nobody would ever see them leave."""
    # In a session of its own, so that a child that hangs can be ended too.
    process = subprocess.Popen(
        [sys.executable, "-c", FORK],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=EXIT_S)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert output == "7\n"


@pytest.fixture(params=["zmq", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "shm" and native.library() is None:
        pytest.skip(native.why_missing())
    return str(request.param)


def test_rank_killed_while_work_is_pending_is_named_by_every_wait(
    tmp_path: Path, transport: str
) -> None:
    program = """
    ring = join()
    work = []
    if RANK != 1:
        work = [ring.all_reduce(np.ones(1000), async_op=True) for _ in range(3)]
    say("ready")
    if RANK == 1:
        signal.pause()
    attempt("first", work[0].wait)
    attempt("last", work[2].wait)
    attempt("later", lambda: ring.all_reduce(np.ones(3), async_op=True).wait())
    hold()
    """
    with Ring(tmp_path, 3, program, transport=transport) as ring:
        ring.wait("ready")
        ring.workers[1].signal(signal.SIGKILL)
        # The wait for the last rank to be ready counts too; it is no part of the finding.
        assert_lost([{**fact, "seconds": 0.0} for fact in ring.wait("first", [0, 2])], 1)
        assert_lost(ring.wait("last", [0, 2]), 1)
        assert_lost(ring.wait("later", [0, 2]), 1)


def test_rank_killed_before_a_bucket_that_runs_in_c_is_named(tmp_path: Path) -> None:
    if native.library() is None:
        pytest.skip(native.why_missing())
    program = """
    ring = join()
    data = np.ones(1000)
    def bucket():
        ring._session.engine.submit(lambda: ring.all_reduce(data, "mean", signature=5)).wait()
    for _ in range(20):
        bucket()
    say("ready", in_c=ring._session.collectives.small.nbytes)
    if RANK == 1:
        signal.pause()
    attempt("first", bucket)
    attempt("later", bucket)
    hold()
    """
    with Ring(tmp_path, 3, program, transport="shm") as ring:
        assert all(fact["in_c"] > 0 for fact in ring.wait("ready"))
        ring.workers[1].signal(signal.SIGKILL)
        assert_lost([{**fact, "seconds": 0.0} for fact in ring.wait("first", [0, 2])], 1)
        assert_lost(ring.wait("later", [0, 2]), 1)


def test_ctrl_c_ends_a_wait_for_work(tmp_path: Path, transport: str) -> None:
    program = """
    ring = join()
    if RANK == 0:
        work = ring.all_reduce(np.ones(3), async_op=True)
        # Said within what is interrupted: it may be so at once.
        attempt("result", lambda: (say("ready"), work.wait()))
        attempt("drained", lambda: (say("again"), ring.barrier()))
    else:
        hold()
    """
    with Ring(tmp_path, 2, program, transport=transport, timeout_s=TIMEOUT_S) as ring:
        ring.wait("ready", [0])
        ring.workers[0].signal(signal.SIGINT)
        [first] = ring.wait("result", [0])
        assert first["kind"] == "KeyboardInterrupt"
        ring.wait("again", [0])
        # Now it waits for its own engine, in order to call a barrier after that.
        ring.workers[0].signal(signal.SIGINT)
        [second] = ring.wait("drained", [0])
        assert second["kind"] == "KeyboardInterrupt"
