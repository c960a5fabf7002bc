"""Facts about a run: machine, versions, command, and the ceilings of this machine.

Each run measures the ceilings again, since absolute speeds drift: compare a collective with
the memcpy and the loopback stream of the same run.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil

PACKAGES = ("ringreduce", "numpy", "numba", "pyzmq", "tensorflow", "keras", "torch", "mpi4py")


def facts() -> dict[str, object]:
    """The header of every result file."""
    return {
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "memcpy_gb_s": round(memcpy_gb_s(), 2),
        "loopback_stream_gb_s": round(loopback_stream_gb_s(), 2),
    }


def memcpy_gb_s(nbytes: int = 64 << 20, repeats: int = 15) -> float:
    """Median speed of copying `nbytes` from one array to another, one thread, in GB/s."""
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return nbytes / float(np.median(times)) / 1e9


def loopback_stream_gb_s(nbytes: int = 512 << 20, piece: int = 1 << 20) -> float:
    """Speed of one TCP stream over loopback between two threads, in GB/s."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        outgoing = socket.create_connection(listener.getsockname())
        incoming, _ = listener.accept()

    def send() -> None:
        data = bytes(piece)
        with outgoing:
            for _ in range(nbytes // piece):
                outgoing.sendall(data)

    sender = threading.Thread(target=send)
    buffer = bytearray(piece)
    started = time.perf_counter()
    sender.start()
    with incoming:
        while incoming.recv_into(buffer):
            pass
    elapsed = time.perf_counter() - started
    sender.join()
    return nbytes / elapsed / 1e9


def _commit() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str:
    # TensorFlow has several distributions.
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "not installed"
