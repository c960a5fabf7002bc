"""A rank of ``ringreduce doctor``: looks around and measures; rank 0 prints what all have found."""

import contextlib
import importlib.util
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from ringreduce._version import __version__
from ringreduce.commands.doctor.findings import SIZES, HostFacts, Link, turns
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import init
from ringreduce.effects import native
from ringreduce.pure.networks import described
from ringreduce.transport import descriptors, libzmq
from ringreduce.transport.interfaces import local_addresses
from ringreduce.vocabulary import compiled, cores

_SECONDS, _CALLS_MAX = 0.2, 100  # a measurement repeats for this long
_FILES_MIN = 1024  # what a program may open besides, its data and its logs
_DISTRIBUTIONS = ("TensorFlow", "TensorFlow-cpu", "Keras", "numpy", "numba", "pyzmq")


def main() -> None:
    """Form the ring, and print a line of JSON for each rank and link."""
    with init() as comm:
        records = examine(comm)
    if comm.rank == 0:
        for record in records:
            print(msgspec.json.encode(record).decode())


def examine(comm: Communicator) -> list[Any]:
    """`HostFacts` of all ranks and a `Link` for each group of `turns`; all ranks must call it."""
    load = os.getloadavg()[0]  # Before the ranks add to it.
    source, target = (np.ones(SIZES[-1], np.uint8) for _ in range(2))
    copied_s = _median(partial(np.copyto, target, source), comm)
    links = []
    for turn in turns(comm.statistics().hosts):
        group = comm.split(next((i for i, ranks in enumerate(turn) if comm.rank in ranks), None))
        link = None
        if group is not None:
            with group:
                arrays = [group.empty(size // 4) for size in SIZES]
                for array in arrays:
                    array[:] = 0
                calls = [partial(group.all_reduce, array) for array in arrays]
                seconds = tuple(_median(call, group) for call in calls)
                link = None if group.rank else Link(group.members, group.transport, seconds)
        links += [measured for measured in comm.all_gather_object(link) if measured is not None]
    return comm.all_gather_object(_facts(comm, copied_s, load)) + links


def _median(call: Callable[[], object], ring: Communicator) -> float:
    """Seconds that a call of all ranks takes here."""

    def once() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    once()  # It may compile.
    first = once()
    count = ring.broadcast_object(min(_CALLS_MAX, int(_SECONDS / first)))
    return statistics.median([once() for _ in range(count)] or [first])


def _facts(comm: Communicator, copied_s: float, load: float) -> HostFacts:
    memory, limit = psutil.virtual_memory(), cores.memory_limit()
    files = descriptors.needed(comm.size, 2 * comm.size, comm.config.streams)
    return HostFacts(
        rank=comm.rank,
        host=comm.config.host_id or platform.node(),
        versions=_versions(),
        native="" if native.library() is not None else native.why_missing(),
        xla=_why_no_xla(),
        compiled=next(iter(compiled.incomplete), ""),
        cores=tuple(sorted(cores.bound_cores())),
        quota=cores.core_quota(),
        host_cores=os.cpu_count() or 1,
        load=load,
        memory=min(memory.total, limit or memory.total),
        available=min(memory.available, limit or memory.available),
        copied_s=copied_s,
        address_space=_limit(resource.RLIMIT_AS, 0),
        files=_limit(resource.RLIMIT_NOFILE, 1),
        files_needed=max(_FILES_MIN, files),
        addresses=described(local_addresses()),
    )


def _limit(kind: int, which: int) -> int | None:
    """The soft limit, 0, or that to which a program may raise it, 1."""
    limit = resource.getrlimit(kind)[which]
    return None if limit == resource.RLIM_INFINITY else limit


def _versions() -> dict[str, str]:
    versions = {"ringreduce": __version__, "Python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name.removesuffix("-cpu")] = metadata.version(name)
    return versions | {"libzmq": libzmq.version()}


def _why_no_xla() -> str:
    """Say why XLA cannot be used, by TensorFlow's files alone: to import it takes seconds."""
    if native.library() is None:
        return "there is no native library"
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        return "TensorFlow is not installed"
    try:
        native.xla_futures_at(str(Path(spec.origin).with_name("include")))
    except (OSError, ValueError) as error:
        return f"its headers do not say how ({error})"
    return ""


if __name__ == "__main__":
    main()
