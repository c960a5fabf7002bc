"""Finds losses and metrics of one's own that N ranks do not compute as one process does.

They are tried on the first rows of the data. The losses of two parts, weighted by rows, must be
that of the whole; the states of a metric after two halves, combined as those of ranks are, must
give the result of both. What may call the ring, or fails, or is random, is not tried. State is put
back.
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
from ringreduce.keras.data_fingerprint import compare_codes
from ringreduce.keras.metric_states import combined, metrics_in, numbers_in, restored, states_of
from ringreduce.keras.mistakes import NO_MEANS, warn_of_parity
from ringreduce.keras.parts.part import is_own_piece
from ringreduce.keras.plan import Feed
from ringreduce.keras.rows import first_rows, rows_in, slice_rows
from ringreduce.keras.step import own_step
from ringreduce.tensorflow.kept import kept

_log = logging.getLogger(__name__)
_TOLERANCE = 1e-3  # of what float32 rounds, of hundreds of values
_MEAN = "the loss %s is a mean over the first %d samples; with masks it may be none"
_NO_MEAN = (
    "the loss {} is no mean over samples: its value for the first {} rows is not the mean of those "
    "for two parts of them, as the ranks' gradients are averaged (let it return a value for each "
    "sample; mask by sample_weight)"
)


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


def _metrics_of(model: Any) -> _Metrics:
    return kept(getattr(model, "_compile_metrics", None) or model, _Metrics)


class Probe(keras.callbacks.Callback):
    """Looks at the first batch of training when it has passed; `compares`: all ranks read it."""

    looks_at_batches = False  # After the first call, which makes one step.

    def __init__(self, feed: Feed, ring: Communicator, compares: bool) -> None:
        super().__init__()
        self._feed, self._ring, self._compares = feed, ring, compares

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        rows, self._feed = self._feed.first, Feed()
        if rows is not None and self._ring.size > 1:
            try_own(self.model, rows, self._ring)
            if self._compares:
                compare_codes(rows, self._ring)


def try_own(model: Any, batch: Any, ring: Communicator, *, with_losses: bool = True) -> None:
    """Try what a built and compiled model has of its user's own on the first rows of `batch`."""
    with _quiet("losses and metrics", ring):
        losses = _own_losses(model) if with_losses else []
        metrics = metrics_in(model) if _metrics_of(model).names_apart is None else []
        # Its name in logs begins with that of an output, where there are several.
        names = [metric.name for metric in metrics if may_not_combine(metric)]
        x, y, weights = keras.utils.unpack_x_y_sample_weight(first_rows(batch))
        count = int(rows_in(x))
        if count == 1 or not (losses or names) or any(map(is_own_piece, model.weights)):
            return
        with restored([*model.non_trainable_variables, *model.metrics_variables]):
            outputs = _traced(lambda x: model(x, training=False), x)(x)
            with _quiet("losses", ring):
                if losses and not _is_mean(model, y, outputs, count):
                    warn_of_parity([_NO_MEAN.format(", ".join(losses), count)], ring)
                elif losses:
                    _log.info(_MEAN, ", ".join(losses), count)
            if names:
                inputs = (x, y, outputs) if weights is None else (x, y, outputs, weights)
                _metrics_of(model).names_apart = _not_combining(model, names, inputs, count // 2)


def _is_mean(model: Any, y: Any, outputs: Any, count: int) -> bool:
    """Whether the loss may be a mean over samples: what is random cannot be tried."""
    loss = _traced(private.compiled_loss(model), y, outputs)
    at = (count + 1) // 3
    ends = [(0, count), (0, count), (0, at), (at, count)]
    full, again, first, second = (float(loss(*slice_rows((y, outputs), *span))) for span in ends)
    if full != again or not np.isfinite([full, first, second]).all():
        return True
    mean = (at * first + (count - at) * second) / count
    return abs(mean - full) <= _TOLERANCE * max(abs(first), abs(second))


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


def _own_losses(model: Any) -> list[str]:
    """The names of those losses of a compiled model that are not Keras's."""
    losses = [keras.losses.get(loss) for loss in keras.tree.flatten(model.loss) if loss is not None]
    # These say by themselves that they are none.
    is_known = any(getattr(loss, "reduction", "") in NO_MEANS for loss in losses)
    has_own_way = type(model).compute_loss is not keras.Model.compute_loss or own_step(model)
    if is_known or has_own_way:
        return []
    of_keras = private.is_of_keras
    custom = [
        loss for loss in losses if not of_keras(loss) or not of_keras(getattr(loss, "fn", loss))
    ]
    return [str(getattr(loss, "name", getattr(loss, "__name__", loss))) for loss in custom]


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
def _quiet(what: str, ring: Communicator) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _log.debug("[%d/%d] could not try %s: %r", *ring.config.who.values(), what, error)
