"""What checksums cost an all-reduce over ZeroMQ: two rings of the same processes alternate.

``ringreduce run -n 2 -m bench.integrity`` measures over loopback; with ``--rate 10gbit``
(and without the launcher) on hosts with links of that rate, which needs root.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np

from bench.namespaces import shaped
from bench.sweep import sizes
from ringreduce import Communicator, Config

MIB = sizes(1, 64, 4)
CALLS_MIN, SECONDS_PER_SIZE = 24, 6.0
_PORT = 4000  # free, since the network namespaces are new


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2, help="with --rate: hosts")
    parser.add_argument("--rate")
    parser.add_argument("--mib", type=int, nargs="+", default=MIB)
    parser.add_argument("--seconds", type=float, default=SECONDS_PER_SIZE, help="for each size")
    arguments = parser.parse_args()
    if arguments.rate is None:
        measure(arguments.mib, arguments.seconds)
        return
    job = secrets.token_hex(8)
    with shaped(arguments.workers, arguments.rate) as hosts:
        workers = []
        for rank, host in enumerate(hosts):
            config = Config(
                rank=rank,
                size=len(hosts),
                rendezvous=f"{hosts[0].address}:{_PORT}",
                job_id=job,
                host_id=host.name,
            )
            command = [
                *(*host.prefix, sys.executable, "-m", "bench.integrity"),
                *("--seconds", str(arguments.seconds), "--mib", *map(str, arguments.mib)),
            ]
            environment = {**os.environ, **config.to_environment()}
            workers.append(subprocess.Popen(command, env=environment))
        for worker in workers:
            worker.wait(600)


def measure(mib: list[int], seconds: float) -> None:
    """Print a line for each size, on rank 0."""
    plain = replace(Config.from_environment(), transport="zmq", integrity="off")
    with Communicator(plain) as off, _twin(off) as on:
        for size in mib:
            buffer = np.zeros(size << 18, np.float32)
            times = _times(off, (off, on), buffer, seconds)
            if off.rank == 0:
                without, with_sums = np.median(times, axis=0) * 1e3
                ratio = np.median(times[:, 1] / times[:, 0])
                print(
                    f"{size:>3} MiB, {len(times)} calls each: {without:.2f} ms without, "
                    f"{with_sums:.2f} ms with checksums ({(with_sums / without - 1) * 100:+.1f} %; "
                    f"median of ratios {(ratio - 1) * 100:+.1f} %)",
                    flush=True,
                )


def _twin(first: Communicator) -> Communicator:
    """A second ring of the same ranks, with checksums."""
    config = first.config
    host = config.rendezvous.rpartition(":")[0]
    listener = socket.create_server((host, 0)) if first.rank == 0 else None
    port = first.broadcast_object(listener.getsockname()[1] if listener else None)
    return Communicator(
        replace(
            config,
            integrity="crc32",
            rendezvous=f"{host}:{port}",
            rendezvous_fd=listener.detach() if listener else None,
            job_id=f"{config.job_id}-checked",
        )
    )


def _times(
    one: Communicator,
    rings: tuple[Communicator, Communicator],
    buffer: np.ndarray,
    seconds: float,
) -> np.ndarray:
    """Seconds of each call, shape (calls, 2): the mean over the ranks; the order alternates."""
    for ring in rings:
        for _ in range(3):
            ring.all_reduce(buffer)
    started = time.perf_counter()
    one.all_reduce(buffer)
    once = time.perf_counter() - started
    calls = one.broadcast_object(max(CALLS_MIN, min(1000, int(seconds / 2 / once))))
    times = np.empty((calls, 2))
    for call in range(calls):
        for which in (0, 1) if call % 2 else (1, 0):
            one.barrier()
            started = time.perf_counter()
            rings[which].all_reduce(buffer)
            times[call, which] = time.perf_counter() - started
    return one.all_reduce(times, "mean")


if __name__ == "__main__":
    main()
