"""Finds metrics of one's own whose states do not combine, as those of ranks are.

They are tried on the first rows of data: the states after two halves, combined, must give the
result of both. What may call the ring, or fails, or is random, is not tried. State is put back.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.layers.part import is_own_piece
from ringreduce.keras.metric_states import combined, metrics_in, numbers_in, restored, states_of
from ringreduce.keras.rows import first_rows, rows_in, slice_rows
from ringreduce.tensorflow.kept import kept

_log = logging.getLogger(__name__)
_TOLERANCE = 1e-3  # of what float32 rounds, of hundreds of values


class _Metrics:
    """The metrics that a model is compiled with."""

    # The names in logs of those that do not combine; None: they were not tried.
    names_apart: list[str] | None = None
    # In logs of training, whose batches are divided among ranks; and those that ranks add up there.
    apart_in_steps: Sequence[str] = ()
    sums: Sequence[str] = ()


def names_apart(model: Any) -> list[str]:
    """The names in logs of metrics of `model` that were found not to combine."""
    return _metrics_of(model).names_apart or []


def names_in_steps(model: Any) -> tuple[list[str], list[str]]:
    """In logs of training, of `model`: metrics that do not combine, and numbers that add up."""
    found = _metrics_of(model)
    return [*found.apart_in_steps], [*found.sums]


def note_names_in_steps(model: Any, apart: Sequence[str], sums: Sequence[str]) -> None:
    """Keep what a trial has found for `names_in_steps`."""
    found = _metrics_of(model)
    found.apart_in_steps, found.sums = apart, sums


def found_names(model: Any) -> list[Any]:
    """All that trials have found of the metrics of `model`, in plain types."""
    found = _metrics_of(model)
    return [found.names_apart, [*found.apart_in_steps], [*found.sums]]


def note_found_names(model: Any, names: Sequence[Any]) -> None:
    """Know, without a trial, what `found_names` of another rank has."""
    found = _metrics_of(model)
    found.names_apart, found.apart_in_steps, found.sums = names


def _metrics_of(model: Any) -> _Metrics:
    return kept(getattr(model, "_compile_metrics", None) or model, _Metrics)


def try_metrics(model: Any, batch: Any, ring: Communicator) -> None:
    """Try what a built and compiled model has of such metrics, once, on first rows of `batch`."""
    with _quiet(ring):
        metrics = metrics_in(model) if _metrics_of(model).names_apart is None else []
        # Its name in logs begins with that of an output, where there are several.
        names = [metric.name for metric in metrics if may_not_combine(metric)]
        x, y, weights = keras.utils.unpack_x_y_sample_weight(first_rows(batch))
        count = int(rows_in(x))
        if count == 1 or not names or any(map(is_own_piece, model.weights)):
            return
        with restored([*model.non_trainable_variables, *model.metrics_variables]):
            outputs = _traced(lambda x: model(x, training=False), x)(x)
            inputs = (x, y, outputs) if weights is None else (x, y, outputs, weights)
            _metrics_of(model).names_apart = _not_combining(model, names, inputs, count // 2)


def _not_combining(model: Any, names: Sequence[str], inputs: Any, half: int) -> list[str]:
    """The names in logs of those metrics whose states after two halves do not combine."""
    update = _traced(model.compute_metrics, *inputs)
    head, tail = (slice_rows(inputs, *ends) for ends in ((0, half), (half, 2 * half)))

    def after(*parts: Any) -> Any:
        model.reset_metrics()
        for part in parts:
            update(*part)
        return states_of(model, 1)

    first, second, full, again = after(head), after(tail), after(head, tail), after(head, tail)
    for variable, *values in zip(first.variables, first.values, second.values, strict=True):
        variable.assign(combined(values, variable.aggregation))
    together = numbers_in(model.get_metrics_result())
    return [
        name
        for name, value in full.results.items()
        if any(name == metric or name.endswith(f"_{metric}") for metric in names)
        and np.array_equal(value, again.results[name], equal_nan=True)
        and not np.allclose(together[name], value, _TOLERANCE, 1e-6, equal_nan=True)
    ]


def may_not_combine(metric: Any, *, in_steps: bool = False) -> bool:
    """Whether its states may not combine, since its class is the user's own.

    With `in_steps`, where ranks have parts of a batch, also of a function of whole batches.
    """
    parts = [type(metric), *([getattr(metric, "_fn", type(metric))] if in_steps else [])]
    combines = [hasattr(metric, "merge_states"), all(map(private.is_of_keras, parts))]
    return not any(combines) and all(v.aggregation != "none" for v in metric.variables)


def _traced(function: Callable[..., Any], *parts: Any) -> Any:
    """`function` as a graph, for any number of rows of tensors like these."""
    specs = private.spec_of_batches([parts])
    traced = tf.function(function, input_signature=specs, autograph=False)
    graph = traced.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for nested in graph.library.function for node in nested.node_def)]
    if any("pyfunc" in (op := node.op.lower()) or op.startswith("ringreduce") for node in nodes):
        raise NotImplementedError("It may call the ring.")
    return traced


@contextmanager
def _quiet(ring: Communicator) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _log.debug("[%d/%d] could not try metrics: %r", *ring.config.who.values(), error)
