"""The last rank computes three times as long as the others; each prints which rank is slow."""

import time

import numpy as np

import ringreduce

comm = ringreduce.init()
values = np.random.default_rng(0).normal(size=1 << 16)
for _ in range(40):
    # So much work at least: elsewhere the processor may be faster, or busy.
    until = time.monotonic() + (0.03 if comm.rank == comm.size - 1 else 0.01)
    while time.monotonic() < until:
        np.sort(values)
    comm.all_reduce(np.ones(1000))
deadline = time.monotonic() + 30
while comm.statistics().slow_rank is None and time.monotonic() < deadline:
    time.sleep(0.01)
slow = comm.statistics().slow_rank
print("slow rank", None if slow is None else slow.rank, flush=True)
comm.barrier()
