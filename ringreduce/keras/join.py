"""Training on unequal amounts of data: a rank without batches makes empty steps until all are done.

    rank 0   batch  batch  batch  batch  batch
    rank 1   batch  batch  batch  empty  empty       weight 0 in the mean; changes nothing

Each step begins with an exchange of each rank's weight, but where ranks step alone (`LocalSGD`). An
empty step runs the same graph on a sample of zeros: its gradients have weight 0, and its changes of
metrics and moving averages are undone.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private, weighting, wrappable
from ringreduce.keras.normalization import SyncBatchNormalization
from ringreduce.keras.rows import at_least_one, is_absent, map_arrays, rows_in
from ringreduce.keras.seeds import is_seed_state, states_of_tensorflow
from ringreduce.keras.step import WEIGHTED, Step, own_step, put_around
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.variables import lasting
from ringreduce.vocabulary.errors import ConfigError

_ALONE = 1.0  # any mean: where ranks step alone nothing is divided by it


def padded(dataset: Any, model: Any, ring: Communicator) -> Any:
    """This rank's `dataset` with empty batches at its end, as many as the longest rank's needs.

    Collective: builds `model`, and has each of its training steps weighted by this rank's samples.
    Where a number of batches is not known, the last step of an epoch has no data on any rank, and
    changes nothing; with ``steps_per_execution`` or ``jit_compile=True`` such a dataset is first
    read once, to count it. ConfigError if no rank has any data, or one's never ends.
    """
    empty = empty_batch(_spec_of(dataset))
    if ring.size == 1:
        return dataset
    count, at_once = int(dataset.cardinality()), model.steps_per_execution > 1 or model.jit_compile
    if at_once and count == tf.data.UNKNOWN_CARDINALITY:
        # Else the step without data would discard earlier steps of its execution, and XLA would
        # have done half of it.
        count = int(dataset.reduce(np.int64(0), lambda n, *_: n + 1))
    longest = _longest(count, ring)
    build(model, spec := dataset.element_spec)
    weigh_steps(model, ring, is_counted=longest is not None)
    if any(part.name for part in tf.nest.flatten(spec) if not is_absent(part)):
        # `concatenate` would compare names of tensors, such as Ray Data's.
        dataset = dataset.map(lambda *parts: parts if isinstance(spec, tuple) else parts[0])
    endless = dataset.concatenate(tf.data.Dataset.from_tensors(empty).repeat())
    if longest is not None:
        return endless.take(longest).apply(tf.data.experimental.assert_cardinality(longest))
    # The filter hides from Keras that the dataset is endless, for which it wants steps_per_epoch.
    return endless.filter(lambda *_: True)


def joined(dataset: Any, *, communicator: Communicator | None = None) -> Iterator[Any]:
    """The batches of `dataset`, for a custom loop over unequal amounts of data.

    A rank that runs out gets a sample of zeros, shape (1, ...), until all have run out; its
    gradients count nothing. Gradients applied in the loop's body are weighted as within
    `step_weight` (see there for functions)::

        for (x, y), samples in rr.joined(dataset):
            with tf.GradientTape() as tape:
                loss = ...
            optimizer.apply(tape.gradient(loss, weights), weights)
            if samples:
                metric.update_state(loss)

    Collective, once for each batch. One such loop at a time in each thread. Leave it early only on
    all ranks after the same batch, and call ``close()`` on it where something still refers to it:
    until then gradients are weighted.

    Args:
        dataset: a batched tf.data.Dataset of tensors whose first dimension is the samples. May be
            empty.

    Yields:
        An element of the dataset, and its number of samples: 0 for a sample of zeros.

    Raises:
        ConfigError: the dataset is of another kind.
    """
    ring = communicator or default_communicator()
    empty = empty_batch(_spec_of(dataset))
    if ring.size == 1:
        for batch in dataset:
            yield batch, int(rows_in(batch))
        return
    batches = iter(dataset)
    while True:
        batch = next(batches, None)
        count = 0 if batch is None else int(rows_in(batch))
        try:
            weight = weighting.exchanged(tf.constant(float(count)), ring)
        except tf.errors.OutOfRangeError:
            return
        with weighting.using(weight):
            yield filled(empty if count == 0 else batch), count


def _longest(count: int, ring: Communicator) -> int | None:
    """The largest number of batches of any rank; None where a rank does not know its own."""
    counts = ring.all_gather_object(count)
    named, problem = zip(ring.members, counts, strict=True), ""
    if endless := [str(rank) for rank, n in named if n == tf.data.INFINITE_CARDINALITY]:
        problem = f"the dataset of rank{'s' * (len(endless) > 1)} {', '.join(endless)} never ends"
        remedy = "Data that never ends needs no sharded=True; pass steps_per_epoch to fit."
    elif max(counts) == 0:
        problem = "no rank has any data"
        remedy = "Look at how the data is divided: rr.shard takes what is not batched."
    if problem:
        raise ring._session.fail(ConfigError(problem, remedy=remedy))
    return None if min(counts) < 0 else max(counts)


def _spec_of(dataset: Any) -> Any:
    """The `element_spec` of a tf.data.Dataset of batches."""
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(
            f"got {type(dataset).__name__} as a rank's own data",
            remedy="Pass a tf.data.Dataset, batched; tf.data.Dataset.from_tensor_slices(arrays)"
            ".batch(n) makes one of arrays.",
        )
    for spec in tf.nest.flatten(dataset.element_spec):
        if not is_absent(spec) and spec.shape.rank in (None, 0):
            text = f"got a dataset with elements {spec}"
            raise ConfigError(text, remedy="Batch it, and give it tensors of known rank.")
    return dataset.element_spec


def empty_batch(spec: Any) -> Any:
    """Tensors like those of batches of an `element_spec`, with no samples."""
    return map_arrays(_empty, spec)


def _empty(spec: Any) -> Any:
    shape = [0, *(1 if n is None else n for n in spec.shape[1:])]
    if isinstance(spec, tf.RaggedTensorSpec):
        ends = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        flat = tf.zeros([0, *shape[spec.ragged_rank + 1 :]], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(flat, ends)
    zeros = tf.zeros(shape, spec.dtype)
    return tf.sparse.from_dense(zeros) if isinstance(spec, tf.SparseTensorSpec) else zeros


def filled(batch: Any) -> Any:
    """`batch`, or one sample of zeros where it has none."""
    return map_arrays(at_least_one, batch)


def build(model: Any, spec: Any) -> None:
    """Create the variables of model, metrics and optimizer, for batches like `spec`; runs no step.

    `spec` is a dataset's ``element_spec``; a batch may have any number of rows.
    """
    # TensorFlow creates none where they would depend on the exchange at a step's beginning. A loss
    # has metrics of its own, one for each output.
    compiled = [getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss")]
    is_callable = type(model).call is not keras.Model.call
    if not (is_callable and model.built and all(part is None or part.built for part in compiled)):
        _build_by_tracing(model, spec, is_callable)
    wrappable.build_optimizer_here(model)


def _build_by_tracing(model: keras.Model, spec: Any, is_callable: bool) -> None:
    def call(data: Any) -> Any:
        return model(keras.utils.unpack_x_y_sample_weight(data)[0], training=False)

    own = own_step(model)
    steps: list[Step] = [partial(keras.Model.test_step, model), call]
    # Only its train_step knows what it needs of compile and data, or how its parts are called. An
    # eager one may keep numbers in lists, where a trace would leave tensors.
    if own is not None and not (model.run_eagerly and is_callable):
        steps.insert(0, own)
    problems = []
    for step in steps:
        try:
            return _trace(model, step, spec)
        except Exception as error:  # It may need what a callback sets, or works eagerly only.
            problems.append(error)
    if not model.built and not model.run_eagerly:
        raise problems[0]
    if not model.built and is_callable:
        call(filled(empty_batch(spec)))
    return None


def _trace(model: keras.Model, step: Step, spec: Any) -> None:
    """Create what `step` does when it is traced; what optimizers do at first waits for training."""
    with contextlib.ExitStack() as stack:
        held = [(w, stack.enter_context(w.deferred())) for w in wrappable.wrappers_in(model)]
        tf.function(lambda data: step(filled(data)), autograph=False).get_concrete_function(spec)
    for wrapper, steps in held:
        for _, variables in steps:
            if variables is not None and not wrapper.built:
                wrapper.build_inner(variables)


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
    if mean is None and is_counted and wrappable.is_alone(model):
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

    So the loss of zeros is not shown. Metrics are computed again from their restored values.
    Values whose shape is not fixed stay.
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
