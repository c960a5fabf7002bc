"""The systems that `peers` and `link` compare: whether each is installed, how it is started.

One entry for each system and transport; its ranks run `system_worker`. All use their defaults;
where an option is set, a comment says why.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.turns import TURN_TIMEOUT_S, Process
from ringreduce.commands.launch.local import default_threads
from ringreduce.effects import native
from ringreduce.vocabulary.config import Config, binding_wanted
from ringreduce.vocabulary.cores import shares_of_cores
from ringreduce.vocabulary.worker_environment import worker_environment

# A distributed optimizer in ``model.fit``, with a share of the data; and `rr.fit`, with all of it.
RINGS = ("ringreduce", "rr.fit")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
# The collectives that `peers` can compare; those of each system are in its entry.
MEASURED = ("all_reduce", "all_to_all", "sendrecv", "reduce_scatter", "all_gather")
WORKER = (sys.executable, "-m", "bench.system_worker")


@dataclass(frozen=True)
class Host:
    """Where a rank runs: address, network interface, and the prefix of its command."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    prefix: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Entry:
    """A system under comparison.

    Attributes:
        system, transport: as in the rows; the transport is None where there is no choice.
        missing: what to install, or None if nothing is missing.
        processes: the programs that start its ranks, one on each of the given hosts.
        version: of the installed system, for the header.
        collectives: those that it has.
    """

    system: str
    transport: str | None
    missing: Callable[[], str | None]
    processes: Callable[[Sequence[Host]], list[Process]]
    version: Callable[[], str | None] = lambda: None
    collectives: tuple[str, ...] = MEASURED

    @property
    def label(self) -> str:
        """For tables and messages."""
        return f"{self.system} {self.transport}" if self.transport else self.system


def ring_processes(
    command: Sequence[str], hosts: Sequence[Host], transport: str | None = None
) -> list[Process]:
    """`command` as the ranks of a ringreduce job, one on each host.

    As ``ringreduce run`` on one host, but also for ranks in several network namespaces. Between
    namespaces data is encrypted, unless the user's ``RINGREDUCE_ENCRYPTION`` is off.
    """
    rendezvous = f"{hosts[0].address}:{free_ports(1)[0]}"
    job_id = secrets.token_hex(8)
    secret = secrets.token_hex(32)
    processes = []
    is_one = not any(host.prefix for host in hosts)
    shares = shares_of_cores(len(hosts), wanted=binding_wanted() if is_one else False)
    for rank, host in enumerate(hosts):
        choices: dict[str, object] = {
            "timeout_s": TURN_TIMEOUT_S,
            "join_timeout_s": TURN_TIMEOUT_S,
            "secret": secret,
        }
        if transport is not None:
            choices["transport"] = transport
        if host.name:
            choices["host_id"] = host.name
        config = Config(rank=rank, size=len(hosts), rendezvous=rendezvous, job_id=job_id, **choices)
        environment = worker_environment(
            config,
            default_threads(len(hosts)),
            decided=choices,
            cores=None if shares is None else sum(map(len, shares)),
        )
        cores = None if shares is None else shares[rank]
        processes.append(Process([*host.prefix, *command], environment | QUIET, cores))
    return processes


def without_ring(processes: Sequence[Process], command: Sequence[str]) -> list[Process]:
    """`command` in the places of a ring's ranks, with as many threads, each a process by itself."""
    options = "--workers", str(len(processes)), "--rank"
    variables = [
        {k: text for k, text in each.environment.items() if not k.startswith("RINGREDUCE_")}
        for each in processes
    ]
    return [
        Process([*command, *options, str(rank)], environment, each.cores)
        for rank, (each, environment) in enumerate(zip(processes, variables, strict=True))
    ]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that stay free until a worker does, seconds later.

    The system gives other processes none of these by chance: its own begin at 32768.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20000, 29000), 9000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


def _ringreduce(transport: str, *options: str) -> Callable[[Sequence[Host]], list[Process]]:
    return lambda hosts: ring_processes([*WORKER, "ringreduce", *options], hosts, transport)


def _gloo(hosts: Sequence[Host]) -> list[Process]:
    # Without an interface Gloo takes the one that the host's name resolves to.
    return [
        Process(
            [*host.prefix, *WORKER, "gloo", "--rank", str(rank), "--size", str(len(hosts))],
            QUIET | {"GLOO_SOCKET_IFNAME": host.interface},
        )
        for rank, host in enumerate(hosts)
    ]


def _openmpi(hosts: Sequence[Host]) -> list[Process]:
    # --oversubscribe allows more ranks than cores. Open MPI then yields the core while it polls,
    # and does not yield with enough cores. This default is its fastest: with 4
    # ranks on 2 cores, 1 KiB takes 14 us, and 8 ms with --mca mpi_yield_when_idle 0; with 2 ranks
    # 0.9 us, and 1.5 us with it at 1. Unbound it is faster up to 64 KiB with 4 ranks on 2 cores
    # (1 KiB 8.8 against 13.5 us), and the same with 2.
    command = ["mpirun", "-n", str(len(hosts)), "--oversubscribe", "--allow-run-as-root"]
    command += ["--bind-to", "none"]
    return [Process([*command, *WORKER, "openmpi"], QUIET)]


def tf_processes(
    command: Sequence[str], hosts: Sequence[Host], server: Host | None = None
) -> list[Process]:
    """`command` as the workers of a TensorFlow cluster, with as many threads as ringreduce's.

    With `server`, first as its coordinator and its parameter server, both on that host.
    """
    placed = [("worker", rank, host) for rank, host in enumerate(hosts)]
    if server is not None:
        placed = [("chief", 0, server), ("ps", 0, server), *placed]
    cluster: dict[str, list[str]] = {}
    for (kind, _, host), port in zip(placed, free_ports(len(placed)), strict=True):
        cluster.setdefault(kind, []).append(f"{host.address}:{port}")
    environment = worker_environment(Config(), default_threads(len(hosts))) | QUIET
    processes = []
    for kind, index, host in placed:
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        variables = environment | {"TF_CONFIG": json.dumps(config)}
        processes.append(Process([*host.prefix, *command], variables))
    return processes


def _tf_ring(hosts: Sequence[Host]) -> list[Process]:
    return tf_processes([*WORKER, "tf-ring"], hosts)


def _needs(module: str, remedy: str, *programs: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        there = importlib.util.find_spec(module) and all(map(shutil.which, programs))
        return None if there else remedy

    return missing


def _mpirun_version() -> str | None:
    result = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=20
    )
    return result.stdout.partition("\n")[0] or None


def _native_missing() -> str | None:
    return native.why_missing() if native.library() is None else None


ENTRIES = (
    Entry("ringreduce", "zmq", lambda: None, _ringreduce("zmq")),
    Entry("ringreduce", "shm", _native_missing, _ringreduce("shm")),
    Entry("ringreduce", "shm-registered", _native_missing, _ringreduce("shm", "--registered")),
    Entry("gloo", None, _needs("torch", "pip install torch (a CPU build is enough)"), _gloo),
    Entry(
        "openmpi",
        None,
        _needs(
            "mpi4py",
            "the system's packages openmpi-bin and libopenmpi-dev, then pip install mpi4py",
            "mpirun",
        ),
        _openmpi,
        _mpirun_version,
    ),
    Entry(
        "tf-ring",
        None,
        _needs("tensorflow", "pip install 'ringreduce[tensorflow]'"),
        _tf_ring,
        collectives=("all_reduce",),
    ),
)
