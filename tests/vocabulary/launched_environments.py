"""What launchers have set in real processes: all that starts with their names, or is named alike.

Recorded from Open MPI 4.1.4, MPICH 4.0.2, Slurm 22.05 and torchrun 1.13, which sets what 2.x does;
the others are those of the sources of Kubeflow Trainer 2, Horovod 0.28 and Keras 3.15, and of
TensorFlow's documentation.
"""

import json


def _set(text: str) -> dict[str, str]:
    """The variables of ``NAME=value`` words; the others before say in what process they were."""
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


OPEN_MPI = _set("""mpirun -n 2
    OMPI_APP_CTX_NUM_PROCS=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2
    OMPI_MCA_ess_base_jobid=122290177
    OMPI_MCA_orte_hnp_uri=122290176.0;tcp://192.0.2.2:49663;tcp6://[fd00::2]:56041
    OMPI_MCA_orte_num_nodes=1 OMPI_UNIVERSE_SIZE=2 PMIX_HOSTNAME=vm PMIX_NAMESPACE=122290177
    PMIX_RANK=1 PMIX_SERVER_URI2=122290176.0;tcp4://127.0.0.1:37757""")
MPICH = _set("""mpiexec.hydra -n 2
    HYDI_CONTROL_FD=7 MPIR_CVAR_CH3_INTERFACE_HOSTNAME=vm MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1
    PMI_FD=8 PMI_RANK=1 PMI_SIZE=2""")
_SLURM_JOB = _set("""
    SLURM_CLUSTER_NAME=rec SLURM_GTIDS=0 SLURM_JOBID=2 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=n1
    SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NODELIST=n1
    SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2""")
SRUN = _set("""srun -N 2 -n 3: the last of its tasks.
    SLURMD_NODENAME=n2 SLURM_CLUSTER_NAME=rec SLURM_GTIDS=2 SLURM_JOBID=1 SLURM_JOB_ID=1
    SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1
    SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=n[1-2] SLURM_NPROCS=3
    SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2]
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1
    SLURM_TASKS_PER_NODE=2,1""")
SRUN_PMI2 = _SLURM_JOB | _set("""srun --mpi pmi2 -n 2
    PMI_FD=13 PMI_JOBID=2.0 PMI_RANK=1 PMI_SIZE=2 SLURM_LOCALID=1 SLURM_PROCID=1 SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2
    SLURM_STEP_TASKS_PER_NODE=2""")
# sbatch -n 2: the script itself, which is task 0 of nothing.
SBATCH_SCRIPT = _SLURM_JOB
SALLOC_SHELL = _set("""salloc -n 2: the shell.
    SLURM_CLUSTER_NAME=rec SLURM_JOB_ID=4 SLURM_JOB_NODELIST=n1 SLURM_JOB_NUM_NODES=1 SLURM_NNODES=1
    SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2""")
INTERACTIVE = _SLURM_JOB | _set("""srun --pty bash
    SLURM_NTASKS=1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1
    SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1""")
_DAEMON = _set("""the step of a daemon of mpirun or mpiexec.hydra in an sbatch script
    SLURM_NTASKS=1 SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=1
    SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=1""")
OPEN_MPI_IN_SLURM = _SLURM_JOB | _DAEMON | OPEN_MPI
MPICH_IN_SLURM = _SLURM_JOB | _DAEMON | MPICH
TORCHRUN = _set("""torchrun --nnodes 2 --nproc-per-node 4 --master-addr 10.0.0.4
    GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=10.0.0.4
    MASTER_PORT=29500 RANK=5 ROLE_NAME=default ROLE_RANK=5 ROLE_WORLD_SIZE=8
    TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=none
    TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=8""")
TORCHRUN_STANDALONE = TORCHRUN | _set("""torchrun --standalone --nproc-per-node 2, of 2.x
    GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=vm MASTER_PORT=44321 RANK=1
    ROLE_RANK=1 ROLE_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=2b1e7c2d-0c0f-4c5e-9f6e-0b9d0a8f1c11
    WORLD_SIZE=2""")
# PyTorchJob of Kubeflow's training operator, without torchrun.
PYTORCH_JOB = _set("MASTER_ADDR=job-master-0 MASTER_PORT=23456 RANK=1 WORLD_SIZE=2")
TRAINER = _set("""A TrainJob of two nodes, without torchrun.
    PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500 PET_NNODES=2 PET_NODE_RANK=1
    PET_NPROC_PER_NODE=auto""")
HOROVOD = _set("""horovodrun -np 4 -H a:2,b:2
    HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2
    HOROVOD_GLOO_IFACE=eth0 HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.4 HOROVOD_GLOO_RENDEZVOUS_PORT=38411
    HOROVOD_HOSTNAME=b HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 HOROVOD_RANK=3 HOROVOD_SIZE=4""")


def tf_config(kind: str = "worker", index: object = 0, **cluster: object) -> dict[str, str]:
    """TF_CONFIG of one task; by default of a TFJob's chief and two workers."""
    cluster = cluster or {
        "chief": ["job-chief-0.ns.svc:2222"],
        "worker": ["job-worker-0.ns.svc:2222", "job-worker-1.ns.svc:2222"],
    }
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}
