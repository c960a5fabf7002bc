"""Connections that say nothing any more, and stopped ranks: named soon by all, by the right name.

A connection is cut when nothing comes back any more, not even the confirmations of the
other end's system, and silent when these still come. Both are over after 3 s, where the rank
behind is known to be alive. A rank that is stopped may be woken: that is over at the time
limit. Who is at fault is known from all ranks' progress, not from one rank's own wait.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ringreduce.vocabulary.config import TIMES
from tests.communicator.test_faults import (
    CHECKED,
    REGISTERED,
    STOPPED,
    assert_named,
    ring_over,
    stop_and_wake,
)
from tests.figures import record
from tests.rings import Ring
from tests.scope import in_full

# Promised are 3 s, far below the workers' time limit of 20 s.
CUT_LIMIT_S = 9.0
LOST = ("PeerLostError", "PeerTimeoutError")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the proxy cuts on Linux alone")


@on_linux
@pytest.mark.parametrize(
    ("transport", "victim"),
    [("zmq", 0), ("hosts", 1), in_full("zmq", 1), in_full("hosts", 0)],
)
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


@on_linux
def test_one_cut_connection_is_an_error_that_names_an_end_of_it(tmp_path: Path) -> None:
    # Everything from rank 1 to rank 2 and nothing else: rank 2 to 1 works, as do all others.
    with Ring(tmp_path, 3, CHECKED, proxied=True) as ring:
        ring.wait("round", times=3)
        cut_s = time.monotonic()
        assert ring.proxy.cut("1>2/*")
        for fact in ring.wait("result"):
            assert fact["kind"] in LOST, fact
            seconds = assert_named([fact], fact["kind"], {1, 2}, cut_s, CUT_LIMIT_S)
            record("one connection cut, zmq", *seconds)


@pytest.mark.parametrize(
    ("ways", "fault"),
    [
        ("1>2/*", "half_open"),
        ("1>2/address/*", "drop"),
        in_full("1>2/*", "drop"),
        in_full("1>2/address/*", "half_open"),
    ],
)
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


@pytest.mark.parametrize(
    ("transport", "victim"),
    [
        ("shm", 1),
        ("hosts", 2),
        *(in_full("zmq", victim) for victim in range(3)),
        *(in_full("shm", victim) for victim in (0, 2)),
        *(in_full("hosts", victim) for victim in (0, 1)),
    ],
)
def test_a_stopped_rank_is_warned_of_and_then_named_by_all(
    tmp_path: Path, transport: str, victim: int
) -> None:
    program = STOPPED.format(memory=REGISTERED.format(count=1 << 20))
    with ring_over(transport, tmp_path, 3, program, timeout_s=3.0) as ring:
        stopped_s, results = stop_and_wake(ring, victim)
        seconds = assert_named(results, "PeerTimeoutError", {victim}, stopped_s, 3.0 + 3.0)
        record(f"SIGSTOP, limit 3 s, {transport}", *seconds)
        for rank in ring.others(victim):
            warning = ring.workers[rank].stderr
            assert f"rank {victim}" in warning
            assert "WARNING" in warning


@pytest.mark.parametrize("repeat", [0, in_full(1), in_full(2)])
def test_a_rank_woken_in_the_middle_of_a_sum_leaves_registered_arrays_of_others_alone(
    tmp_path: Path, repeat: int
) -> None:
    # In shared memory it has all others' registered memory at hand, and goes on where it was.
    program = STOPPED.format(memory=REGISTERED.format(count=4 << 20))
    with ring_over("shm", tmp_path, 3, program, timeout_s=1.0) as ring:
        stop_and_wake(ring, 0)
