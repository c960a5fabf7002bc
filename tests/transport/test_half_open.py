"""Connections that say nothing any more, and stopped ranks: named soon by all, by the right name.

A connection is cut when nothing comes back any more, not even the confirmations of the
other end's system, and silent when these still come. Both are over after 3 s, where the rank
behind is known to be alive. A rank that is stopped may be woken: that is over at the time
limit. Who is at fault is known from all ranks' progress, not from one rank's own wait.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringreduce.vocabulary.config import TIMES
from tests.communicator.test_faults import CHECKED, assert_named, ring_over
from tests.figures import record
from tests.rings import Ring
from tests.scope import in_full

# Promised are 3 s, far below the workers' time limit of 20 s.
CUT_LIMIT_S = 9.0
LOST = ("PeerLostError", "PeerTimeoutError")


@pytest.mark.skipif(sys.platform != "linux", reason="the proxy cuts on Linux alone")
@pytest.mark.parametrize(("transport", "victim"), [("zmq", 0), in_full("hosts", 1)])
def test_a_rank_that_is_cut_off_is_named_by_all_others(
    tmp_path: Path, transport: str, victim: int
) -> None:
    with ring_over(transport, tmp_path, 3, CHECKED, proxied=True) as ring:
        ring.wait("round", times=3)
        cut_s = time.monotonic()
        assert ring.proxy.cut(f"*>{victim}/*")
        assert ring.proxy.cut(f"{victim}>*")
        ring.wait("result")
        for rank in range(ring.size):
            [fact] = ring.said(rank, "result")
            assert fact["kind"] in LOST, fact
            # It cannot know that it is the one.
            peers = set(ring.others(victim)) if rank == victim else {victim}
            seconds = assert_named([fact], fact["kind"], peers, cut_s, CUT_LIMIT_S)
            record(f"rank cut off, {transport}", *seconds)


@pytest.mark.parametrize(("ways", "fault"), [("1>2/*", "half_open"), ("1>2/address/*", "drop")])
def test_a_silent_connection_is_an_error_that_names_an_end_of_it(
    tmp_path: Path, fault: str, ways: str
) -> None:
    # What rank 1 has sent and rank 2 has not got, both tell all others, if need be the long way.
    with Ring(tmp_path, 3, CHECKED, proxied=True) as ring:
        ring.wait("round", times=3)
        silent_s = time.monotonic()
        assert ring.proxy.set(ways, **{fault: True})
        for fact in ring.wait("result"):
            assert fact["kind"] == "PeerLostError", fact
            seconds = assert_named([fact], fact["kind"], {1, 2}, silent_s, CUT_LIMIT_S)
            record(f"one connection silent, {fault}, zmq", *seconds)


PAIRS = """
ring = join()
group = ring.split("a" if RANK in (1, 2) else "b") if "{what}" == "group" else None
def call():
    if "{what}" == "all_to_all":
        ring.all_to_all(np.ones((SIZE, 10_000)))
    elif "{what}" == "group" and RANK in (1, 2):
        exchange(group, group.rank, 1 - group.rank)
    elif "{what}" == "send" and RANK in (1, 2):
        exchange(ring, RANK - 1, 3 - RANK)
    elif "{what}" != "all_to_all":
        time.sleep(0.05)
        ring._session.check()
def exchange(ring, is_second, other):
    if is_second:
        ring.recv(np.ones(1000), other)
    else:
        ring.send(np.ones(1000), other)
def report():
    call()
    say("round")
attempt("result", lambda: until_error(report))
hold()
"""


@pytest.mark.parametrize("what", ["all_to_all", "send", in_full("group")])
def test_a_silent_connection_of_two_ranks_alone_is_named_by_all(tmp_path: Path, what: str) -> None:
    """Also where nobody else waits for these two, in the time of a connection and not of a call."""
    program = PAIRS.replace("{what}", what)
    limit_s = 1.5 * TIMES.link_warning_s
    with Ring(tmp_path, 4, program, proxied=True, link_timeout_s=limit_s) as ring:
        ring.wait("round", times=3)
        silent_s = time.monotonic()
        assert ring.proxy.set("1>2/pairs/*", drop=True)
        ranks = [1, 2] if what == "group" else None
        for fact in ring.wait("result", ranks):
            assert "lost the connection from rank 1 to rank 2" in fact["text"], fact
            seconds = assert_named([fact], "PeerLostError", {1, 2}, silent_s, limit_s + 1.0)
            record(f"one connection of a pair silent, {what}", *seconds)
        assert "sends to rank 2, and not a byte has come there" in ring.workers[1].stderr


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


def stop_and_wake(ring: Ring, victim: int) -> tuple[float, list[dict[str, Any]]]:
    """Stop a rank until the others have given up, wake it and let all end.

    Returns:
        When it was stopped, and what the others raised.
    """
    ring.wait("round", times=3)
    stopped_s = time.monotonic()
    ring.workers[victim].signal(signal.SIGSTOP)
    results = ring.wait("result", ring.others(victim))
    ring.wait("filled", ring.others(victim))
    ring.workers[victim].signal(signal.SIGCONT)
    woken_s = time.monotonic()
    [late] = ring.wait("result", [victim])
    assert late["kind"] in ("PeerTimeoutError", "PeerLostError"), late
    assert late["at"] - woken_s < 3.0
    for worker in ring.workers:
        worker.stdin.write(b"\n")
        worker.stdin.flush()
    assert [fact["whole"] for fact in ring.wait("kept")] == [True] * ring.size
    ring.release()
    return stopped_s, results


# What a rank that wakes writes into registered arrays of others is in test_shm.
@pytest.mark.parametrize(
    ("transport", "victim", "memory"),
    [
        ("shm", 1, "np.empty(4 << 20)"),
        ("hosts", 2, "ring.empty(1 << 20, np.float64)"),
        in_full("zmq", 0, "np.empty(1 << 20)"),
    ],
)
def test_a_stopped_rank_is_warned_of_and_then_named_by_all(
    tmp_path: Path, transport: str, victim: int, memory: str
) -> None:
    """It corrupts nothing when it is woken."""
    program = STOPPED.format(memory=memory)
    with ring_over(transport, tmp_path, 3, program, timeout_s=2.0) as ring:
        stopped_s, results = stop_and_wake(ring, victim)
        seconds = assert_named(results, "PeerTimeoutError", {victim}, stopped_s, 2.0 + 3.0)
        record(f"SIGSTOP, limit 2 s, {transport}", *seconds)
        for rank in ring.others(victim):
            warning = ring.workers[rank].stderr
            assert f"rank {victim}" in warning
            assert "WARNING" in warning
