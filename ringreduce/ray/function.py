"""`run`: a function on every rank of a job, in processes of a Ray cluster."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringreduce.commands.launch.failure import Failure, find_cause, worker_error
from ringreduce.commands.launch.function import checked_size
from ringreduce.commands.launch.handover import described
from ringreduce.commands.launch.worker_records import Raised
from ringreduce.communicator.hosted import Choices, leaving
from ringreduce.ray.job import form, host_here
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ConfigError, WorkerError

_Result = TypeVar("_Result")


def run(
    function: Callable[..., _Result],
    num_workers: int,
    *args: Any,
    resources_per_worker: Mapping[str, float] | None = None,
    start_timeout_s: float = 120.0,
    **settings: Any,
) -> list[_Result]:
    """Call ``function(*args)`` in `num_workers` new processes of the cluster that can form a ring.

    The function does what a script does under ``ringreduce run``: it imports what it needs and
    calls ``rr.init()``. Neighbouring ranks are on one node as far as possible. No process is left
    when this returns or raises.

    Args:
        function: what each rank calls. It, `args` and its results travel as Ray sends them.
        resources_per_worker: as in `ray.train.ScalingConfig`; by default ``{"CPU": 1}``.
        start_timeout_s: seconds to wait for the resources, more where nodes must start first.
        settings: as in `RingReduceConfig`.

    Returns:
        What the function returned, in rank order.

    Raises:
        ConfigError: a setting is impossible, or the cluster has not enough resources in time.
        WorkerError: a rank failed; `peer` is the one that failed first, `traceback` says how. All
            others were stopped.
    """
    choices = Choices(settings)
    size = checked_size(num_workers, "run(function, num_workers, *args)")
    resources = dict(resources_per_worker or {"CPU": 1})
    if not ray.is_initialized():
        ray.init()
    group = placement_group([resources] * size, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(start_timeout_s):
            amounts = ray.cluster_resources()  # Used or not.
            there = ", ".join(f"{amounts.get(name, 0):g} {name}" for name in resources)
            raise ConfigError(
                f"the cluster, with {there}, has had no room for {size} workers with "
                f"{resources} each for {start_timeout_s:g} s",
                remedy="Ask for fewer workers or resources_per_worker, or pass a longer "
                "start_timeout_s.",
            )
        actors = [_actor(resources, group, bundle) for bundle in range(size)]
        try:
            hosts = ray.get([actor.call.remote(host_here) for actor in actors])
            # Those of one host beside each other, in the order of the first of each.
            actors = [actors[i] for i in sorted(range(size), key=lambda i: hosts.index(hosts[i]))]
            form(size, lambda rank, *call: actors[rank].call.remote(*call), choices)
        except RayActorError as error:
            raise WorkerError(
                "a worker ended before the function began", size=size, traceback=str(error)
            ) from error
        return _results([actor.run.remote(function, args) for actor in actors])
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


class _Worker:
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            with leaving():
                return function(*args)
        except Exception as error:
            return described(error)


def _actor(resources: Mapping[str, float], group: Any, bundle: int) -> Any:
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    options: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": {name: amount for name, amount in others.items() if name != "memory"},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    }
    if "memory" in others:
        options["memory"] = others["memory"]
    return ray.remote(**options)(_Worker).remote()


def _results(running: Sequence[Any]) -> list[Any]:
    """All results, in rank order; WorkerError as soon as a rank fails."""
    ranks = {reference: rank for rank, reference in enumerate(running)}
    results: list[Any] = [None] * len(running)
    failures: list[Failure] = []
    left, size = list(running), len(running)
    end = None
    # A rank that has lost another may say so before Ray says how that one ended.
    while left and (end is None or time.monotonic() < end):
        limit = None if end is None else max(0.0, end - time.monotonic())
        done, left = ray.wait(left, num_returns=1, timeout=limit)
        for reference in done:
            rank = ranks[reference]
            try:
                result = ray.get(reference)
            except RayActorError as error:
                text = str(error).splitlines()
                result = Raised("RayActorError", None, None, "its process ended", text)
            except RayTaskError as error:  # The result cannot be sent.
                result = described(error)
            results[rank] = result
            if isinstance(result, Raised):
                how = result.exception
                failures.append(Failure(rank, 1, time.monotonic(), result, how=how))
                cause = find_cause(failures, range(size))
                is_certain = cause is not None and cause.is_certain
                end = 0.0 if is_certain else end or time.monotonic() + 2 * TIMES.cause_s
    cause = find_cause(failures, range(size))
    if cause is None:
        return results
    raise worker_error(cause, size, cause.first.traceback)
