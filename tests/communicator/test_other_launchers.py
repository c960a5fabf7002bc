"""Rings under real Open MPI, MPICH, torchrun and Slurm, with no variable set by hand.

Slurm's daemons and MUNGE's run as this user, on free ports, with a key and folders of their own.
Its nodes are two daemons of this host, whose names are addresses.
"""

import getpass
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes import Process, clean_environment, wait_until

pytestmark = pytest.mark.full

# torchrun takes 40 s to start on a busy machine that has not read torch yet.
WAIT_S = 100.0
PROGRAMS = ("mpirun.openmpi", "mpiexec.hydra", "torchrun")

PROGRAM = """
import numpy as np
import ringreduce as rr

ring = rr.init()
total = ring.all_reduce(np.arange(3.0) + ring.rank).tolist()
secret = "secret" if ring.config.secret else "no secret"
# One line in one call, since launchers mix what ranks write.
print(f"{ring.rank}/{ring.size} {ring.local_rank}/{ring.local_size} {total} {secret}\\n", end="")
"""


def expected(*local: str) -> list[str]:
    """What ranks print of which the launcher says this of their hosts."""
    size = len(local)
    total = [float(sum(rank + index for rank in range(size))) for index in range(3)]
    return [f"{rank}/{size} {here} {total} secret" for rank, here in enumerate(local)]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)
    return path


def outputs(
    directory: Path, *commands: list[str], unlike: Sequence[dict[str, str]] = (), **variables: str
) -> list[list[str]]:
    """Each command's lines, sorted; all run at once, in a home that has no secret yet.

    `unlike` are variables of single commands.
    """
    require(*(word for command in commands for word in command if word in PROGRAMS))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                Process(
                    command,
                    directory,
                    name=str(number),
                    environment=clean_environment(
                        HOME=str(directory), **variables, **(unlike[number] if unlike else {})
                    ),
                )
            )
            for number, command in enumerate(commands)
        ]
        for process in processes:
            assert process.wait(WAIT_S) == 0, process.stderr
        return [sorted(process.stdout.splitlines()) for process in processes]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in taken]


def require(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mpi", ["mpirun.openmpi", "mpiexec.hydra"])
def test_mpi(script, mpi, size):
    command = [mpi, "-n", str(size), sys.executable, str(script)]
    here = [f"{rank}/{size}" for rank in range(size)]
    assert outputs(script.parent, command, **OPEN_MPI) == [expected(*here)]


def test_two_jobs_of_mpich_at_once(script):
    command = ["mpiexec.hydra", "-n", "2", sys.executable, str(script)]
    assert outputs(script.parent, command, command) == [expected("0/2", "1/2")] * 2


# Redirected and shown again: with its defaults, torch 1.13 starts nothing on Python 3.11.
TORCHRUN = ["torchrun", "--redirects", "1", "--tee", "1", "--no_python"]


def by_torchrun(script: Path, *options: list[str], **variables: str) -> list[str]:
    """The lines of all nodes, each of two ranks, that torchrun starts with these options."""
    command = ["--nproc_per_node", "2", sys.executable, str(script)]
    nodes = [[*TORCHRUN, *own, *command] for own in options]
    found = outputs(script.parent, *nodes, OMP_NUM_THREADS="1", **variables)
    return sorted(line.partition("]:")[2] for lines in found for line in lines)


@pytest.mark.parametrize("option", ["--nnodes=1", "--standalone"])
def test_torchrun_on_one_node(script, option):
    lines = by_torchrun(script, [option], PET_MASTER_PORT=str(free_ports(1)[0]))
    assert lines == expected("0/2", "1/2")


def test_torchrun_on_two_nodes(script):
    address = ["--nnodes", "2", "--master_addr", "127.0.0.1"]
    address += ["--master_port", str(free_ports(1)[0])]
    lines = by_torchrun(script, *([*address, "--node_rank", node] for node in "01"))
    assert lines == expected("0/2", "1/2", "0/2", "1/2")


def test_tf_config(script):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    cluster = {"chief": addresses[:1], "worker": addresses[1:], "evaluator": ["127.0.0.1:1"]}
    tasks = [json.dumps({"cluster": cluster, "task": {"type": kind}}) for kind in cluster]
    found = outputs(
        script.parent,
        *[[sys.executable, str(script)]] * 3,
        unlike=[{"TF_CONFIG": task} for task in tasks],
    )
    alone = "0/1 0/1 [0.0, 1.0, 2.0] no secret"
    assert [line for lines in found for line in lines] == [*expected("0/2", "1/2"), alone]


SLURM_CONF = """
ClusterName=ring
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of two nodes: the variables with which srun finds it."""
    require("srun", "slurmctld", "slurmd", "munged")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("127.0.0.1", "127.0.0.2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    host = platform.node().partition(".")[0]
    text = SLURM_CONF.format(
        host=host, ports=free_ports(3), folder=folder, user=getpass.getuser(), cores=os.cpu_count()
    )
    (folder / "slurm.conf").write_text(text)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", "--num-threads=2"] + [
        f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")
    ]
    daemons = [
        [*munged, f"--socket={folder}/munge.socket"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "127.0.0.1"],
        ["slurmd", "-D", "-N", "127.0.0.2"],
    ]
    environment = clean_environment(**variables)
    with ExitStack() as stack:
        for number, command in enumerate(daemons):
            name = f"{number}-{command[0]}"
            daemon = Process(command, folder, name=name, environment=environment)
            stack.enter_context(daemon)
            if number == 0:
                wait_until((folder / "munge.socket").exists, "munged to listen")

        def nodes():
            command = ["sinfo", "--noheader", "--format=%T %D"]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=30, check=False
            )
            return done.stdout.strip()

        wait_until(lambda: nodes() == "idle 2", "Slurm's nodes")
        yield variables


SRUN = ["srun", "-N", "2", "-n", "3"]
ALLOCATED = ["salloc", "-Q", "-N", "1", "-n", "2"]


@pytest.mark.parametrize(
    ("command", "places"),
    [
        (SRUN, ["0/2", "1/2", "0/1"]),
        (["srun", "--mpi=pmi2", "-N", "1", "-n", "2"], ["0/2", "1/2"]),
        *(([*ALLOCATED, mpi, "-n", "2"], ["0/2", "1/2"]) for mpi in PROGRAMS[:2]),
    ],
    ids=["two nodes", "PMI", "Open MPI", "MPICH"],
)
def test_srun_and_mpi_within_a_job_of_slurm(script, slurm, command, places):
    command = [*command, sys.executable, str(script)]
    assert outputs(script.parent, command, **slurm, **OPEN_MPI) == [expected(*places)]


def test_a_script_without_srun_trains_alone_and_says_so(script, slurm):
    command = [*ALLOCATED, sys.executable, str(script)]
    environment = clean_environment(HOME=str(script.parent), **slurm)
    with Process(command, script.parent, environment=environment) as process:
        assert process.wait(WAIT_S) == 0, process.stderr
        assert process.stdout == "0/1 0/1 [0.0, 1.0, 2.0] no secret\n"
        assert "2 tasks" in process.stderr
        assert "`srun python ...`" in process.stderr
