"""Which rank this process is, where another launcher than ours has started it.

`LAUNCHERS` is the table of launchers and the variables that they set; the first that has set its
own counts. Those that may start another launcher come last: in a Slurm job, a process of mpirun
has the SLURM_PROCID of a daemon. All others must name the same rank.

Few launchers give an address where ranks can meet. What is used instead:

- One host: 127.0.0.1 and a port made from the job's name.
- Several hosts: the host that the launcher names as its first, with a port of its own if nobody
  else listens on that, else with one made from the job's name. torchrun listens on MASTER_PORT, and
  Horovod's launcher on its port, so those two are never used.
- RINGREDUCE_RENDEZVOUS comes before all that.
"""

import hashlib
import json
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringreduce.vocabulary.endpoints import address, is_local
from ringreduce.vocabulary.errors import ConfigError

Variables = Mapping[str, str]

_PORT_MAX = 65535
# Below what Linux gives to outgoing connections (32768), above what services use.
_PORTS = range(20000, 29000)

# The first name of Slurm's short form of a list, as gpu[08-10,12],login: brackets hold ranges.
_RANGE = r"\d+(?:-\d+)?"
_FIRST = re.compile(rf"(?:[^][,\s]|\[{_RANGE}(?:,{_RANGE})*\])+(?=,|$)", re.ASCII)


class Launcher(NamedTuple):
    """One launcher's variables."""

    key: str  # its name in RINGREDUCE_LAUNCHER
    name: str  # its name for people
    # Sets of variables; one that is set as a whole shows that the launcher was used.
    signs: tuple[tuple[str, ...], ...]
    # Variables with the rank and the size, and then with those within its host, if there are any.
    place: tuple[str, ...]
    # Variables that together are equal on all ranks and differ between jobs.
    job: tuple[str, ...] = ()
    # host, port: variables with rank 0's host, and a port there that nobody else uses.
    host: str = ""
    port: str = ""
    # Makes variables from the launcher's, for the names above; None: it says nothing.
    derive: Callable[[Variables], Variables | None] = lambda variables: {}
    # Whether another launcher may run inside, with as many ranks or more.
    starts_others: bool = False
    shares_home: bool = False  # whether hosts of a job usually share the user's home

    def is_seen(self, variables: Variables) -> bool:
        """Whether it has started this process. An empty variable counts as none."""
        return any(all(variables.get(name) for name in sign) for sign in self.signs)


class LaunchedRank(NamedTuple):
    """This process's place as its launcher tells it; empty and None: it does not say."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    job: str  # text that is equal on all ranks, and differs between jobs
    host: str  # where rank 0 can listen
    port: int  # 0: any
    shares_home: bool  # whether hosts of the job usually share the user's home

    def __str__(self) -> str:
        by = self.launcher
        return f"rank {self.rank} of {self.size} by {' and '.join(by.place[:2])} ({by.name})"

    @property
    def is_local(self) -> bool:
        """Whether the ranks are known to meet within this host."""
        return self.local_size == self.size or is_local(self.host)

    def rendezvous(self) -> str:
        """``host:port`` for the ranks to meet. Raises ConfigError where nothing gives one."""
        host = "127.0.0.1" if self.local_size == self.size else self.host
        if not host or not (self.job or self.port):
            raise ConfigError(
                f"this is {self}, which gives no address where the ranks can meet",
                remedy="Set RINGREDUCE_RENDEZVOUS=HOST:PORT for all ranks, with the host of rank 0 "
                "and a free port there.",
            )
        digest = hashlib.blake2b(self.job.encode(errors="surrogatepass"), digest_size=8).digest()
        return address(host, self.port or _PORTS[int.from_bytes(digest, "big") % len(_PORTS)])


def find(variables: Variables) -> LaunchedRank | None:
    """This process's place according to the launcher that has started it; None if none has.

    ``RINGREDUCE_LAUNCHER`` names the one to ask, or ``none``. Raises ConfigError if a variable is
    missing or impossible, two launchers contradict each other, or the job has ranks that ringreduce
    does not have (``ps`` in ``TF_CONFIG``).
    """
    place = None
    asked = _asked(variables)
    for launcher in asked:
        if launcher.is_seen(variables) and (other := _read(launcher, variables)) is not None:
            place = other if place is None else _compared(place, other)
    if place is None and len(asked) == 1:
        (launcher,) = asked
        raise ConfigError(
            f"RINGREDUCE_LAUNCHER is {launcher.key!r}, and {launcher.name} has not started this "
            f"process: it sets {' or '.join(map(' and '.join, launcher.signs))}",
            remedy="Unset RINGREDUCE_LAUNCHER, or set it to none to train alone.",
        )
    return place


def _asked(variables: Variables) -> tuple[Launcher, ...]:
    choice = variables.get("RINGREDUCE_LAUNCHER")
    if not choice:
        return LAUNCHERS
    if choice != "none" and choice not in (keys := [launcher.key for launcher in LAUNCHERS]):
        accepted = ", ".join(keys)
        raise ConfigError(f"RINGREDUCE_LAUNCHER is {choice[:80]!r}; accepted: {accepted}, none")
    return tuple(launcher for launcher in LAUNCHERS if launcher.key == choice)


def _read(launcher: Launcher, variables: Variables) -> LaunchedRank | None:
    derived = launcher.derive(variables)
    if derived is None:
        return None
    variables = {**variables, **derived}
    rank_by, size_by, *local_by = launcher.place
    for name in (rank_by, size_by):
        if not variables.get(name):
            raise ConfigError(
                f"{launcher.name} seems to have started this process, but {name} is not set",
                remedy=f"Seen was {' or '.join(map(' and '.join, launcher.signs))}. Set "
                "RINGREDUCE_LAUNCHER=none to train alone.",
            )
    size = _whole(size_by, variables, 1, 1 << 31)
    rank = _whole(rank_by, variables, 0, size - 1)
    local_rank = local_size = None
    # Only together: one of them says nothing of the other ranks of this host.
    if local_by and all(map(variables.get, local_by)):
        local_size = _whole(local_by[1], variables, 1, size)
        local_rank = _whole(local_by[0], variables, 0, local_size - 1)
    job = [variables[name] for name in launcher.job if variables.get(name)]
    return LaunchedRank(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        job=" ".join([launcher.key, *job]) if job else "",
        host=variables.get(launcher.host, ""),
        port=_whole(launcher.port, variables, 1, _PORT_MAX) if variables.get(launcher.port) else 0,
        shares_home=launcher.shares_home,
    )


def _whole(name: str, variables: Variables, low: int, high: int) -> int:
    text = variables[name]
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    if not is_number or not low <= int(text) <= high:
        raise ConfigError(f"{name} is {text[:80]!r}; accepted: a whole number, {low} to {high}")
    return int(text)


def _compared(place: LaunchedRank, other: LaunchedRank) -> LaunchedRank:
    """`place`, completed from `other` where both name the same rank."""
    launcher = other.launcher
    place = place._replace(shares_home=place.shares_home or other.shares_home)
    if (place.rank, place.size) == (other.rank, other.size):
        if place.local_size is None:
            place = place._replace(local_rank=other.local_rank, local_size=other.local_size)
        if not place.host:
            place = place._replace(host=other.host, port=other.port)
        return place._replace(job=place.job or other.job)
    # Fewer ranks than it has tasks: each task would be a job of its own, which nobody means.
    if launcher.starts_others and other.size <= place.size:
        return place
    raise ConfigError(
        f"this is {place}, and {other}",
        remedy="Unset the variables that are wrong here, or name the launcher that has started "
        f"this process: RINGREDUCE_LAUNCHER={place.launcher.key} or {launcher.key}.",
    )


def _kubeflow(variables: Variables) -> Variables | None:
    """Refuse what only torchrun makes ranks of; it reads these variables and sets its own."""
    if variables.get("RANK"):
        return None
    processes = variables.get("PET_NPROC_PER_NODE", "1")
    if processes.isdecimal() and int(processes) > 1:
        raise ConfigError(
            f"PET_NPROC_PER_NODE is {processes}, but this process was started once for its node",
            remedy="Start the script with torchrun, or set numProcPerNode to 1.",
        )
    return {}


def _open_mpi(variables: Variables) -> Variables:
    """The host of mpirun, which usually has rank 0, if it has a single IPv4 address.

    The variable is ``JOB;tcp://ADDRESS,ADDRESS:PORT;tcp6://...``. Of several addresses nothing says
    which of them the other hosts reach.
    """
    match = re.search(r";tcp://([\d.]+):\d+", variables.get("OMPI_MCA_orte_hnp_uri", ""))
    return {"host of mpirun": match[1]} if match else {}


def _pmi(variables: Variables) -> Variables:
    """Tell jobs within one host apart by the process at the other end of PMI_FD.

    Neither MPICH nor Intel MPI names a job, but ranks of a host inherit sockets from one proxy.
    """
    text = variables.get("PMI_FD", "")
    if variables.get("MPI_LOCALNRANKS") != variables.get("PMI_SIZE"):
        return {}
    if not hasattr(socket, "SO_PEERCRED") or not text.isdecimal() or len(text) > 6:
        return {}
    descriptor = int(text)
    try:
        blocks = os.get_blocking(descriptor)
        end = socket.socket(fileno=descriptor)
    except OSError:  # Closed by a program in between, or no socket.
        return {}
    try:
        if end.family != socket.AF_UNIX:
            return {}
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    finally:
        # It is MPI's: neither closed here, nor changed by a default timeout of sockets.
        end.detach()
        os.set_blocking(descriptor, blocks)
    return {"process of PMI_FD": str(struct.unpack("3i", credentials)[0])}


def _slurm(variables: Variables) -> Variables:
    """The first node of the step, which has task 0; and that this node has all tasks, if it has."""
    nodes, tasks = variables.get("SLURM_STEP_NODELIST"), variables.get("SLURM_STEP_NUM_TASKS", "")
    derived = {"first of SLURM_STEP_NODELIST": first_host(nodes)} if nodes else {}
    return derived | {"tasks of the node": tasks * (variables.get("SLURM_STEP_NUM_NODES") == "1")}


def first_host(text: str) -> str:
    """Return the first of Slurm's ``gpu[08-10],login``: gpu08. Raises ConfigError for no list."""
    match = _FIRST.match(text)
    if not match:
        raise ConfigError(f"cannot read {text[:80]!r} as Slurm's short form of a list")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", match[0])


def _tf_config(variables: Variables) -> Variables | None:
    """The rank of the task, and the addresses of all, chief first; None for no cluster.

    The evaluator is no rank: it trains nothing, so it is alone. Refused is what is no cluster of a
    chief (or master) and workers, or has parameter servers.
    """
    try:
        config = json.loads(variables["TF_CONFIG"])
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _unusable("it is no JSON object")
    cluster, task = config.get("cluster") or {}, config.get("task") or {}
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise _unusable("cluster and task must be objects")
    kind, index = task.get("type"), task.get("index", 0)
    if not cluster:  # As for TensorFlow: nothing is distributed.
        return None
    if cluster.get("ps") or kind == "ps":
        raise _unusable(
            "it has parameter servers (ps), and ringreduce has none: every worker keeps the whole "
            "model, and they exchange gradients with each other"
        )
    tasks: list[tuple[object, int]] = []
    addresses: list[str] = []
    for part in ("chief", "master", "worker"):
        listed = cluster.get(part) or []
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise _unusable(f"{part} must be a list with the addresses of all its tasks")
        tasks += [(part, number) for number in range(len(listed))]
        addresses += listed
    if kind == "evaluator":
        tasks, addresses = [(kind, index)], [""]
    if type(index) is not int or (kind, index) not in tasks:
        raise _unusable(f"the cluster has no task of type {kind!r} with index {index!r}")
    host, _, port = addresses[0].rpartition(":")
    if not host or addresses[0].endswith("]"):
        host, port = addresses[0], ""
    return {
        "TF_CONFIG's task": str(tasks.index((kind, index))),
        "TF_CONFIG's cluster": str(len(addresses)),
        "TF_CONFIG's addresses": ",".join(addresses),
        "host of TF_CONFIG's first task": host.strip("[]"),
        "port of TF_CONFIG's first task": port,
    }


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"cannot use TF_CONFIG: {why}",
        remedy='Expected is {"cluster": {"chief": ["HOST:PORT"], "worker": ["HOST:PORT", ...]}, '
        '"task": {"type": "worker", "index": 0}}, where chief may be absent.',
    )


_TORCHRUN = Launcher(
    "torchrun",
    "torchrun",
    (("TORCHELASTIC_RUN_ID",),),
    place=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # Not the count of restarts: it differs between hosts after some failures.
    job=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    host="MASTER_ADDR",
)

LAUNCHERS = (
    _TORCHRUN,
    # PyTorchJob, and scripts that set these by hand; RANK alone means many things.
    _TORCHRUN._replace(
        key="torch", name="PyTorch", signs=(("RANK", "WORLD_SIZE"),), port="MASTER_PORT"
    ),
    Launcher(
        "horovod",
        "Horovod",
        (("HOROVOD_RANK",), ("HOROVOD_SIZE",)),
        place=("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        host="HOROVOD_GLOO_RENDEZVOUS_ADDR",
        shares_home=True,
    ),
    Launcher(
        "openmpi",
        "Open MPI",
        (("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",)),
        place=(
            *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ),
        job=("PMIX_NAMESPACE",),
        host="host of mpirun",
        derive=_open_mpi,
        shares_home=True,
    ),
    Launcher(
        "mpich",
        "MPICH or Intel MPI",
        (("PMI_RANK",), ("PMI_SIZE",)),
        place=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        job=("process of PMI_FD",),
        derive=_pmi,
        shares_home=True,
    ),
    Launcher(
        "tf_config",
        "TF_CONFIG",
        (("TF_CONFIG",),),
        place=("TF_CONFIG's task", "TF_CONFIG's cluster"),
        job=("TF_CONFIG's addresses",),
        host="host of TF_CONFIG's first task",
        port="port of TF_CONFIG's first task",
        derive=_tf_config,
        starts_others=True,
    ),
    Launcher(
        "kubeflow",
        "Kubeflow Trainer",
        (("PET_NODE_RANK", "PET_NNODES"),),
        place=("PET_NODE_RANK", "PET_NNODES"),
        job=("PET_MASTER_ADDR", "PET_MASTER_PORT"),
        host="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
        derive=_kubeflow,
        starts_others=True,
    ),
    # The step's variables: a job's script has SLURM_PROCID too, and is no task of a step.
    Launcher(
        "slurm",
        "Slurm",
        (("SLURM_STEP_ID", "SLURM_PROCID"),),
        place=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "tasks of the node"),
        job=("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        host="first of SLURM_STEP_NODELIST",
        derive=_slurm,
        starts_others=True,
        shares_home=True,
    ),
)
