"""A rank of a collective benchmark: ``ringreduce run -n N -m bench.worker ...`` starts them.

Rank 0 appends a JSON line for each size to the file it is given.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

import ringreduce
from bench.collectives import COLLECTIVES, Collective
from ringreduce import Communicator

# A size is measured for about this long, within the limits on its calls.
ITERATIONS_MIN, ITERATIONS_MAX = 20, 1000
SECONDS_PER_SIZE = 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--op", required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--registered", action="store_true")
    arguments = parser.parse_args()
    dtype = _dtype(arguments.dtype)
    entry = COLLECTIVES[arguments.collective]
    with ringreduce.init() as comm:
        for size_bytes in arguments.sizes:
            count = entry.count(size_bytes, dtype.itemsize, comm.size)
            buffer = comm.empty(count, dtype) if arguments.registered else np.empty(count, dtype)
            wrong = count_wrong(comm, entry, buffer, arguments.op)
            times = measure(comm, entry, buffer, arguments.op, arguments.warmup)
            if comm.rank == 0:
                nbytes, time_s = count * dtype.itemsize, float(np.median(times))
                algbw = nbytes / time_s / 1e9
                row = {
                    "system": "ringreduce",
                    "transport": transport(comm, arguments.registered),
                    "collective": arguments.collective,
                    "world_size": comm.size,
                    "dtype": dtype.name,
                    "op": arguments.op if entry.reduces else "none",
                    "size_bytes": nbytes,
                    "time_us": time_s * 1e6,
                    "time_us_p99": float(np.percentile(times, 99)) * 1e6,
                    "algbw_gb_s": algbw,
                    "busbw_gb_s": algbw * entry.bus_factor(comm.size),
                    "wrong": wrong,
                }
                with open(arguments.rows, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def transport(comm: Communicator, registered: bool) -> str:
    """The transport in use, and whether it reduces the buffers in place."""
    return "shm-registered" if registered and comm.transport == "shm" else comm.transport


def count_wrong(comm: Communicator, entry: Collective, buffer: np.ndarray, op: str) -> int:
    """Elements, over all ranks, that differ from numpy's result for all ranks' inputs.

    Inputs are small whole numbers, so that sums are exact and equality is ==.
    """
    count, dtype = buffer.size, buffer.dtype
    pattern = np.arange(count) % 5 + 1
    inputs = np.stack([(pattern + rank % 3).astype(dtype) for rank in range(comm.size)])
    buffer[:] = inputs[comm.rank]
    result = entry.run(comm, buffer, np.empty_like(buffer), op)
    expected = entry.expected(inputs, comm.rank, op)
    wrong = np.array([np.count_nonzero(result != expected)], np.int64)
    return int(comm.all_reduce(wrong)[0])


def measure(
    comm: Communicator, entry: Collective, buffer: np.ndarray, op: str, warmup: int
) -> np.ndarray:
    """Seconds of each call, back to back, the mean over the ranks."""
    buffer[:] = 0
    out = np.empty_like(buffer)
    for _ in range(max(1, warmup)):
        started = time.perf_counter()
        entry.run(comm, buffer, out, op)
        once = time.perf_counter() - started
    wanted = int(np.clip(SECONDS_PER_SIZE / once, ITERATIONS_MIN, ITERATIONS_MAX))
    iterations = comm.broadcast_object(wanted)
    times = np.empty(iterations)
    comm.barrier()
    for i in range(iterations):
        started = time.perf_counter()
        entry.run(comm, buffer, out, op)
        times[i] = time.perf_counter() - started
    return comm.all_reduce(times, "mean")


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


if __name__ == "__main__":
    main()
