"""Computes metrics of all ranks together: from the sum of their states, not the mean of results.

Ranks see different amounts of different data, so the mean of results is not the result on all data.
But states (total and count, say) add up: each rank puts the sums into its metrics, reads the
results, and restores its own values. Each variable's `aggregation` says how its values combine; or
the metric's ``merge_states(states)``, of which each rank's are a list of arrays,
in the order of its variables: it returns such a list.
"""

import contextlib
import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.pure.payload import encode
from ringreduce.tensorflow.agreement import Difference, refuse
from ringreduce.tensorflow.variables import copy_of, put_value

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

    def layout(self) -> list[list[Any]]:
        """Path, aggregation, dtype and shape of each variable."""
        pairs = zip(self.variables, self.values, strict=True)
        return [[v.path, v.aggregation, n.dtype.name, list(n.shape)] for v, n in pairs]

    def compared(self) -> list[list[Any]]:
        """The `layout` without paths: numbers in automatic names may differ between ranks."""
        return [rest for _, *rest in self.layout()]

    def packed(self) -> bytes:
        """The `values`, one after the other."""
        return b"".join(value.tobytes() for value in self.values)

    def digest(self) -> str:
        """Hash `values`; empty where some are not finite, or all whole: equal by chance."""
        is_finite = all(np.isfinite(value).all() for value in self.values)
        if not is_finite or all((value % 1 == 0).all() for value in self.values):
            return ""
        return hashlib.blake2b(self.packed(), digest_size=8).hexdigest()


def states_of(
    model: Any, batches: int, known: MetricStates | None = None, results: Any = None
) -> MetricStates:
    """A copy of what the metrics of `model` hold after `batches` batches; nothing travels.

    To compute `results` takes longer than a small step, so they may be given, as of
    ``get_metrics_result``, or be those of `known` if the metrics still hold the same.
    """
    if batches == 0:
        # Metrics that are made for the first batch may not exist yet.
        return MetricStates()
    # A metric that occurs twice must not be counted twice.
    variables = list({id(v): v for metric in model.metrics for v in metric.variables}.values())
    states = MetricStates(batches, variables, [copy_of(v) for v in variables])
    if known is not None and _have_equal_results(states, known, model):
        return replace(states, results=known.results)
    results = model.get_metrics_result() if results is None else results
    return replace(states, results=numbers_in(results))


def _have_equal_results(states: MetricStates, known: MetricStates, model: Any) -> bool:
    """Whether metrics with `states` have the results of `known`: they follow from states alone."""
    same_places = list(map(id, states.variables)) == list(map(id, known.variables))
    return same_places and states.packed() == known.packed() and bool(way_of_results(model))


def combined(values: Sequence[np.ndarray], aggregation: str) -> np.ndarray:
    """The value of a variable from those of ranks; in float64 counts are exact up to 2**53."""
    if aggregation == "only_first_replica":
        return values[0]
    total = np.sum(values, 0, np.float64)
    return np.asarray(total / len(values) if aggregation == "mean" else total, values[0].dtype)


def metrics_in(model: Any) -> list[Any]:
    """The metrics of `model`, those given to `compile` too, which are in one that holds them."""
    return [part for m in model.metrics for part in getattr(m, "metrics", ()) or [m]]


def gathered_alike(
    described: Any, compared: Any, numbers: Any, ring: Communicator
) -> list[tuple[Any, Any]]:
    """What each rank passes as `described` and as `numbers`, of plain types, in rank order.

    Collective: one exchange where all have the same `compared`, which is of plain types too, and
    nothing but numbers and its hash travels; else one more.
    """
    digest = hashlib.blake2b(encode(compared).tobytes(), digest_size=8).digest()
    gathered = ring.all_gather_object([digest, numbers])
    if all(theirs == digest for theirs, _ in gathered):
        return [(described, theirs) for _, theirs in gathered]
    every = ring.all_gather_object(described)
    return [(shape, theirs) for shape, (_, theirs) in zip(every, gathered, strict=True)]


class Told(NamedTuple):
    """What a rank has told others of its `MetricStates`, in plain types."""

    batches: int
    layout: list[list[Any]]
    packed: bytes
    way: str

    def values(self, like: Sequence[np.ndarray]) -> list[np.ndarray]:
        """A copy of the value of each variable; those here are `like` them."""
        values, offset = [], 0
        for here in like:
            value = np.frombuffer(self.packed, here.dtype, here.size, offset)
            values.append(value.reshape(here.shape).copy())
            offset += here.nbytes
        return values


def combined_results(model: Any, states: MetricStates, ring: Communicator) -> dict[str, Any]:
    """The results by name of `model`'s metrics on all ranks' batches, equal on all; none without.

    Collective. Variables with the aggregation "sum" are added, with "mean" averaged over the ranks
    that had batches, with "only_first_replica" taken from the first of these. With "none" each rank
    keeps its own; results that then differ are averaged. The metrics hold afterwards what they held
    before. MismatchError, on all ranks, if their metrics differ.
    """
    numbers = [states.batches, states.packed(), way_of_results(model)]
    gathered = gathered_alike(states.layout(), states.compared(), numbers, ring)
    told = [Told(batches, layout, *rest) for layout, (batches, *rest) in gathered]
    return results_of_ranks(model, [(states, told)], ring)[0]


def results_of_ranks(
    model: Any, pairs: Sequence[tuple[MetricStates, Sequence[Told]]], ring: Communicator
) -> list[dict[str, Any]]:
    """`combined_results` of several states, of which the ranks have told each other.

    No exchange where each rank had batches, and computes the same from what all have told: else
    one, of results.
    """
    own: list[dict[str, Any]] = []
    for states, told in pairs:
        refuse(ring, _difference(told, ring.members), "averaging of metrics")
        if not states.batches:
            own.append({})
            continue
        had_batches = [each.values(states.values) for each in told if each.batches]
        own.append(results_of_all(model, states, list(zip(*had_batches, strict=True))))
    if all(_are_equal_on_all(told) for _, told in pairs):
        return own
    every = gathered_numbers(own, ring)
    return [_agreed_numbers([numbers[place] for numbers in every]) for place in range(len(own))]


def _are_equal_on_all(told: Sequence[Told]) -> bool:
    """Whether each rank has computed the same results, and has all of them."""
    batches, ways = [each.batches for each in told], {each.way for each in told}
    if not any(batches):
        return True
    keeps_own = any(how == "none" for each in told for _, how, *_ in each.layout)
    return all(batches) and len(ways) == 1 and "" not in ways and not keeps_own


def way_of_results(model: Any) -> str:
    """How this rank computes results from states; "": they may follow from more than those.

    Processors of several kinds may round the last bit otherwise.
    """
    functions = [model.get_metrics_result, *(metric.result for metric in metrics_in(model))]
    return _machine() if all(map(private.is_of_keras, functions)) else ""


@cache
def _machine() -> str:
    """A hash of what this process computes with."""
    lines = []
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        names = "model name", "flags", "Features", "CPU part"
        lines = [line for line in file if line.startswith(names)]
    facts = [tf.__version__, platform.machine(), *sorted(set(lines))]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()


def _agreed_numbers(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for numbers in every for name in numbers)
    return {
        name: _agreed([numbers[name] for numbers in every if name in numbers]) for name in names
    }


def results_of_all(
    model: Any, states: MetricStates, columns: Sequence[Sequence[np.ndarray]]
) -> dict[str, Any]:
    """The results of `model`'s metrics when each of the variables has combined its `columns`.

    Those are its values on all ranks. With the aggregation "none" it has that of `states`. The
    metrics hold afterwards what they held before.
    """
    with restored(states.variables):
        _combine(model, states, columns)
        return numbers_in(model.get_metrics_result())


def values_of_all(model: Any, batches: int, ring: Communicator) -> list[np.ndarray]:
    """The values of the metrics of `model` as if one rank had seen all ranks' batches.

    Each rank has seen `batches`. In the order of `states_of`; nothing without batches. Collective.
    """
    states = states_of(model, batches)
    numbers = [states.batches, states.packed(), ""]
    gathered = gathered_alike(states.layout(), states.compared(), numbers, ring)
    told = [Told(batches, layout, *rest) for layout, (batches, *rest) in gathered]
    refuse(ring, _difference(told, ring.members), "backing up of metrics")
    had_batches = [each.values(states.values) for each in told if each.batches]
    with restored(states.variables):
        _combine(model, states, list(zip(*had_batches, strict=True)))
        return [copy_of(variable) for variable in states.variables]


def _combine(model: Any, states: MetricStates, columns: Sequence[Sequence[np.ndarray]]) -> None:
    """Give the metrics of `model` what all ranks' values in `columns` make together."""
    by_id = {id(v): column for v, column in zip(states.variables, columns, strict=True)}
    for variable, value in zip(states.variables, states.values, strict=True):
        how = variable.aggregation
        put_value(variable, value if how == "none" else combined(by_id[id(variable)], how))
    for metric in metrics_in(model):
        if hasattr(metric, "merge_states"):
            of_ranks = zip(*(by_id[id(v)] for v in metric.variables), strict=True)
            together = metric.merge_states(list(map(list, of_ranks)))
            for variable, value in zip(metric.variables, together, strict=True):
                variable.assign(value)


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


def gathered_numbers(
    several: Sequence[Mapping[str, Any]], ring: Communicator
) -> list[list[dict[str, Any]]]:
    """All ranks' `several` times numbers, floats or arrays by name, in rank order. Collective."""

    def packed(numbers: Mapping[str, Any]) -> dict[str, Any]:
        arrays = {name: np.asarray(number) for name, number in numbers.items()}
        return {name: [n.dtype.str, n.shape, n.tobytes()] for name, n in arrays.items()}

    def unpacked(dtype: str, shape: list[int], data: bytes) -> Any:
        return np.frombuffer(data, dtype).reshape(shape).copy()

    every = ring.all_gather_object(list(map(packed, several)))
    return [
        [numbers_in({name: unpacked(*n) for name, n in one.items()}) for one in theirs]
        for theirs in every
    ]


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
    before = [copy_of(variable) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            put_value(variable, value)


def _difference(told: Sequence[Told], members: Sequence[int]) -> Difference | None:
    counted = [
        (rank, each.layout) for rank, each in zip(members, told, strict=True) if each.batches
    ]
    for rank, layout in counted:
        first, expected = counted[0]
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
