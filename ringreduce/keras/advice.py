"""Says what to use instead of Horovod's names.

A name is here only if it means the same as in Horovod. Asking for another says what to use;
`ringreduce.keras.horovod` has many of them.
"""

_PAGE = "docs/from-horovod.md has the whole table"
_TIMELINE = "use ringreduce run --trace DIR, and ringreduce trace DIR"

# Libraries that Horovod may be built with, and ringreduce never is.
_TRANSPORTS = ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl", "sycl")
ABSENT = {f"{transport}_{state}" for transport in _TRANSPORTS for state in ("built", "enabled")}
ABSENT.add("mpi_threads_supported")

# Names that `ringreduce.keras.horovod` has.
_PROVIDED = {
    *ABSENT,
    *("Average", "Compression", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set"),
    *("allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast_"),
    *("broadcast_object", "broadcast_object_fn", "global_process_set", "grouped_allgather"),
    *("grouped_allreduce", "grouped_reducescatter", "local_rank_op"),
    *("local_size_op", "process_set_included_op", "rank_op", "reducescatter"),
    *("remove_process_set", "size_op"),
}
_NAMES = {
    **dict.fromkeys(_PROVIDED, "import ringreduce.keras.horovod, which has it"),
    "Adasum": "there is none",
    "PartialDistributedOptimizer": "use DistributedOptimizer(local_variables=)",
    "cross_rank": "there is none: rank() // local_size(), where hosts have equally many ranks",
    "cross_size": "there is none: size() // local_size(), where hosts have equally many ranks",
    "broadcast_global_variables": "use broadcast_variables(model.variables, root_rank)",
    "is_homogeneous": "compare init().all_gather_object(local_size())",
    "PartialDistributedGradientTape": "use DistributedGradientTape(local_variables=)",
    "run": "start the program by ringreduce run -n N, or use launch(function, N)",
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
_ELASTIC = {
    **dict.fromkeys(
        [f"{kind}StateCallback" for kind in ("Commit", "UpdateBatch", "UpdateEpoch")],
        "leave it out: call rr.fit(model, ...) in place of what elastic.run runs, and it repeats "
        "the step in which a rank was lost",
    ),
    "ObjectState": "use State, which takes attributes by name too",
    "TensorFlowKerasState": "use KerasState",
    "TensorFlowState": "use State",
}
_MODULES = {
    "ringreduce.keras": _NAMES,
    "ringreduce.keras.callbacks": _CALLBACKS,
    "ringreduce.keras.elastic": _ELASTIC,
}
# Options of its DistributedOptimizer.
OPTIONS = {
    "average_aggregated_gradients": "leave it out: the mean of accumulated steps is applied",
    "backward_passes_per_step": "use gradient_accumulation_steps; it is always their mean",
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
