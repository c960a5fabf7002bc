"""A slow rank and a slow link in `statistics()`: real rings, by transport and between hosts."""

import shutil
import subprocess
import time

import numpy as np
import pytest

from ringreduce.testing import ring_of_threads
from tests import hosts
from tests.processes import wait_until
from tests.rings import way_of

pytestmark = pytest.mark.timeout(120)


def computed(seconds):
    """Work of that length, which other threads do not slow down."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        np.ones(1000).sum()


def named(comm, name):
    """What the statistics name, once heartbeats with it have come round; all ranks stay."""
    wait_until(lambda: getattr(comm.statistics(), name) is not None, f"a {name}")
    found = getattr(comm.statistics(), name)
    comm.barrier()
    return found


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_all_ranks_name_the_one_that_computes_longest(transport):
    steps, unit_s = 25, 0.01

    def work(comm):
        for _ in range(steps):
            computed(unit_s * (3 if comm.rank == 1 else 1))
            comm.all_reduce(np.ones(100))
        return named(comm, "slow_rank"), comm.statistics().stopped_s

    found = ring_of_threads(3, work, **way_of(transport))
    for slow, _ in found:
        assert slow.rank == 1
        # Rank 1 computes that much longer; other things delay ranks too.
        assert 0.25 * steps * 2 * unit_s < slow.waited_s
    assert min(stopped_s for _, stopped_s in found) == found[1][1]


@pytest.mark.full
def test_all_ranks_name_the_link_that_is_slow():
    """Host b sends through a queue of 200 Mbit/s, to c; the others as fast as the machine can."""
    hosts.require()
    if shutil.which("tc") is None:
        pytest.skip("needs the program tc")
    layout = {host: {"one": [f"10.1.0.{n}/24"]} for n, host in enumerate("abc", 1)}
    with hosts.connected(layout) as network:
        limit = "root tbf rate 200mbit burst 256k latency 50ms"
        shaped = f"tc -n {network.names['b']} qdisc add dev eth0 {limit}"
        made = subprocess.run(shaped.split(), capture_output=True, text=True, timeout=20)
        if made.returncode:
            pytest.skip(f"cannot limit a rate: {made.stderr.strip()}")

        def work(comm):
            for _ in range(6):
                comm.all_reduce(np.ones(1 << 20, np.float32))
            return named(comm, "slow_link")

        found = network.ring("10.1.0.1:29500", work)
    for slow in found:
        assert (slow.sender, slow.receiver) == (1, 2)
        assert 10e6 < slow.bytes_per_s < 30e6
        assert slow.others_bytes_per_s > 2 * slow.bytes_per_s
        assert slow.waited_s > 0.1
