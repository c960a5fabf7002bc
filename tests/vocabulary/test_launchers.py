"""Other launchers: which rank their variables make, where the ranks meet, what is refused."""

import logging
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.endpoints import host_and_port
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.launchers import LAUNCHERS, find
from ringreduce.vocabulary.secret import users_secret
from tests.vocabulary import launched_environments as seen
from tests.vocabulary.launched_environments import tf_config

# A port that was made from the job's name.
MADE = r"2[0-8]\d\d\d"
# Enough for jobs over several hosts, so that no file is made in a home.
SECRET = {"RINGREDUCE_SECRET": "correct horse battery staple"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "expected", "rendezvous"),
    [
        (seen.TORCHRUN, (5, 8, 1, 4), rf"10\.0\.0\.4:{MADE}"),
        (seen.TORCHRUN_STANDALONE, (1, 2, 1, 2), rf"127\.0\.0\.1:{MADE}"),
        (seen.PYTORCH_JOB, (1, 2, None, None), "job-master-0:23456"),
        (seen.TORCHRUN | seen.TRAINER, (5, 8, 1, 4), rf"10\.0\.0\.4:{MADE}"),
        (seen.TRAINER, (1, 2, None, None), r"job-node-0-0\.job:29500"),
        (seen.TRAINER | {"PET_NPROC_PER_NODE": "1"}, (1, 2, None, None), r"job-node.*:29500"),
        (seen.HOROVOD, (3, 4, 1, 2), rf"10\.0\.0\.4:{MADE}"),
        (seen.OPEN_MPI, (1, 2, 1, 2), rf"127\.0\.0\.1:{MADE}"),
        (seen.OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, (1, 4, 1, 2), rf"192\.0\.2\.2:{MADE}"),
        (seen.OPEN_MPI_IN_SLURM, (1, 2, 1, 2), rf"127\.0\.0\.1:{MADE}"),
        (seen.SRUN, (2, 3, None, None), f"n1:{MADE}"),
        (seen.SRUN_PMI2, (1, 2, 1, 2), rf"127\.0\.0\.1:{MADE}"),
        (seen.SRUN | seen.TORCHRUN, (5, 8, 1, 4), rf"10\.0\.0\.4:{MADE}"),
        (tf_config(worker=["10.0.0.1", "10.0.0.2"]), (0, 2, None, None), rf"10\.0\.0\.1:{MADE}"),
        (tf_config("chief"), (0, 3, None, None), r"job-chief-0\.ns\.svc:2222"),
        (tf_config("worker", 1), (2, 3, None, None), r"job-chief-0\.ns\.svc:2222"),
        (tf_config("worker", 1, worker=["[::2]:1", "b:2"]), (1, 2, None, None), r"\[::2\]:1"),
        (tf_config("worker", 0, master=["a:1"], worker=["b:2"]), (1, 2, None, None), "a:1"),
    ],
)
def test_rank_and_rendezvous(variables, expected, rendezvous):
    config = Config.from_environment(variables | SECRET)
    assert (config.rank, config.size, config.local_rank, config.local_size) == expected
    assert re.fullmatch(rendezvous, config.rendezvous)
    assert host_and_port(config.rendezvous)
    assert config.job_id


ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
TWO_ADDRESSES = seen.OPEN_MPI | {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1,10.1.0.1:5",
}


@pytest.mark.parametrize(
    "variables",
    [
        seen.SBATCH_SCRIPT,
        seen.SALLOC_SHELL,
        seen.INTERACTIVE,
        tf_config("evaluator"),
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": ""},
        {"RANK": "3"},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        tf_config("chief", 0, chief=["a:1"]),
        seen.OPEN_MPI | {"RINGREDUCE_LAUNCHER": "none"},
        seen.PYTORCH_JOB | ALONE,
    ],
)
def test_what_is_no_job_of_several_ranks(variables):
    config = Config.from_environment(variables)
    assert (config.rank, config.size, config.rendezvous, config.secret) == (0, 1, "", "")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (without(seen.TORCHRUN, "RANK"), ["torchrun", "RANK is not set"]),
        (without(seen.OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_SIZE is not set"]),
        (without(seen.SRUN, "SLURM_STEP_NUM_TASKS"), ["SLURM_STEP_NUM_TASKS is not set"]),
        (without(seen.HOROVOD, "HOROVOD_RANK"), ["Horovod", "HOROVOD_RANK is not set"]),
        (seen.TORCHRUN | {"RANK": "8"}, ["RANK is '8'", "0 to 7"]),
        (seen.TORCHRUN | {"RANK": "-1"}, ["RANK is '-1'"]),
        (seen.TORCHRUN | {"WORLD_SIZE": "eight"}, ["WORLD_SIZE is 'eight'"]),
        (seen.TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK is '4'", "0 to 3"]),
        (seen.PYTORCH_JOB | {"MASTER_PORT": "65536"}, ["MASTER_PORT is '65536'", "1 to 65535"]),
        (without(seen.PYTORCH_JOB, "MASTER_ADDR"), ["no address", "RINGREDUCE_RENDEZVOUS"]),
        (seen.TRAINER | {"PET_NNODES": "1:2"}, ["PET_NNODES is '1:2'"]),
        (seen.TRAINER | {"PET_NPROC_PER_NODE": "4"}, ["PET_NPROC_PER_NODE is 4", "torchrun"]),
        (seen.MPICH | {"PMI_SIZE": "4"}, ["rank 1 of 4", "no address", "RINGREDUCE_RENDEZVOUS"]),
        (TWO_ADDRESSES, ["Open MPI", "no address", "RINGREDUCE_RENDEZVOUS"]),
        (seen.SRUN | {"SLURM_STEP_NODELIST": "n[1-"}, ["cannot read 'n[1-'"]),
        (tf_config("worker", 0, ps=["a:1"], worker=["b:1"]), ["TF_CONFIG", "parameter servers"]),
        (tf_config("ps"), ["TF_CONFIG", "parameter servers"]),
        (tf_config("worker", 2), ["no task of type 'worker' with index 2"]),
        (tf_config("worker", "1"), ["no task of type 'worker' with index '1'"]),
        (tf_config("trainer"), ["no task of type 'trainer'"]),
        (tf_config("worker", 0, worker={"0": "a:1"}), ["worker must be a list"]),
        (tf_config("chief", 0, chief=["a:http"], worker=["b:1"]), ["is 'http'"]),
        ({"TF_CONFIG": "{"}, ["TF_CONFIG", "no JSON object"]),
        ({"TF_CONFIG": "[]"}, ["TF_CONFIG", "no JSON object"]),
        ({"TF_CONFIG": '{"cluster": [1]}'}, ["TF_CONFIG", "must be objects"]),
        ({"RINGREDUCE_LAUNCHER": "mpi"}, ["RINGREDUCE_LAUNCHER is 'mpi'", "openmpi", "none"]),
        (seen.SRUN | {"RINGREDUCE_LAUNCHER": "openmpi"}, ["OMPI_COMM_WORLD_RANK"]),
        (seen.TORCHRUN | seen.TRAINER | {"RINGREDUCE_LAUNCHER": "kubeflow"}, ["PET_NODE_RANK"]),
        # Left over in the user's shell: each process would train alone.
        (seen.OPEN_MPI | ALONE, ["rank 0 of 1", "rank 1 of 2", "RINGREDUCE_LAUNCHER"]),
        (seen.SRUN | ALONE, ["rank 0 of 1", "rank 2 of 3", "RINGREDUCE_LAUNCHER"]),
        (seen.OPEN_MPI | {"PMI_RANK": "0", "PMI_SIZE": "2"}, ["rank 0 of 2", "rank 1 of 2"]),
        (seen.TORCHRUN | seen.HOROVOD, ["=torchrun or horovod", "rank 5 of 8", "rank 3 of 4"]),
    ],
)
def test_what_is_refused_names_the_variables(variables, named):
    with pytest.raises(ConfigError) as caught:
        Config.from_environment(variables | SECRET)
    assert [text for text in named if text not in str(caught.value)] == []


def test_our_own_variables_and_arguments_decide_also_between_launchers():
    ours = {"RANK": "0", "SIZE": "2", "RENDEZVOUS": "127.0.0.1:4000", "JOB_ID": "a"}
    ours = {f"RINGREDUCE_{name}": text for name, text in ours.items()}
    assert Config.from_environment(seen.SRUN | ours).size == 2
    assert Config.from_environment(seen.SRUN, rank=0, size=1).size == 1
    assert Config.from_environment(seen.OPEN_MPI | SECRET, timeout_s=3.0).timeout_s == 3
    for launcher, rank in (("horovod", 3), ("torchrun", 5)):
        both = seen.TORCHRUN | seen.HOROVOD | SECRET | {"RINGREDUCE_LAUNCHER": launcher}
        assert Config.from_environment(both).rank == rank
    with pytest.raises(ConfigError, match="RINGREDUCE_SIZE"):
        Config.from_environment(seen.SRUN | {"RINGREDUCE_RANK": "0"})


def test_a_rendezvous_by_hand_completes_a_launcher():
    by_hand = {"RINGREDUCE_RENDEZVOUS": "10.0.0.9:4000"}
    config = Config.from_environment(seen.MPICH | {"PMI_SIZE": "4"} | by_hand | SECRET)
    assert (config.rank, config.size, config.rendezvous) == (1, 4, "10.0.0.9:4000")
    # Hosts have different proxies, so only this is known to all ranks.
    assert config.job_id == "10.0.0.9:4000"
    assert Config.from_environment(seen.SRUN | by_hand | SECRET).job_id == "slurm rec 1 0"


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="needs Linux")
def test_jobs_of_mpich_on_a_host_are_told_apart_by_their_proxies(request):
    ours, theirs = socket.socketpair()
    request.addfinalizer(lambda: socket.setdefaulttimeout(None))
    socket.setdefaulttimeout(1.0)  # What is made of a descriptor from now on would not block.
    with ours, theirs:
        variables = seen.MPICH | SECRET | {"PMI_FD": str(ours.fileno())}
        config = Config.from_environment(variables)
        assert config.job_id == f"mpich {os.getpid()}"
        assert re.fullmatch(rf"127\.0\.0\.1:{MADE}", config.rendezvous)
        inside_slurm = Config.from_environment(variables | seen.MPICH_IN_SLURM | variables)
        assert inside_slurm.rendezvous == config.rendezvous
        assert os.get_blocking(ours.fileno())
    with pytest.raises(ConfigError, match="RINGREDUCE_RENDEZVOUS"):
        Config.from_environment(variables)  # The socket is closed.


def test_a_descriptor_that_is_no_unix_socket_names_no_job():
    with socket.socket() as tcp, open(os.devnull) as file:
        for descriptor in (tcp.fileno(), file.fileno()):
            with pytest.raises(ConfigError, match="no address"):
                Config.from_environment(seen.MPICH | {"PMI_FD": str(descriptor)})


def test_all_ranks_of_a_job_meet_at_one_port_and_other_jobs_elsewhere():
    first = Config.from_environment(seen.SRUN | SECRET)
    rank_0 = seen.SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    same = Config.from_environment(rank_0 | SECRET)
    assert (same.rank, same.rendezvous, same.job_id) == (0, first.rendezvous, first.job_id)
    other = Config.from_environment(seen.SRUN | {"SLURM_STEP_ID": "1"} | SECRET)
    assert other.job_id != first.job_id
    assert other.rendezvous != first.rendezvous


def test_every_launcher_is_named_once():
    keys = [launcher.key for launcher in LAUNCHERS]
    assert len(set(keys)) == len(keys)
    assert find({}) is None


def test_one_host_gets_the_users_secret_which_is_made_once(tmp_path):
    home = {"HOME": str(tmp_path)}
    first = Config.from_environment(seen.OPEN_MPI | home).secret
    assert re.fullmatch("[0-9a-f]{64}", first)
    folder = tmp_path / ".ringreduce"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "secret")] == [0o700, 0o600]
    assert os.listdir(folder) == ["secret"]
    for launched in (seen.SRUN, seen.TORCHRUN):
        assert Config.from_environment(launched | home).secret == first
    assert Config.from_environment(seen.SRUN | home | SECRET).secret == SECRET["RINGREDUCE_SECRET"]


def test_a_secret_is_made_only_where_hosts_share_a_home(tmp_path):
    for variables, home in (
        *((each, tmp_path) for each in (seen.TORCHRUN, seen.TRAINER, tf_config("chief"))),
        *((seen.OPEN_MPI, home) for home in ("", "relative", "/nonexistent")),
    ):
        assert not Config.from_environment(variables | {"HOME": str(home)}).secret
        assert not os.listdir(tmp_path)
    assert Config.from_environment(seen.SRUN | seen.TORCHRUN | {"HOME": str(tmp_path)}).secret
    assert os.listdir(tmp_path)


def test_the_users_secret_must_be_private(tmp_path):
    users_secret(str(tmp_path), makes_one=True)
    (tmp_path / ".ringreduce" / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Config.from_environment(seen.OPEN_MPI | {"HOME": str(tmp_path)})


def test_ranks_that_make_the_secret_at_once_get_the_same(tmp_path):
    gate = threading.Barrier(8)

    def make(_: int) -> str:
        gate.wait()
        return users_secret(str(tmp_path), makes_one=True)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(make, range(8)))) == 1
    assert os.listdir(tmp_path / ".ringreduce") == ["secret"]


def test_the_choice_is_logged_once_without_the_secret(tmp_path, caplog):
    variables = seen.OPEN_MPI | {"HOME": str(tmp_path), "PMIX_NAMESPACE": "logged once"}
    with caplog.at_level(logging.INFO, "ringreduce"):
        config = Config.from_environment(variables)
        Config.from_environment(variables)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    for text in ("Open MPI", "rank 1 of 2", "OMPI_COMM_WORLD_RANK", config.rendezvous):
        assert text in record.getMessage()
    assert config.secret not in record.getMessage()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        # A script that forgets srun.
        (seen.SBATCH_SCRIPT | {"SLURM_NTASKS": "7"}, "srun"),
        (seen.SALLOC_SHELL | {"SLURM_NTASKS": "8"}, "srun"),
        (seen.SBATCH_SCRIPT | {"SLURM_NTASKS": "9", "RINGREDUCE_LAUNCHER": "none"}, None),
        (seen.SBATCH_SCRIPT | {"SLURM_NTASKS": "1"}, None),
        (seen.INTERACTIVE, None),
        # Half of what PyTorch sets.
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "WORLD_SIZE=4 is set, and RANK is not"),
        ({"RANK": "0", "MASTER_ADDR": "a"}, "RANK=0 is set, and WORLD_SIZE is not"),
        ({"RANK": "1"}, "RANK=1 is set, and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a", "RINGREDUCE_LAUNCHER": "none"}, None),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "a"}, None),
        ({"RANK": "0"}, None),
        ({"RANK": "high"}, None),
        ({"WORLD_SIZE": "4"}, None),
        (seen.SRUN | {"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, None),
    ],
)
def test_a_process_that_trains_alone_by_mistake_is_warned_once(variables, said, warned):
    texts = warned(variables)
    assert len(texts) == (said is not None)
    assert all(said in text and "RINGREDUCE_LAUNCHER=none" in text for text in texts)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
@pytest.mark.parametrize(
    ("own", "parents", "rank", "is_warned"),
    [(1, 64, "0", True), (16, 64, "0", True), (17, 64, "0", False), (1, 65, "1", False)],
)
def test_cores_that_mpirun_leaves_idle_are_said_by_rank_0(
    own, parents, rank, is_warned, monkeypatch, warned
):
    cores = {0: own, os.getppid(): parents}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores[process])))
    ours = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
    expected = [f"mpirun has bound this process to {own} of {parents} cores"] if is_warned else []
    assert [text.partition(",")[0] for text in warned(seen.OPEN_MPI | ours)] == expected
