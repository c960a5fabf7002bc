"""Weights a model's training steps by their rows; an empty step changes nothing.

It runs the same graph on a sample of zeros: its gradients have weight 0, and its changes of metrics
and moving averages are undone.
"""

from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private, weighting
from ringreduce.keras.checks.seeds import is_seed_state, states_of_tensorflow
from ringreduce.keras.data.uneven import filled
from ringreduce.keras.layers.normalization import SyncBatchNormalization
from ringreduce.keras.optimizers_in import is_alone
from ringreduce.keras.rows import rows_in
from ringreduce.keras.step import WEIGHTED, Step, put_around
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.variables import lasting

_ALONE = 1.0  # any mean: where ranks step alone nothing is divided by it


class _Weighed:
    """A model whose steps are weighted."""

    ring: Any = None  # its communicator
    mean: Any = None  # of all ranks' weights; None: they are asked

    def __init__(self) -> None:
        # The last logs of a step with data, by position, dtype and shape.
        self.logs: dict[tuple[Any, ...], Any] = {}


def weigh_steps(model: Any, ring: Communicator, is_counted: bool = True, mean: Any = None) -> None:
    """From now on training steps of `model`, which is built, are weighted; empty ones do nothing.

    With `is_counted` all ranks know when an epoch ends: those that step alone need nothing of
    others then. `mean` is a variable with the mean of all weights; without it each step asks.
    """
    if mean is None and is_counted and is_alone(model):
        mean = _ALONE
    kept_for = kept(model, _Weighed)
    if kept_for.ring is ring and kept_for.mean is mean:
        return
    kept_for.ring, kept_for.mean = ring, mean
    # A function traced before has another weighting, or none.
    model.train_function = None
    put_around(model, WEIGHTED, _followed_step)


def _followed_step(model: keras.Model, step: Step, data: Any) -> Any:
    how, rows = kept(model, _Weighed), tf.cast(rows_in(data), tf.float32)
    if how.mean is None:
        weight = weighting.exchanged(rows, how.ring)
    else:
        weight = weighting.Weight(rows, tf.convert_to_tensor(how.mean))
    # Everything waits until a rank is known to have data: at the end of an epoch this step is given
    # up, and must not have been counted, or decayed weights.
    with tf.control_dependencies([weight.mean]):
        return weighed(model, step, data, weight)


def weighed(model: keras.Model, step: Step, data: Any, weight: weighting.Weight) -> Any:
    """`step` with that weight; without data it changes nothing, and returns the latest logs."""
    has_data = rows_in(data) > 0
    with weighting.using(weight):
        before = [(variable, tf.identity(variable.value)) for variable in _passing(model)]
        logs = step(filled(data))
        return _restore(model, before, has_data, logs)


def _passing(model: keras.Model) -> list[Any]:
    """Metrics and moving averages of this rank's own batches, not those of all ranks'."""
    # A frozen weight that changes follows trained ones, as a moving average of weights does.
    layers = private.layers_of(model)
    shared = {id(v) for layer in (model, *layers) for v in private.made_to_be_trained(layer)}
    for layer in layers:
        if isinstance(layer, SyncBatchNormalization):
            shared |= {id(variable) for variable in layer.non_trainable_variables}
    passing = [*model.non_trainable_variables, *model.metrics_variables]
    unique = {id(v): v for v in passing if id(v) not in shared and not is_seed_state(v)}
    return list(unique.values())


def changed_by_steps(model: keras.Model) -> list[Any]:
    """List what a step changes on this rank besides weights and their optimizer's state."""
    states = [*filter(is_seed_state, model.non_trainable_variables), *states_of_tensorflow(model)]
    return [*_passing(model), *states]


def _restore(model: keras.Model, before: list[tuple[Any, Any]], has_data: Any, logs: Any) -> Any:
    """Undo an empty step; return the logs: for an empty step those of the last real one.

    So the loss of a sample of zeros is not shown, and a NaN in it does not end training. Metrics
    are computed again from their restored values. Values whose shape is not fixed stay.
    """
    values = [tf.convert_to_tensor(value) for value in tf.nest.flatten(logs)]
    latest = [_latest(model, place, value) for place, value in enumerate(values)]

    def keep() -> list[Any]:
        for variable, value in zip(latest, values, strict=True):
            if variable is not None:
                variable.assign(value)
        return [tf.identity(value) for value in values]

    def put_back() -> list[Any]:
        restored = [tf.convert_to_tensor(variable.assign(value)) for variable, value in before]
        pairs = zip(latest, values, strict=True)
        after = [value if last is None else tf.convert_to_tensor(last) for last, value in pairs]
        with tf.control_dependencies(restored):
            results = model.get_metrics_result()
        names = tf.nest.flatten({name: name for name in logs}) if len(after) == len(logs) else []
        for place, name in enumerate(names):
            if name in results:
                after[place] = tf.cast(results[name], values[place].dtype)
        return [tf.identity(value) for value in after]

    return tf.nest.pack_sequence_as(logs, tf.cond(has_data, keep, put_back)) if values else logs


def _latest(model: keras.Model, place: int, value: Any) -> Any:
    """A variable for the last real value at an index of the logs, first 0; None: no fixed shape."""
    if not value.shape.is_fully_defined():
        return None
    logs, key = kept(model, _Weighed).logs, (place, value.dtype, tuple(value.shape))
    if key not in logs:
        with tf.init_scope():
            logs[key] = lasting(tf.zeros(value.shape, value.dtype))
    return logs[key]
