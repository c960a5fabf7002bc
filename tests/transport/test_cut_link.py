"""The network between two of four hosts is cut, and nothing else: the link is named, by all."""

import time

import numpy as np
import pytest

import ringreduce as rr
from tests import hosts
from tests.figures import record
from tests.processes import wait_until

pytestmark = pytest.mark.full

LIMIT_S = 3.0
NAMES = "abcd"
LAYOUT = {name: {"one": [f"10.1.0.{number}/24"]} for number, name in enumerate(NAMES, 1)}
# Both are neighbours on the ring.
CUT = 1, 2


@pytest.fixture
def four():
    hosts.require()
    with hosts.connected(LAYOUT) as connected:
        yield connected


def cut(four: hosts.Hosts) -> float:
    """Let each of two hosts lose what it sends the other; return when."""
    for here, there in (CUT, CUT[::-1]):
        four.ip(NAMES[here], f"route add blackhole 10.1.0.{there + 1}/32")
    return time.monotonic()


def all_reduce(comm: rr.Communicator) -> None:
    comm.all_reduce(np.ones(100_000))


def all_to_all(comm: rr.Communicator) -> None:
    comm.all_to_all(np.ones((comm.size, 10_000)))


def message(comm: rr.Communicator) -> None:
    if comm.rank == CUT[0]:
        comm.send(np.ones(10_000), CUT[1])
    else:
        comm.recv(np.ones(10_000), CUT[0])


@pytest.mark.parametrize("what", ["all_reduce", "all_to_all", "message", "group"])
def test_a_cut_link_is_named_within_its_limit(four, what):
    """Also by ranks in user code, where the two ends alone use it; of a group by its members."""
    call = {"all_to_all": all_to_all, "message": message}.get(what, all_reduce)
    cut_s = 0.0
    found: dict[int, tuple[float, rr.PeerError]] = {}

    def work(comm):
        nonlocal cut_s
        group = comm.split(0 if comm.rank in CUT else None) if what == "group" else comm
        takes_part = what in ("all_reduce", "all_to_all") or comm.rank in CUT
        if group is not None and takes_part:
            for _ in range(3):
                call(group)
        comm.barrier()
        if comm.rank == 0:
            cut_s = cut(four)
        try:
            while group is not None and takes_part:
                call(group)
            if what == "message":
                wait_until(lambda: comm.failure is not None, "the news")
                comm.barrier()
        except rr.PeerError as error:
            found[comm.rank] = time.monotonic(), error

    limits = {"link_timeout_s": LIMIT_S, "timeout_s": 60.0, "busy_timeout_s": 120.0}
    assert four.ring("10.1.0.1:20000", work, **limits) == [None] * 4
    seconds = []
    for at_s, error in found.values():
        assert all(f"rank {rank}" in str(error) for rank in CUT), error
        seconds.append(at_s - cut_s)
    assert sorted(found) == (list(CUT) if what == "group" else [0, 1, 2, 3])
    # Far from the other limits; a second beyond it alone, up to three beside other work.
    assert max(seconds) < LIMIT_S + 6.0
    record(f"link cut, limit {LIMIT_S:g} s, {what}", *seconds)
