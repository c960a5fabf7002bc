"""Ranks with batches of unequal numbers and lengths: what they train to, and when they end.

What must come out is computed beside it, by plain Keras: its step k trains on the batches that the
ranks have in step k, put together. To save time most is eager on 2 ranks; on 3 all is in graphs.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ConfigError
from tests.models import CountSteps, model_of_ranks
from tests.programs.shared import built, difference, digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

# Samples of each batch of each rank; rank r's are BATCHES[r % 3].
BATCHES = [[4, 4, 4, 4, 2], [4, 4, 1], []]
SGD, Adam, Dense = keras.optimizers.SGD, keras.optimizers.Adam, keras.layers.Dense
each_way = pytest.mark.parametrize("wrap", [lambda function: function, tf.function])


def on_2_and_3(function):
    return pytest.mark.parametrize("size", [2, in_full(3)])(on_ranks()(function))


def batches_of(rank, batches=BATCHES):
    generator = np.random.default_rng(rank)
    inputs = [generator.normal(size=(n, 4)).astype("float32") for n in batches[rank % len(batches)]]
    return [(rows, rows[:, :2] ** 2) for rows in inputs]


def dataset_of(batches, *, known=True):
    def generate():
        yield from batches

    # Those of Ray Data have names, and no known length.
    names = (None, None) if known else ("inputs", "targets")
    shapes = zip(((None, 4), (None, 2)), names, strict=True)
    spec = tuple(tf.TensorSpec(shape, tf.float32, name) for shape, name in shapes)
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches))) if known else data


class Traced(keras.layers.Layer):
    """Counts how often it is called in training: in a graph, once for each trace."""

    count = 0

    def call(self, inputs, training=False):
        self.count += bool(training)
        return inputs


def make_model(optimizer, *layers, **options):
    keras.utils.set_random_seed(5)
    layers = layers or (Dense(6, activation="tanh"), Traced())
    return model_of_ranks(optimizer, *layers, **options)


def make_plain(optimizer, *layers):
    """The same of plain Keras, untraced, since each length of a batch would be traced."""
    return make_model(optimizer, *layers, run_eagerly=True)


def train_alone(model, batches=BATCHES, *, epochs=1):
    """Train on the batches of all ranks."""
    everyone = [batches_of(rank, batches) for rank in range(rr.size())]
    for _ in range(epochs):
        for step in range(max(map(len, everyone))):
            parts = [part for own in everyone for part in own[step : step + 1]]
            model.train_on_batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return model


def compared(model, train_plain):
    """Check on rank 0 that a plain model trains to the same; return all weights' digest."""
    if rr.rank() == 0:
        assert difference(model, train_plain()) < 2e-6
    return digest(model.get_weights())


def fit(model, batches, *, known=True, **options):
    data = dataset_of(batches, known=known)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        return rr.fit(model, data, per_rank_data=True, verbose=0, **options).history


UNKNOWN = {"known": False}


@pytest.mark.parametrize(
    ("size", "make", "data", "options", "count"),
    [
        (2, SGD, {}, {}, 5),
        (2, SGD, UNKNOWN, {"is_built": False, "run_eagerly": False}, 5),
        in_full(2, SGD, UNKNOWN, {"steps_per_execution": 2, "run_eagerly": False}, 3),
        in_full(3, SGD, {}, {}, 5),
        in_full(3, SGD, {}, {"run_eagerly": True}, 5),
        in_full(3, SGD, UNKNOWN, {"is_built": False}, 5),
        in_full(3, Adam, {}, {"is_built": False}, 5),
        in_full(3, SGD, UNKNOWN, {"steps_per_execution": 2}, 3),
        in_full(3, SGD, UNKNOWN, {"steps_per_execution": 8}, 1),
    ],
)
@on_ranks()
def test_all_train_as_one_process_and_epochs_end_together(make, data, options, count):
    """After the longest rank's 5 batches, and nothing counts the step that found no data."""
    model, steps = make_model(rr.DistributedOptimizer(make(0.1)), **options), CountSteps()
    losses = fit(model, batches_of(rr.rank()), **data, epochs=2, callbacks=[steps])["loss"]
    assert (steps.counts, len(losses)) == ([count] * 2, 2)
    assert int(model.optimizer.iterations.numpy()) == 10
    if not model.run_eagerly and count == 5:
        assert model.layers[1].count == 1  # No variable of its trace is kept from step to step.
    if rr.rank() == 0:
        alone = train_alone(make_plain(make(0.1)), epochs=2)
        assert difference(model, alone) < 2e-6
        assert difference(make_plain(SGD()), alone) > 0.1
    return digest(model.get_weights())


@on_ranks(2)
def test_empty_steps_leave_no_trace_in_metrics_and_moving_averages():
    """All show the metrics of the only one that has data, of 0 for rank 1."""
    norm, norm_alone = (keras.layers.BatchNormalization(momentum=0.5) for _ in range(2))
    model = make_model(rr.DistributedOptimizer(SGD(0.0)), norm)
    batches = batches_of(2 * rr.rank())
    mae = fit(model, batches)["mae"]
    if rr.rank() == 0:
        alone = make_plain(SGD(0.0), norm_alone)
        assert alone.fit(dataset_of(batches), verbose=0, shuffle=False).history["mae"] == mae
        assert digest(norm.non_trainable_variables) == digest(norm_alone.non_trainable_variables)
    return mae, digest(norm.non_trainable_variables)


@on_2_and_3
def test_normalization_over_all_ranks_leaves_out_who_has_no_data():
    """With weights before the layer, whose gradients pass through it, and those of other ranks."""

    def layers(norm):
        keras.utils.set_random_seed(4)
        return Dense(5), norm(momentum=0.5), keras.layers.Activation("tanh")

    model = make_model(rr.DistributedOptimizer(SGD(0.1)), *layers(rr.SyncBatchNormalization))
    fit(model, batches_of(rr.rank()))
    plain = make_plain(SGD(0.1), *layers(keras.layers.BatchNormalization))
    return compared(model, lambda: train_alone(plain))


class Parts(keras.Model):
    """No `call`: two parts, the second not built, an optimizer each, and a slow copy of one."""

    def __init__(self, wrap, **options):
        keras.utils.set_random_seed(5)
        super().__init__()
        self.first = keras.Sequential([keras.Input((4,)), Dense(6)])
        self.second = Dense(2)
        self.slow = keras.models.clone_model(self.first)
        self.slow.set_weights(self.first.get_weights())
        self.slow.trainable = False
        self.compile(**options)
        self.optimizers = [wrap(Adam(0.01)) for _ in range(2)]
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        inputs, targets, *_ = data
        parts = self.first, self.second
        with tf.GradientTape(persistent=True) as tape:
            outputs = self.second(keras.ops.tanh(self.first(inputs)))
            loss = keras.losses.MeanSquaredError()(targets, outputs)
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            weights = part.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        for slow, weight in zip(self.slow.weights, self.first.weights, strict=True):
            slow.assign(0.5 * slow + 0.5 * weight)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@on_2_and_3
def test_a_model_of_parts_trains_as_one_process_does():
    """Its optimizers are built too, and a slow copy of its weights follows in empty steps."""
    model = Parts(rr.DistributedOptimizer, run_eagerly=rr.size() == 2)
    fit(model, batches_of(rr.rank()))
    assert len(model.get_weights()) == 6
    plain = Parts(lambda optimizer: optimizer, run_eagerly=True)
    return compared(model, lambda: train_alone(plain))


@each_way
@on_ranks(2)
def test_gradients_that_cross_ranks_count_by_the_samples_of_their_loss(wrap):
    """The loss compares this rank's samples with those of all."""
    rows = np.random.default_rng(3).normal(size=(7, 4)).astype("float32")
    own = rows[:4] if rr.rank() == 0 else rows[4:]
    weights = tf.Variable(np.random.default_rng(4).normal(size=(4, 2)).astype("float32"))

    def distances(some, every):
        return tf.reduce_mean(tf.square(some[:, tf.newaxis] - every[tf.newaxis]))

    def gradient():
        with rr.step_weight(len(own)):
            with rr.DistributedGradientTape() as tape:
                embedded = tf.tanh(own @ weights)
                loss = distances(embedded, rr.all_gather(embedded))
            return tape.gradient(loss, weights)

    with tf.GradientTape() as tape:
        embedded = tf.tanh(rows @ weights)
        loss = distances(embedded, embedded)
    found = wrap(gradient)()
    assert tf.reduce_max(tf.abs(found - tape.gradient(loss, weights))) < 1e-6
    return digest([found])


class Noisy(keras.Sequential):
    """Logs something that is no metric, too."""

    def train_step(self, data):
        return {**super().train_step(data), "largest": tf.reduce_max(data[0])}


@on_2_and_3
def test_an_infinity_of_an_empty_step_does_not_count():
    """In no weight, and in no log, where TerminateOnNaN would end training.

    The logarithm of a sample of zeros is infinite. An empty step logs what the last real one did.
    """
    keras.utils.set_random_seed(5)
    logarithm = keras.layers.Lambda(lambda x: tf.math.log(tf.abs(x)))
    layers = [logarithm, Dense(3), rr.SyncBatchNormalization(), Dense(2)]
    model = Noisy([keras.Input((4,)), *layers])
    model.compile(rr.DistributedOptimizer(SGD(0.01)), "mse", metrics=["mae"])
    built(model, np.zeros((1, 4)), np.zeros((1, 2)))
    batches, steps = batches_of(rr.rank()), CountSteps()
    fit(model, batches, callbacks=[steps, keras.callbacks.TerminateOnNaN()])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert steps.counts == [5]
    assert steps.logs["largest"] == pytest.approx(batches[-1][0].max() if batches else 0.0)
    return digest(model.get_weights())


@on_2_and_3
def test_accumulation_is_that_of_keras():
    """Each step counts alike, whatever its length; within it each rank by its rows."""
    batches = [[4, 2, 3, 1], [2, 2], [1]]
    model = make_model(rr.DistributedOptimizer(SGD(0.1), gradient_accumulation_steps=2))
    fit(model, batches_of(rr.rank(), batches))
    of_keras = SGD(0.1, gradient_accumulation_steps=2)
    return compared(model, lambda: train_alone(make_plain(of_keras), batches))


@on_2_and_3
def test_a_loop_of_ones_own_is_told_how_many_samples_are_real():
    model = make_model(rr.DistributedOptimizer(SGD(0.1)))

    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(targets - model(inputs, training=True)))
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)

    step = step if rr.size() == 2 else tf.function(step, reduce_retracing=True)
    seen = []
    for (inputs, targets), samples in rr.joined(dataset_of(batches_of(rr.rank()))):
        step(inputs, targets)
        seen.append(samples)
    assert seen == [[4, 4, 4, 4, 2], [4, 4, 1, 0, 0], [0] * 5][rr.rank()]
    return compared(model, lambda: train_alone(make_plain(SGD(0.1))))


@each_way
@on_ranks(2)
def test_a_weight_of_zero_leaves_out_even_nan(wrap):
    variable = tf.Variable([0.0])
    optimizer = rr.DistributedOptimizer(SGD(1.0))

    def apply(gradient, samples):
        with rr.step_weight(samples):
            optimizer.apply([gradient], [variable])

    gradient = tf.constant([1.0 if rr.rank() else np.nan])
    wrap(apply)(gradient, rr.rank() if wrap is not tf.function else tf.constant(rr.rank()))
    assert variable.numpy() == pytest.approx([-1])


@on_ranks(2)
def test_a_weight_ends_with_its_block():
    """Weights 1 and 2 of gradients 0 and 1; the same around others; none."""
    variable, gradient = tf.Variable([0.0]), tf.constant([float(rr.rank())])
    optimizer = rr.DistributedOptimizer(SGD(1.0))
    step = tf.function(lambda: optimizer.apply([gradient], [variable]))
    moved = []
    for has_inner in (False, True):
        variable.assign([0.0])
        with rr.step_weight(1 + rr.rank()):
            if has_inner:
                with rr.step_weight(1):
                    pass
            step()
        moved.append(float(variable.numpy()[0]))
    variable.assign([0.0])
    step()  # As it was traced: weighted, but now by nothing.
    assert [*moved, variable.numpy()[0]] == pytest.approx([-2 / 3, -2 / 3, -0.5])


@on_ranks(2)
def test_what_cannot_be_joined_is_refused():
    model, rows = make_model(rr.DistributedOptimizer(SGD(0.1))), np.zeros((3, 4))
    with pytest.raises(ConfigError, match=r"tf\.data\.Dataset"):
        next(rr.joined(rows))
    limited = {"steps_per_epoch": 3, "batch_size": 4}
    for data, options, text in (
        (tf.data.Dataset.range(3), {}, "Batch it"),
        (rows, {}, "got ndarray as x with per_rank_data=True"),
        (dataset_of([]), limited, "got batch_size, steps_per_epoch with per_rank_data=True"),
    ):
        with pytest.raises(ConfigError, match=text):
            rr.fit(model, data, per_rank_data=True, **options)
