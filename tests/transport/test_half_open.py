"""Bad networks: connections that say nothing any more, end or are slow, named by the right name.

A connection is cut when nothing comes back any more, not even the confirmations of the
other end's system, and silent when these still come. Both are over after 3 s, where the rank
behind is known to be alive. Who is at fault is known from all ranks' progress, not from one rank's
own wait.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import TIMES
from tests.figures import record
from tests.proxy import Proxy
from tests.rings import TIMEOUT_S, assert_lost, outcome, through_proxy, way_of
from tests.scope import in_full

# Promised are 3 s, far below the ranks' time limit.
CUT_LIMIT_S = 9.0
# How long the network stays slow; a minute is what is promised, by hand.
SLOW_S = float(os.environ.get("RINGREDUCE_TEST_SLOW_S", "2"))
LIMITS = {"timeout_s": TIMEOUT_S, "link_timeout_s": TIMES.link_warning_s}


def sums(comm: rr.Communicator, over: threading.Event | None = None) -> Iterator[None]:
    """Call after call, each checked, until one rank has seen the end."""
    while True:
        data = np.full(50_000, comm.rank + 1.0)
        comm.all_reduce(data)
        assert (data == sum(range(1, comm.size + 1))).all()
        if comm.all_reduce(np.array([over is not None and over.is_set()]).astype(int), "max")[0]:
            return
        yield


def facts_after(
    size: int,
    fault: Callable[[Proxy], object],
    calls: Callable[..., Iterator[None]] = sums,
    **settings: Any,
) -> tuple[list[Any], float]:
    """What each rank raised in its calls and when, and when `fault` was done to the network."""
    rounds, began, together = [0] * size, [], threading.Barrier(size, timeout=60)

    def work(comm: rr.Communicator) -> dict[str, Any] | None:
        def run() -> None:
            for _ in calls(comm):
                rounds[comm.rank] += 1
                if comm.rank == 0 and not began and min(rounds) >= 3:
                    began.append(time.monotonic())
                    assert fault(proxy)

        error, at = outcome(run), time.monotonic()
        together.wait()
        if error is None:
            return None
        return {"kind": type(error).__name__, "text": str(error), "peer": error.peer, "at": at}

    with through_proxy() as proxy:
        return ring_of_threads(size, work, **LIMITS | settings), began[0]


@pytest.mark.skipif(sys.platform != "linux", reason="the proxy cuts on Linux alone")
@pytest.mark.parametrize(("transport", "victim"), [("zmq", 0), in_full("hosts", 1)])
def test_a_rank_that_is_cut_off_is_named_by_all_others(transport, victim):
    def fault(proxy):
        return proxy.cut(f"*>{victim}/*") and proxy.cut(f"{victim}>*")

    facts, cut_s = facts_after(3, fault, **way_of(transport))
    for rank, fact in enumerate(facts):
        assert fact["kind"] in ("PeerLostError", "PeerTimeoutError"), fact
        # It cannot know that it is the one.
        peers = {0, 1, 2} - {victim} if rank == victim else {victim}
        seconds = assert_lost([fact], peers, fact["kind"], CUT_LIMIT_S, cut_s)
        record(f"rank cut off, {transport}", *seconds)


@pytest.mark.parametrize(("ways", "fault"), [("1>2/*", "half_open"), ("1>2/address/*", "drop")])
def test_a_silent_connection_is_an_error_that_names_an_end_of_it(fault, ways):
    # What rank 1 has sent and rank 2 has not got, both tell all others, if need be the long way.
    silence = {fault: True}
    facts, silent_s = facts_after(3, lambda proxy: proxy.set(ways, **silence), transport="zmq")
    seconds = assert_lost(facts, {1, 2}, "PeerLostError", CUT_LIMIT_S, silent_s)
    record(f"one connection silent, {fault}, zmq", *seconds)


@pytest.mark.parametrize("what", [in_full("all_to_all"), "send", in_full("group")])
def test_a_silent_connection_of_two_ranks_alone_is_named_by_all(caplog, what):
    """Also where nobody else waits for these two, in the time of a connection and not of a call."""
    ended = threading.Event()

    def calls(comm):
        group = comm.split(int(comm.rank in (1, 2))) if what == "group" else None
        while not (group and comm.rank in (0, 3) and ended.is_set()):
            if what == "all_to_all":
                comm.all_to_all(np.ones((4, 10_000)))
            elif comm.rank == 1:
                (group or comm).send(np.ones(1000), 1 if group else 2)
            elif comm.rank == 2:
                try:
                    (group or comm).recv(np.ones(1000), 0 if group else 1)
                except rr.PeerLostError:
                    ended.set()
                    raise
            else:
                time.sleep(0.05)
                comm._session.check()
            yield

    limit_s = 1.5 * TIMES.link_warning_s
    settings = {"transport": "zmq", "link_timeout_s": limit_s}
    facts, silent_s = facts_after(
        4, lambda proxy: proxy.set("1>2/pairs/*", drop=True), calls, **settings
    )
    facts = facts[1:3] if what == "group" else facts
    assert all("lost the connection from rank 1 to rank 2" in fact["text"] for fact in facts)
    seconds = assert_lost(facts, {1, 2}, "PeerLostError", limit_s + 1.0, silent_s)
    record(f"one connection of a pair silent, {what}", *seconds)
    assert "sends to rank 2, and not a byte has come there" in caplog.text


@pytest.mark.parametrize(
    ("transport", "ways", "peers"), [("zmq", "1>2/address/0", {1, 2}), ("hosts", "*", {0, 1})]
)
def test_a_reset_connection_is_an_error_on_all_ranks(transport, ways, peers):
    facts, reset_s = facts_after(3, lambda proxy: proxy.reset(ways), **way_of(transport))
    # Which end of a connection is at fault nobody can know: either may be named.
    seconds = assert_lost(facts, peers, "PeerLostError", 3.0, reset_s)
    record(f"connection reset, {transport}", *seconds)


@pytest.mark.parametrize(("fault", "transport"), [("throttle", "zmq"), in_full("delay", "hosts")])
def test_a_slow_network_is_slow_and_nothing_else(caplog, transport, fault):
    over = threading.Event()

    def watch(rounds):
        def take(count):
            started = time.monotonic()
            for _ in range(count):
                next(rounds)
            return time.monotonic() - started

        take(3)
        before, seconds, after = proxy.status(), take(20), proxy.status()
        if fault == "delay":
            proxy.set(delay_s=0.1)
        else:
            # A tenth of what it carries, on the connection that carries most.
            rates = [(after[w]["forward"] - before[w]["forward"]) / seconds for w in after]
            proxy.set(bytes_per_s=int(max(rates) / 10))
        slowed = []
        while sum(slowed) < SLOW_S:
            slowed.append(take(1))
        assert len(slowed) / sum(slowed) < 20 / seconds / 2  # The network is what it waits for.
        proxy.clear()
        take(20)

    def work(comm):
        rounds = sums(comm, over)
        if comm.rank == 0:
            watch(rounds)
            over.set()
        for _ in rounds:
            pass

    with through_proxy() as proxy:
        ring_of_threads(3, work, **LIMITS | way_of(transport) | {"timeout_s": 10.0})
    # That it is slow may be said, and of whom, but nobody may be taken for stopped or gone.
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    slow = ("is alive and", "is alive, in")
    assert [line for line in said if not any(word in line for word in slow)] == []
