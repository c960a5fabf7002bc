"""Finds losses and metrics of one's own that N ranks do not compute as one process does.

They are tried on the first rows that a rank reads. Of a loss that reduces by itself the values of
two parts, weighted by rows, must be that of the whole; the states of a metric after two halves,
combined as those of ranks are, must give the result of both. All ranks trace alike, since functions
may call the ring; what does, or fails, or is random, is not tried. State is put back.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.metric_states import combined, metrics_in, numbers_in, restored
from ringreduce.keras.mistakes import warn_of_losses
from ringreduce.keras.parts.part import is_own_piece
from ringreduce.keras.rows import rows_in, slice_rows
from ringreduce.keras.step import own_step

_log = logging.getLogger(__name__)
FIRST_ROWS = 64
_TOLERANCE = 1e-3  # of what float32 rounds, of hundreds of values
# By what `compile` has made of metrics, the names in logs of those whose states do not combine.
_apart: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


def names_apart(model: Any) -> list[str]:
    """The names in logs of metrics of `model` that were found not to combine."""
    return _apart.get(_compiled(model), [])


def _compiled(model: Any) -> Any:
    return getattr(model, "_compile_metrics", None) or model


class FirstBatch:
    """The first batch that this rank reads of a dataset, noted as it passes."""

    parts: Any = None  # its tensors, as arrays

    def noted(self, dataset: Any) -> Any:
        """`dataset` with the same batches."""

        def note(number: Any, *parts: Any) -> Any:
            self.parts = parts
            return number

        def look(number: Any, batch: Any) -> Any:
            parts = [number, *tf.nest.flatten(batch, expand_composites=True)]
            noted = tf.cond(
                number == 0, lambda: tf.numpy_function(note, parts, tf.int64), lambda: number
            )
            with tf.control_dependencies([noted]):
                return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        with suppress(Exception):  # Not of every element.
            found = dataset.enumerate().map(look)
            found.cardinality = dataset.cardinality
            return found
        return dataset


def try_metrics(model: Any, spec: Any, parts: Sequence[Any], ring: Communicator) -> None:
    """Try the metrics of a model that is evaluated; those of one that was trained have been."""
    if _compiled(model) not in _apart and parts is not None:
        Probe(model, spec, ring, with_losses=False).try_on(parts)


class Probe(keras.callbacks.Callback):
    """Tries what a built and compiled model has of the user's own, after the first batch."""

    def __init__(
        self, model: Any, spec: Any, ring: Communicator, *, with_losses: bool = True
    ) -> None:
        super().__init__()
        self._owner, self._ring = model, ring
        self._spec = tf.nest.map_structure(_of_any_rows, spec)
        self._first = FirstBatch()
        self._losses: dict[str, Any] = {}
        self._forward: Any = None
        self._update: Any = None
        # Its name in logs begins with that of an output, where there are several.
        self._names = [metric.name for metric in metrics_in(model) if _may_not_combine(metric)]
        with suppress(Exception):
            losses = dict(_own_losses(model)) if with_losses else {}
            if (losses or self._names) and not any(map(is_own_piece, model.weights)):
                self._trace(losses)

    def _trace(self, losses: dict[str, Any]) -> None:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(self._spec)
        call = _traced(lambda x: self._owner(x, training=False), x)
        outputs = tf.nest.map_structure(
            tf.TensorSpec.from_tensor, call.get_concrete_function().structured_outputs
        )
        for name, loss in losses.items():
            with suppress(Exception):
                found = _traced(loss, y, outputs)
                if found.get_concrete_function().structured_outputs.shape.rank == 0:
                    self._losses[name] = found
        if self._names:
            given = (x, y, outputs) if weights is None else (x, y, outputs, weights)
            with suppress(Exception):
                self._update = _traced(self._owner.compute_metrics, *given)
        self._forward = call

    def noting(self, dataset: Any) -> Any:
        """`dataset`, whose first batch is noted as it passes, if there is something to try."""
        return self._first.noted(dataset) if self._losses or self._update is not None else dataset

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._first.parts is not None:
            self.try_on(self._first.parts)
            self._first.parts = None

    def try_on(self, parts: Sequence[Any]) -> None:
        """Try what there is on a batch, given as its tensors or arrays."""
        if self._forward is not None:
            with suppress(Exception):
                self._try(self._forward, list(map(tf.convert_to_tensor, parts)))
            self._forward = None

    def _try(self, forward: Callable[[Any], Any], parts: list[Any]) -> None:
        data = tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)
        count = min(FIRST_ROWS, int(rows_in(data)))
        x, y, weights = keras.utils.unpack_x_y_sample_weight(slice_rows(data, 0, count))
        model, half = self._owner, count // 2
        with restored([*model.non_trainable_variables, *model.metrics_variables]):
            outputs = forward(x)
            found = [name for name, f in self._losses.items() if not _is_mean(f, y, outputs, count)]
            if self._update is not None and half:
                given = (x, y, outputs) if weights is None else (x, y, outputs, weights)
                halves = [slice_rows(given, *ends) for ends in ((0, half), (half, 2 * half))]
                _apart[_compiled(model)] = self._not_combining(halves)
        if rest := [name for name in self._losses if name not in found]:
            text = "on the first %d rows the loss %s is a mean over samples; masks may make others"
            _log.info(text, count, ", ".join(rest))
        if found and self._ring.rank == 0:
            warn_of_losses(found, count, self._ring)

    def _not_combining(self, halves: list[Any]) -> list[str]:
        model, update = self._owner, self._update
        variables = list({id(v): v for m in metrics_in(model) for v in m.variables}.values())

        def after(*parts: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
            model.reset_metrics()
            for part in parts:
                update(*part)
            return [np.array(v.numpy()) for v in variables], numbers_in(model.get_metrics_result())

        (one, _), (two, _), (_, whole), (_, again) = (
            *(after(half) for half in halves),
            *(after(*halves) for _ in range(2)),
        )
        for variable, *values in zip(variables, one, two, strict=True):
            variable.assign(combined(values, variable.aggregation))
        together = numbers_in(model.get_metrics_result())
        return [
            name
            for name in whole
            if any(name == own or name.endswith(f"_{own}") for own in self._names)
            and np.array_equal(whole[name], again[name], equal_nan=True)
            and not np.allclose(together[name], whole[name], _TOLERANCE, 1e-6, equal_nan=True)
        ]


def _is_mean(loss: Any, y: Any, outputs: Any, count: int) -> bool:
    at = count // 3
    parts = [(0, count), (0, count), (0, at), (at, count)]
    whole, again, one, two = (float(loss(*slice_rows((y, outputs), *ends))) for ends in parts)
    if not at or whole != again or not np.isfinite([whole, one, two]).all():
        return True
    mean = (at * one + (count - at) * two) / count
    return abs(mean - whole) <= _TOLERANCE * max(abs(one), abs(two))


def _of_any_rows(spec: Any) -> Any:
    is_dense = isinstance(spec, tf.TensorSpec)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_dense else spec


def _is_of_keras(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).startswith(("keras.", "ringreduce."))


def _own_losses(model: Any) -> Iterator[tuple[str, Any]]:
    """By name, those of the losses of a built model that are not Keras's, as functions."""
    if type(model).compute_loss is not keras.Model.compute_loss or own_step(model) is not None:
        return
    for path, loss, _, name in private.losses_of(model):
        if _is_of_keras(type(loss)) and _is_of_keras(getattr(loss, "fn", type(loss))):
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
    combines = [hasattr(metric, "merge_states"), _is_of_keras(type(metric))]
    return not any(combines) and all(v.aggregation != "none" for v in metric.variables)


def _traced(function: Callable[..., Any], *specs: Any) -> Any:
    found = tf.function(function, input_signature=specs, autograph=False)
    graph = found.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    if any("pyfunc" in (op := node.op.lower()) or op.startswith("ringreduce") for node in nodes):
        raise NotImplementedError("It may call the ring.")
    return found
