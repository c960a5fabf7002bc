"""Computes metrics of all ranks together: from the sum of their states, not the mean of results.

Ranks see different amounts of different data, so the mean of results is not the result on all data.
But states (total and count, say) add up: each rank puts the sums into its metrics, reads the
results, and restores its own values. Each variable's `aggregation` says how its values combine; or
the metric's ``merge_states(states)``, of which each rank's are a list of arrays,
in the order of its variables: it returns such a list.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow.agreement import Difference, refuse

# For each name in logs: whether it is a metric's, and its value if that is a float, else None.
Entries = Mapping[str, tuple[bool, Any]]


@dataclass(frozen=True)
class MetricStates:
    """The states of a model's metrics on one rank after some batches."""

    batches: int = 0  # their number; with 0, `values` is empty and the rank adds nothing
    variables: Sequence[Any] = ()
    values: Sequence[np.ndarray] = ()  # a copy of the value of each of `variables`
    # By name in logs: floats, and arrays where a metric has several numbers.
    results: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Hash `values`; empty where some are not finite, or all whole: equal by chance."""
        is_finite = all(np.isfinite(value).all() for value in self.values)
        if not is_finite or all((value % 1 == 0).all() for value in self.values):
            return ""
        joined = b"".join(values.tobytes() for values in self.values)
        return hashlib.blake2b(joined, digest_size=8).hexdigest()


def states_of(model: Any, batches: int) -> MetricStates:
    """A copy of what the metrics of `model` hold after `batches` batches; nothing travels."""
    if batches == 0:
        # Metrics that are made for the first batch may not exist yet.
        return MetricStates()
    # A metric that occurs twice must not be counted twice.
    variables = list({id(v): v for metric in model.metrics for v in metric.variables}.values())
    values = [np.array(v.numpy()) for v in variables]
    return MetricStates(batches, variables, values, numbers_in(model.get_metrics_result()))


def combined(values: Sequence[np.ndarray], aggregation: str) -> np.ndarray:
    """The value of a variable from those of ranks; in float64 counts are exact up to 2**53."""
    if aggregation == "only_first_replica":
        return values[0]
    total = np.sum(values, 0, np.float64)
    return np.asarray(total / len(values) if aggregation == "mean" else total, values[0].dtype)


def metrics_in(model: Any) -> list[Any]:
    """The metrics of `model`, those given to `compile` too, which are in one that holds them."""
    return [part for m in model.metrics for part in getattr(m, "metrics", ()) or [m]]


def combined_results(model: Any, states: MetricStates, ring: Communicator) -> dict[str, Any]:
    """The results by name of `model`'s metrics on all ranks' batches, equal on all; none without.

    Collective. Variables combine over the ranks that had batches; with the aggregation "none" each
    rank keeps its own, and results that then differ are averaged. The metrics hold afterwards what
    they held before. MismatchError, on all ranks, if their metrics differ.
    """
    pairs = zip(states.variables, states.values, strict=True)
    own_layout = [[v.path, v.aggregation, n.dtype.name, list(n.shape)] for v, n in pairs]
    values = [value.tobytes() for value in states.values]
    gathered = ring.all_gather_object([states.batches, own_layout, values])
    refuse(ring, _difference(gathered, ring.members), "averaging of metrics")
    had_batches = [values for batches, _, values in gathered if batches]
    if not had_batches:
        return {}
    results: dict[str, Any] = {}
    if states.batches:
        columns = [
            [np.frombuffer(n, value.dtype).reshape(value.shape).copy() for n in every]
            for value, every in zip(states.values, zip(*had_batches, strict=True), strict=True)
        ]
        results = results_of_all(model, states, columns)
    every = gathered_numbers(results, ring)
    names = dict.fromkeys(name for numbers in every for name in numbers)
    return {name: _agreed([logs[name] for logs in every if name in logs]) for name in names}


def results_of_all(
    model: Any, states: MetricStates, columns: Sequence[Sequence[np.ndarray]]
) -> dict[str, Any]:
    """The results of `model`'s metrics when each of the variables has combined its `columns`.

    Those are its values on all ranks. With the aggregation "none" it has that of `states`. The
    metrics hold afterwards what they held before.
    """
    by_id = {id(v): column for v, column in zip(states.variables, columns, strict=True)}
    with restored(states.variables):
        for variable, value in zip(states.variables, states.values, strict=True):
            how = variable.aggregation
            variable.assign(value if how == "none" else combined(by_id[id(variable)], how))
        for metric in metrics_in(model):
            if hasattr(metric, "merge_states"):
                of_ranks = zip(*(by_id[id(v)] for v in metric.variables), strict=True)
                together = metric.merge_states(list(map(list, of_ranks)))
                for variable, value in zip(metric.variables, together, strict=True):
                    variable.assign(value)
        return numbers_in(model.get_metrics_result())


def entries_of(logs: Mapping[str, Any], results: Mapping[str, Any]) -> Entries:
    """Make this rank's entries for `merged` from its logs and its own metrics' `results`."""
    # A `train_step` may log something else under a metric's name, so values are compared too.
    numbers = numbers_in(logs)
    entries: dict[str, tuple[bool, Any]] = dict.fromkeys(logs.keys() - numbers, (False, None))
    for name, number in numbers.items():
        is_metric = name in results and np.array_equal(number, results[name], equal_nan=True)
        # Arrays that belong to no metric stay as they are.
        entries[name] = (bool(is_metric), number if isinstance(number, float) else None)
    return entries


def merged(
    entries: Sequence[Entries], together: Mapping[str, Any], sums: Sequence[str] = ()
) -> dict[str, Any]:
    """Merge ranks' logs: values of `together` where all log a metric's, means of other numbers.

    Of numbers, and results of metrics, named in `sums` it is their sum.
    """
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for entry in entries for name in entry):
        logged = [entry[name] for entry in entries if name in entry]
        numbers = [number for _, number in logged if number is not None]
        if name in sums and len(numbers) == len(entries):
            result[name] = float(np.sum(numbers))
        elif name in together and all(is_metric for is_metric, _ in logged):
            result[name] = together[name]
        elif all(isinstance(number, float) for _, number in logged):
            result[name] = _agreed([number for _, number in logged])
    return result


def numbers_in(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers in `logs`, as floats or arrays; nested dicts are flattened, as Keras does."""
    numbers: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            numbers.update(numbers_in(value))
            continue
        array = np.asarray(value)
        if array.dtype.kind == "V":  # A 16-bit float that numpy does not know itself.
            array = array.astype(np.float32)
        if array.dtype.kind in "biuf":
            numbers[name] = array if array.ndim else float(array)
    return numbers


def gathered_numbers(numbers: Mapping[str, Any], ring: Communicator) -> list[dict[str, Any]]:
    """All ranks' `numbers`, floats or arrays by name, in rank order. Collective."""
    arrays = {name: np.asarray(number) for name, number in numbers.items()}
    packed = {name: [n.dtype.str, n.shape, n.tobytes()] for name, n in arrays.items()}

    def unpacked(dtype: str, shape: list[int], data: bytes) -> Any:
        return np.frombuffer(data, dtype).reshape(shape).copy()

    every = ring.all_gather_object(packed)
    return [numbers_in({name: unpacked(*n) for name, n in theirs.items()}) for theirs in every]


def _agreed(numbers: Sequence[Any]) -> Any:
    """The common value; where values differ, the mean, each with equal weight."""
    if all(np.array_equal(number, numbers[0], equal_nan=True) for number in numbers):
        # Not computed from the sum, which need not be exact.
        return numbers[0]
    mean = np.mean(np.array(numbers, np.float64), axis=0)
    return mean if mean.ndim else float(mean)


@contextmanager
def restored(variables: Sequence[Any]) -> Iterator[None]:
    """After the block `variables` have the values that they have now."""
    before = [np.array(variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def _difference(gathered: list[Any], members: Sequence[int]) -> Difference | None:
    named = zip(members, gathered, strict=True)
    counted = [(rank, layout) for rank, (batches, layout, _) in named if batches]
    for rank, layout in counted:
        first, expected = counted[0]
        # Without the path: numbers in automatic names depend on what else a process has made.
        if [entry[1:] for entry in layout] != [entry[1:] for entry in expected]:
            return Difference(
                rank,
                f"found that rank {first} keeps metrics in {_described(expected)} and rank {rank} "
                f"in {_described(layout)}",
                "Compile the model with the same metrics on every rank.",
            )
    return None


def _described(layout: list[Any]) -> str:
    return ", ".join(f"{path} ({dtype} of shape {tuple(n)})" for path, _, dtype, n in layout)
