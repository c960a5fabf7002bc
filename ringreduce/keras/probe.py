"""Finds losses and metrics of one's own that N ranks do not compute as one process does.

They are tried on the first rows of the data. Of a loss that reduces by itself the values of two
parts, weighted by rows, must be that of the whole; the states of a metric after two halves,
combined as those of ranks are, must give the result of both. What may call the ring, or fails, or
is random, is not tried. State is put back.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.batches import Feed
from ringreduce.keras.data_fingerprint import compare_codes
from ringreduce.keras.metric_states import combined, metrics_in, numbers_in, restored, states_of
from ringreduce.keras.mistakes import warn_of_losses
from ringreduce.keras.parts.part import is_own_piece
from ringreduce.keras.rows import first_rows, rows_in, slice_rows
from ringreduce.keras.step import own_step

_log = logging.getLogger(__name__)
_TOLERANCE = 1e-3  # of what float32 rounds, of hundreds of values
# By what `compile` has made of metrics, the names in logs of those whose states do not combine.
_apart: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


def names_apart(model: Any) -> list[str]:
    """The names in logs of metrics of `model` that were found not to combine."""
    return _apart.get(_compiled(model), [])


def _compiled(model: Any) -> Any:
    return getattr(model, "_compile_metrics", None) or model


class Probe(keras.callbacks.Callback):
    """Looks at the first batch of training when it has passed; `compares`: all ranks read it."""

    def __init__(self, feed: Feed, ring: Communicator, compares: bool) -> None:
        super().__init__()
        self._feed, self._ring, self._compares = feed, ring, compares

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        found, self._feed = self._feed.first, Feed()
        if found is not None and self._ring.size > 1:
            try_own(self.model, found, self._ring)
            if self._compares:
                compare_codes(found, self._ring)


def try_own(model: Any, batch: Any, ring: Communicator, *, with_losses: bool = True) -> None:
    """Try what a built and compiled model has of its user's own on the first rows of `batch`."""
    with _quiet("losses and metrics", ring):
        losses = dict(_own_losses(model)) if with_losses else {}
        # Its name in logs begins with that of an output, where there are several.
        names = [metric.name for metric in metrics_in(model) if _may_not_combine(metric)]
        if _compiled(model) in _apart:
            names = []
        if not (losses or names) or any(map(is_own_piece, model.weights)):
            return
        x, y, weights = keras.utils.unpack_x_y_sample_weight(first_rows(batch))
        count = int(rows_in(x))
        with restored([*model.non_trainable_variables, *model.metrics_variables]):
            outputs = _traced(lambda x: model(x, training=False), x)(x)
            _try_losses(losses, y, outputs, count, ring)
            if names and count > 1:
                given = (x, y, outputs) if weights is None else (x, y, outputs, weights)
                _apart[_compiled(model)] = _not_combining(model, names, given, count // 2)


def _try_losses(losses: Any, y: Any, outputs: Any, count: int, ring: Communicator) -> None:
    found: dict[str, bool | None] = {}
    for name, loss in losses.items():
        with _quiet(f"the loss {name}", ring):
            found[name] = _is_mean(_traced(loss, y, outputs), y, outputs, count)
    if means := [name for name, is_mean in found.items() if is_mean]:
        text = "on the first %d rows the loss %s is a mean over samples; masks may make others"
        _log.info(text, count, ", ".join(means))
    warn_of_losses([name for name, is_mean in found.items() if is_mean is False], count, ring)


def _is_mean(loss: Any, y: Any, outputs: Any, count: int) -> bool | None:
    """None if it does not reduce by itself, or draws random numbers, or cannot be tried."""
    at = count // 3
    ends = [(0, count), (0, count), (0, at), (at, count)]
    values = [loss(*slice_rows((y, outputs), *each)) for each in ends] if at else []
    if not values or values[0].shape.rank:
        return None
    whole, again, one, two = map(float, values)
    if whole != again or not np.isfinite([whole, one, two]).all():
        return None
    mean = (at * one + (count - at) * two) / count
    return abs(mean - whole) <= _TOLERANCE * max(abs(one), abs(two))


def _not_combining(model: Any, names: Sequence[str], given: Any, half: int) -> list[str]:
    """The names in logs of those metrics whose states after two halves do not combine."""
    update = _traced(model.compute_metrics, *given)
    one, two = (slice_rows(given, *ends) for ends in ((0, half), (half, 2 * half)))

    def after(*parts: Any) -> Any:
        model.reset_metrics()
        for part in parts:
            update(*part)
        return states_of(model, 1)

    first, second, whole, again = after(one), after(two), after(one, two), after(one, two)
    for variable, *values in zip(first.variables, first.values, second.values, strict=True):
        variable.assign(combined(values, variable.aggregation))
    together = numbers_in(model.get_metrics_result())
    return [
        name
        for name, value in whole.results.items()
        if any(name == own or name.endswith(f"_{own}") for own in names)
        and np.array_equal(value, again.results[name], equal_nan=True)
        and not np.allclose(together[name], value, _TOLERANCE, 1e-6, equal_nan=True)
    ]


def _own_losses(model: Any) -> Iterator[tuple[str, Any]]:
    """By name, those of the losses of a built model that are not Keras's, as functions."""
    if type(model).compute_loss is not keras.Model.compute_loss or own_step(model) is not None:
        return
    for path, loss, _, name in private.losses_of(model):
        if private.is_of_keras(type(loss)) and private.is_of_keras(getattr(loss, "fn", type(loss))):
            continue
        if loss.reduction in ("mean_with_sample_weight", "sum"):
            continue  # Which says it by itself.
        yield name, partial(_value_of, path, loss)


def _value_of(path: Sequence[Any], loss: Any, y: Any, outputs: Any) -> Any:
    """What `loss` gives for an output before it is reduced, as `Loss.__call__` calls it."""
    for key in path:
        y, outputs = y[key], outputs[key]
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return loss(y, outputs)
    cast = partial(keras.ops.convert_to_tensor, dtype=loss.dtype)
    return loss.call(*(keras.tree.map_structure(cast, part) for part in (y, outputs)))


def _may_not_combine(metric: Any) -> bool:
    combines = [hasattr(metric, "merge_states"), private.is_of_keras(type(metric))]
    return not any(combines) and all(v.aggregation != "none" for v in metric.variables)


def _traced(function: Callable[..., Any], *parts: Any) -> Any:
    """`function` as a graph, for any number of rows of tensors like these."""
    specs = tf.nest.map_structure(_of_any_rows, parts)
    found = tf.function(function, input_signature=specs, autograph=False)
    graph = found.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    if any("pyfunc" in (op := node.op.lower()) or op.startswith("ringreduce") for node in nodes):
        raise NotImplementedError("It may call the ring.")
    return found


def _of_any_rows(tensor: Any) -> Any:
    spec = tf.type_spec_from_value(tensor)
    is_dense = isinstance(spec, tf.TensorSpec)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_dense else spec


@contextmanager
def _quiet(what: str, ring: Communicator) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _log.debug("[%d/%d] could not try %s: %r", *ring.config.who.values(), what, error)
