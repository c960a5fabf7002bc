"""Says what to use instead of Horovod's names.

A name is here only if it means the same as in Horovod. Asking for another says what to use;
`ringreduce.keras.horovod` has many of them.
"""

_PAGE = "docs/from-horovod.md has the whole table"

_GROUPS = "use communicator.split(color), and pass communicator="
_TIMELINE = "use ringreduce run --trace DIR, and ringreduce trace DIR"

# Libraries that Horovod may be built with, and ringreduce never is.
_TRANSPORTS = ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl", "sycl")
ABSENT = {f"{transport}_{state}" for transport in _TRANSPORTS for state in ("built", "enabled")}
ABSENT.add("mpi_threads_supported")

# Names that `ringreduce.keras.horovod` has.
_PROVIDED = {
    **dict.fromkeys(("ProcessSet", "add_process_set", "process_set_included_op"), _GROUPS),
    **{name: f'write op="{name.lower()}"' for name in ("Max", "Min", "Product", "Sum")},
    **{f"{name}_op": f"use {name}()" for name in ("local_rank", "local_size", "rank", "size")},
    **dict.fromkeys(ABSENT, "there is no such transport here"),
    "Average": 'write op="mean"; for gradients that is the default',
    "allgather": "use all_gather(tensor)",
    "Compression": 'write compression="fp16"',
    "allgather_object": "use init().all_gather_object(value)",
    "allreduce": 'use all_reduce(tensor, op="mean"); without op it is the sum',
    "alltoall": "use all_to_all(tensor, counts)",
    "broadcast_": "use broadcast_variables(variables, root_rank)",
    "barrier": "use init().barrier()",
    "broadcast_object": "use init().broadcast_object(value, root_rank)",
    "broadcast_object_fn": "use init().broadcast_object(value, root_rank)",
    "global_process_set": "leave communicator out",
    "is_initialized": "use ringreduce.is_initialized()",
    "local_size": "use ringreduce.local_size()",
    "grouped_allgather": "use all_gather(tensor) of each",
    "grouped_allreduce": 'use all_reduce([...], op="mean")',
    "grouped_reducescatter": 'use reduce_scatter(tensor, op="mean") of each',
    "reducescatter": 'use reduce_scatter(tensor, op="mean")',
    "remove_process_set": "use close() of the communicator that split returned",
}
_IMPORT = "or import ringreduce.keras.horovod, which has it"
_NAMES = {
    **{name: f"{advice}, {_IMPORT}" for name, advice in _PROVIDED.items()},
    "Adasum": "there is none",
    "PartialDistributedOptimizer": "use DistributedOptimizer(local_variables=)",
    "cross_rank": "there is none: rank() // local_size(), where hosts have equally many ranks",
    "cross_size": "there is none: size() // local_size(), where hosts have equally many ranks",
    "broadcast_global_variables": "use broadcast_variables(model.variables, root_rank)",
    "is_homogeneous": "compare init().all_gather_object(local_size())",
    "PartialDistributedGradientTape": "use DistributedGradientTape(local_variables=)",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
}
_KEPT = "import ringreduce.keras.horovod, whose callbacks have it"
_CALLBACKS = {
    "BestModelCheckpoint": "put keras.callbacks.ModelCheckpoint(path, save_best_only=True) into "
    "Together",
    "BroadcastGlobalVariablesCallback": f"leave it out, or {_KEPT}",
    "MetricAverageCallback": f"use Together, or {_KEPT}",
    **{f"LearningRate{suffix}Callback": _KEPT for suffix in ("Schedule", "Warmup")},
}
_MODULES = {"ringreduce.keras": _NAMES, "ringreduce.keras.callbacks": _CALLBACKS}
# Options of its DistributedOptimizer.
OPTIONS = {
    "average_aggregated_gradients": "leave it out: the mean of accumulated steps is applied",
    "backward_passes_per_step": "use accumulate_steps; it is always the mean of the steps",
    **dict.fromkeys(("device_dense", "device_sparse"), "leave it out: there is one way to reduce"),
    **dict.fromkeys(("groups", "num_groups"), "leave it out, or use bucket_bytes"),
    "gradient_predivide_factor": "leave it out: sums are divided before they are rounded",
    "name": "leave it out: it has the name of the optimizer it wraps",
    "process_set": "use communicator, or DistributedOptimizer of ringreduce.keras.horovod",
}


def _text(plain: str, advice: str | None) -> str:
    return plain if advice is None else f"{plain}: {advice} ({_PAGE})"


def advice_on_name(module: str, name: str) -> str:
    """Text of the AttributeError when `module`, one of those above, has no `name`."""
    return _text(f"module {module!r} has no attribute {name!r}", _MODULES[module].get(name))


def advice_on_option(name: str) -> str:
    """Text of the TypeError when ``DistributedOptimizer`` takes no `name`."""
    plain = f"DistributedOptimizer got an unexpected keyword argument {name!r}"
    return _text(plain, OPTIONS.get(name))
