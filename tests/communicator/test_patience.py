"""Ranks that are alive and in user code for longer than a call waits for others."""

import math
import sys
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import TIMES
from tests.processes import wait_until
from tests.rings import Ring, assert_lost, way_of
from tests.scope import in_full

# Some heartbeats must arrive before it is over.
TIMEOUT_S = 2 * TIMES.silent_s
LARGE = 1 << 18


class Together(dict[int, rr.Communicator]):
    """The communicators of a ring in threads, so that one rank sees how long another waits."""

    def wait_until_waiting(self, rank: int, call: int, seconds: float) -> None:
        """Stay in user code until `rank` has waited in its call number `call` for so long."""

        def has_waited() -> bool:
            if rank not in self:
                return False
            standing = self[rank]._session._recorder.current_call()
            assert self[rank].failure is None
            return (
                standing.operation is not None
                and standing.calls == call
                and time.monotonic() - standing.since_s > seconds
            )

        wait_until(has_waited, f"rank {rank} to wait for {seconds:g} s")


@pytest.mark.parametrize(
    ("transport", "size"),
    [in_full("zmq", 2), ("zmq", 3), in_full("shm", 2), ("shm", 3), ("hosts", 3)],
)
def test_a_call_waits_for_a_rank_in_user_code_beyond_the_limit(transport, size):
    """Around the ring a large array is a chain: rank 0 waits for 2, which waits for 1."""
    together = Together()

    def work(comm):
        together[comm.rank] = comm
        data = np.full(LARGE, comm.rank + 1.0)
        comm.barrier()
        if comm.rank == 1:
            together.wait_until_waiting(0, call=2, seconds=1.5 * TIMEOUT_S)
        return float(comm.all_reduce(data)[-1])

    total = size * (size + 1) / 2
    limits = {"timeout_s": TIMEOUT_S, "busy_timeout_s": 60.0}
    assert ring_of_threads(size, work, **way_of(transport), **limits) == [total] * size


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_rank_in_user_code_for_ever_is_named_with_its_limit(transport):
    together = Together()

    def work(comm):
        together[comm.rank] = comm
        if comm.rank == 1:
            wait_until(lambda: 0 in together and together[0].failure is not None, "rank 0")
            return ""
        with pytest.raises(rr.PeerTimeoutError) as caught:
            comm.barrier()
        assert caught.value.peer == 1
        return str(caught.value)

    limits = {"timeout_s": TIMEOUT_S / 2, "busy_timeout_s": TIMEOUT_S}
    text, _ = ring_of_threads(2, work, **way_of(transport), **limits)
    assert "Rank 1 is alive, in user code for " in text
    assert f"raise RINGREDUCE_BUSY_TIMEOUT_S (now {TIMEOUT_S:g})" in text


# The lock is held by the main thread, while a call of the same rank may run in the background.
LOCKED = """
import ctypes
ring = join()
wait_with_lock = ctypes.PyDLL(None).poll
def hold_lock(seconds):
    say("locks")
    wait_with_lock(None, 0, int(seconds * 1000))
if RANK == 1:
    hold_lock({seconds})
attempt("result", ring.barrier)
data = np.ones(1000)
work = ring.all_reduce(data, async_op=True) if RANK == 1 else None
if RANK == 1:
    hold_lock({seconds})
attempt("background", lambda: work.wait() if RANK == 1 else ring.all_reduce(data))
say("sum", value=data[0])
if RANK == 1:
    hold_lock(20.0)
attempt("killed", ring.barrier)
hold()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts a connection's bytes")
@pytest.mark.parametrize(("transport", "size"), [("zmq", 3), in_full("shm", 2)])
def test_a_rank_that_keeps_pythons_lock_beyond_the_limit_is_waited_for(tmp_path, transport, size):
    program = LOCKED.format(seconds=1.5 * TIMEOUT_S)
    with Ring(tmp_path, size, program, transport=transport, timeout_s=TIMEOUT_S) as ring:
        others = ring.others(1)
        for event in ("result", "background"):
            for fact in ring.wait(event):
                assert fact["kind"] == "", fact
        assert [fact["seconds"] > TIMEOUT_S for fact in ring.wait("result", others)]
        assert [fact["value"] for fact in ring.wait("sum")] == [size] * size
        ring.wait("locks", [1], times=3)
        ring.kill(1)
        # How long its neighbours had waited by then is no part of the finding.
        lost = ring.wait("killed", others)
        assert_lost(lost, 1, within_s=math.inf)
        assert all("died" in fact["text"] for fact in lost), lost
