"""A process with work in the background: how it ends, is killed and interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effects.test_handoff import needs_library
from tests.engine.engines import TIMEOUT_S
from tests.processes import run_python
from tests.rings import Ring, assert_lost

# Of a process that has work left, to end; the ring's own time limit is TIMEOUT_S.
EXIT_S = 20.0
BOTH = pytest.mark.parametrize("transport", ["zmq", "shm"])


def test_process_ends_while_work_of_a_lone_rank_is_pending():
    program = (
        "import numpy, ringreduce\n"
        "comm = ringreduce.Communicator(ringreduce.Config())\n"
        "arrays = [numpy.ones(1000) for _ in range(100)]\n"
        "work = [comm.all_reduce(array, async_op=True) for array in arrays]\n"
    )
    done = run_python(program, timeout_s=EXIT_S)
    assert (done.returncode, done.stderr) == (0, "")


@BOTH
def test_process_ends_though_a_peer_never_answers(tmp_path, transport):
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
from tests.effects.test_handoff import Plan, in_library, start, wait

comm = Communicator(Config())
plan = Plan(comm._session.engine.native, 2)
start(plan.number, 1)
waiting = in_library(lambda: wait(plan.number, 1))
if (child := os.fork()) == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
comm.close()
"""


@needs_library
def test_forked_child_ends_though_threads_of_its_parent_wait(tmp_path):
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


@BOTH
def test_ctrl_c_ends_a_wait_for_work(tmp_path, transport):
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
