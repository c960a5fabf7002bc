"""What encryption costs an all-reduce over ZeroMQ: two rings of the same processes alternate.

First, how fast one core seals: if that is a tiny part of memcpy's speed, libsodium does not use the
processor's instructions, and the bench fails.

``ringreduce run -n 2 -m bench.encryption`` measures over loopback; with ``--rate 10gbit``
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

import numba
import numpy as np

from bench.namespaces import shaped
from bench.sweep import sizes
from ringreduce import Communicator, Config
from ringreduce.transport import libzmq, sodium

MIB = sizes(1, 64, 4)
CALLS_MIN, SECONDS_PER_SIZE = 24, 6.0
# Sealing takes 3 to 5 times as long as memcpy; without the instructions, 200 times.
SLOWEST = 50
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
                *(*host.prefix, sys.executable, "-m", "bench.encryption"),
                *("--seconds", str(arguments.seconds), "--mib", *map(str, arguments.mib)),
            ]
            environment = {**os.environ, **config.to_environment()}
            workers.append(subprocess.Popen(command, env=environment))
        for worker in workers:
            worker.wait(600)


def measure(mib: list[int], seconds: float) -> None:
    """Print a line for each size, on rank 0."""
    plain = replace(Config.from_environment(), transport="zmq", encryption="off")
    if plain.rank == 0:
        sealing, opening, copying = rates()
        print(
            f"one core, 1 MiB: sealing {sealing:.1f} GB/s, opening {opening:.1f}, "
            f"memcpy {copying:.1f}",
            flush=True,
        )
        if sealing < copying / SLOWEST:
            raise SystemExit("libsodium does not use this processor's instructions for AES")
    with Communicator(plain) as off, _twin(off) as on:
        for size in mib:
            buffer = np.zeros(size << 18, np.float32)
            times = _times(off, (off, on), buffer, seconds)
            if off.rank == 0:
                plain_ms, encrypted = np.median(times, axis=0) * 1e3
                ratio = np.median(times[:, 1] / times[:, 0])
                print(
                    f"{size:>3} MiB, {len(times)} calls each: {plain_ms:.2f} ms plain, "
                    f"{encrypted:.2f} ms encrypted ({(encrypted / plain_ms - 1) * 100:+.1f} %; "
                    f"median of ratios {(ratio - 1) * 100:+.1f} %)",
                    flush=True,
                )


def rates() -> tuple[float, float, float]:
    """GB/s, medians: sealing, opening, memcpy."""
    if not sodium.load():
        raise SystemExit("this libsodium has no AEGIS-128L")
    size = 1 << 20
    text, cipher = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    small = np.zeros(64 + sodium.TAG_BYTES + 32, np.uint8)
    seconds = np.zeros((3, 50))
    for turn in range(seconds.shape[1]):
        for which in range(3):
            started = time.perf_counter()
            _work(which, text.ctypes.data, cipher.ctypes.data, size, small.ctypes.data)
            seconds[which, turn] = time.perf_counter() - started
    sealing, opening, copying = size / np.median(seconds, axis=1) / 1e9
    return float(sealing), float(opening), float(copying)


@numba.njit(nogil=True)
def _work(which: int, text: int, cipher: int, size: int, small: int) -> None:
    """Seal, open or copy; `small` has room for a header, a tag, a nonce and a key."""
    tag, nonce, key = small + 64, small + 96, small + 112
    nbytes = np.uint64(size)
    if which == 0:
        sodium.encrypt(cipher, tag, 0, text, nbytes, small, np.uint64(64), 0, nonce, key)
    elif which == 1:
        sodium.decrypt(text, 0, cipher, nbytes, tag, small, np.uint64(64), nonce, key)
    else:
        libzmq.memcpy(cipher, text, nbytes)


def _twin(first: Communicator) -> Communicator:
    """A second ring of the same ranks, encrypted."""
    config = first.config
    host = config.rendezvous.rpartition(":")[0]
    listener = socket.create_server((host, 0)) if first.rank == 0 else None
    port = first.broadcast_object(listener.getsockname()[1] if listener else None)
    return Communicator(
        replace(
            config,
            encryption="on",
            rendezvous=f"{host}:{port}",
            rendezvous_fd=listener.detach() if listener else None,
            job_id=f"{config.job_id}-encrypted",
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
