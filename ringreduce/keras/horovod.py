"""What Horovod's users ask for under its names, and what it is called here.

Names that mean the same have the same name. Those that do not are not there, so that nothing means
something else in silence; asking for one says what to use.
"""

from __future__ import annotations

__all__ = ["advice_on_name", "advice_on_option"]

_PAGE = "docs/from-horovod.md has the whole table"
_MEANS = "leave it out: gradients are always averaged"

_NAMES = {
    "Adasum": "there is none",
    "Average": 'write op="mean"; for gradients leave it out, they are always averaged',
    "Max": 'write op="max"',
    "Min": 'write op="min"',
    "PartialDistributedOptimizer": "use DistributedOptimizer(local_variables=)",
    "Product": 'write op="product"',
    "Sum": 'write op="sum"; gradients are always averaged',
    "allgather": "use all_gather(tensor)",
    "allgather_object": "use all_gather_object(value)",
    "allreduce": 'use all_reduce(tensor, op="mean"); without op it is the sum',
    "alltoall": "there is none",
    "cross_rank": "there is none: rank() // local_size(), where hosts have equally many ranks",
    "cross_size": "there is none: size() // local_size(), where hosts have equally many ranks",
    "elastic": "there is none: a job that fails is started again, from BackupAndRestore",
    "grouped_allreduce": 'use all_reduce([...], op="mean")',
    "mpi_enabled": "there is no MPI",
    "nccl_built": "there is no NCCL",
    "reducescatter": "use reduce_scatter(tensor)",
    "start_timeline": "use ringreduce run --log-dir DIR, and ringreduce report DIR",
}
_OPTIONS = {
    "average_aggregated_gradients": "leave it out: the mean of accumulated steps is applied",
    "backward_passes_per_step": "use accumulate_steps; it is always the mean of the steps",
    "device_dense": "leave it out: there is one way to reduce",
    "device_sparse": "leave it out: there is one way to reduce",
    "gradient_predivide_factor": "leave it out: sums are divided before they are rounded",
    "groups": "leave it out, or use bucket_bytes",
    "name": "leave it out: it has the name of the optimizer it wraps",
    "num_groups": "leave it out, or use bucket_bytes",
    "op": _MEANS,
    "process_set": "use communicator",
    "scale_local_gradients": "leave it out: gradients of local variables stay as they are",
}


def advice_on_name(name: str) -> str:
    """Why ``ringreduce.keras`` has no `name`, for an AttributeError."""
    plain = f"module 'ringreduce.keras' has no attribute {name!r}"
    return f"{plain}: {_NAMES[name]} ({_PAGE})" if name in _NAMES else plain


def advice_on_option(name: str) -> str:
    """Why ``DistributedOptimizer`` takes no `name`, for a TypeError."""
    plain = f"DistributedOptimizer got an unexpected keyword argument {name!r}"
    return f"{plain}: {_OPTIONS[name]} ({_PAGE})" if name in _OPTIONS else plain
