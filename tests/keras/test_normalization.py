"""`SyncBatchNormalization`: N ranks of batch B are one process of batch N B, and it saves plain."""

import runpy
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private
from ringreduce.vocabulary.errors import ClosedError, ConfigError
from tests.programs.shared import built, digest
from tests.ranks import on_ranks
from tests.scope import in_full
from tests.ways import by, needs_xla, plain, wrapped

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]
REWRITES_GRAPHS = True


def several_ranks(function):
    return pytest.mark.parametrize("size", [2, in_full(3)])(on_ranks()(function))


def normalized(layer):
    keras.utils.set_random_seed(6)
    relu, flatten = keras.layers.Activation("relu"), keras.layers.Flatten()
    layers = [keras.layers.Dense(3), layer(momentum=0.7), relu, flatten, keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4, 4, 2)), *layers])


@by("as usual", full=("eager", "jit"))
def test_workers_end_where_one_process_does(how):
    """Moving statistics included; inference sends nothing."""
    rng = np.random.default_rng(1)
    inputs = rng.normal(3, 2, (36, 4, 4, 2)).astype("float32")
    targets = rng.normal(size=(36, 2)).astype("float32")
    data = rr.shard(tf.data.Dataset.from_tensor_slices((inputs, targets))).batch(12 // rr.size())
    model = normalized(rr.SyncBatchNormalization)
    sgd = partial(keras.optimizers.SGD, 0.05, momentum=0.9)
    options = {"eager": {"run_eagerly": True}, "jit": {"jit_compile": True}}.get(how, {})
    model.compile(rr.DistributedOptimizer(sgd()), "mse", **options)
    built(model).fit(data, shuffle=False, verbose=0)
    before = default_communicator().statistics().collectives
    if rr.size() != 2:  # There the layer is called for inference below.
        model.evaluate(inputs, targets, verbose=0)
        model.predict(inputs, verbose=0)
    assert default_communicator().statistics().collectives == before
    if rr.rank() == 0:
        alone = normalized(keras.layers.BatchNormalization)
        start = alone.get_weights()
        alone.compile(sgd(), "mse", run_eagerly=True)
        alone.fit(inputs, targets, batch_size=12, shuffle=False, verbose=0)
        for got, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=5e-6, atol=5e-6)
        # Otherwise equal weights would prove nothing.
        moved = [np.abs(a - b).max() for a, b in zip(start, alone.get_weights(), strict=True)]
        assert max(moved) > 0.1
    return digest(model.get_weights())


def unequal_rows(seed, mean, deviation):
    """Rows of all ranks, (n, 4, 3), and which are this rank's; the last of three has none."""
    rows = (3, 5, 0)[: rr.size()] if rr.size() > 1 else (8,)
    inputs = np.random.default_rng(seed).normal(mean, deviation, (sum(rows), 4, 3))
    start = sum(rows[: rr.rank()])
    return inputs.astype("float32"), slice(start, start + rows[rr.rank()])


@pytest.mark.parametrize(("axis", "is_masked"), [(-1, False), (-1, True), (1, False)])
@by("eager", "jit", full=("graph",))
def test_it_is_of_all_rows_together(how, axis, is_masked):
    """Outputs, gradients and moments on this rank's rows, beside those of Keras's on all rows."""
    inputs, own = unequal_rows(3, 2, 3)
    rng = np.random.default_rng(2)
    upstream = tf.constant(rng.normal(size=inputs.shape), "float32")
    mask = rng.random(inputs.shape[:2]) < 0.6
    mask[:1] = True

    def step_of(layer, rows):
        layer.build(inputs.shape)
        value, kept = tf.constant(inputs[rows]), tf.constant(mask[rows])

        def step():
            with tf.GradientTape() as tape:
                tape.watch(value)
                result = layer(value, training=True, mask=kept if is_masked else None)
                if is_masked:
                    result = tf.where(kept[..., tf.newaxis], result, 0.0)
                loss = tf.reduce_sum(result * upstream[rows])
            return result, *tape.gradient(loss, [value, layer.gamma])

        return step

    ours = rr.SyncBatchNormalization(momentum=0.5, axis=axis)
    plain_layer = keras.layers.BatchNormalization(momentum=0.5, axis=axis)
    output, by_input, by_gamma = wrapped(how, step_of(ours, own))()
    all_outputs, by_all_inputs, by_all_gamma = step_of(plain_layer, slice(None))()
    for got, wanted in (
        (output, all_outputs[own]),
        (by_input, by_all_inputs[own]),
        (rr.all_reduce(by_gamma), by_all_gamma),  # That of a rank is of its own rows.
        (ours.moving_mean, plain_layer.moving_mean),
        (ours.moving_variance, plain_layer.moving_variance),
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)


@several_ranks
def test_the_variance_is_right_far_from_zero():
    inputs, own = unequal_rows(4, 1e4, 1)
    layer = rr.SyncBatchNormalization(momentum=0.0)
    layer(inputs[own], training=True)
    exact = inputs.astype("float64").var((0, 1))
    np.testing.assert_allclose(layer.moving_variance, exact, rtol=2e-3)


@several_ranks
def test_frozen_it_sends_nothing_and_a_copy_synchronizes():
    comm = default_communicator()
    before = comm.statistics().collectives
    layer = rr.SyncBatchNormalization()
    layer.trainable = False
    layer(tf.ones((2, 3)), training=True)
    layer.trainable = True
    layer(tf.ones((2, 3)), training=False)
    assert comm.statistics().collectives == before
    model = keras.Sequential([keras.Input((3,)), rr.SyncBatchNormalization(momentum=0.0)])
    copied = keras.models.clone_model(model)
    copied(tf.fill((2, 3), float(rr.rank())), training=True)
    assert comm.statistics().collectives == before + 1
    assert plain(copied.layers[0].moving_mean) == pytest.approx([(rr.size() - 1) / 2] * 3)


def test_a_saved_one_may_go_on_synchronized(tmp_path):
    """Where ringreduce is not installed it is a plain one, as in test_saving."""
    file, layer = tmp_path / "model.keras", rr.SyncBatchNormalization
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), layer(momentum=0.5)]).save(file)
    loaded = rr.load_model(file, sync_batch_normalization=True)
    assert isinstance(loaded.layers[-1], layer)
    assert loaded.layers[-1].momentum == 0.5


@needs_xla
def test_keras_may_compile_it_where_the_ring_can_be_called(monkeypatch):
    layer = rr.SyncBatchNormalization()
    assert layer.supports_jit
    monkeypatch.setattr("ringreduce.tensorflow.xla.why_not", lambda: "for once")
    assert not layer.supports_jit


def test_training_without_a_ring_and_synchronized_are_refused():
    with pytest.raises(ClosedError, match="ring"):
        rr.SyncBatchNormalization()(np.ones((2, 3)), training=True)
    with pytest.raises(ConfigError, match=r"tf\.distribute"):
        rr.SyncBatchNormalization(synchronized=True)


def test_a_keras_that_computes_moments_elsewhere_is_refused(monkeypatch):
    monkeypatch.delattr(keras.layers.BatchNormalization, "_moments")
    monkeypatch.setattr(keras.layers.BatchNormalization, "call", lambda self, inputs: inputs)
    with pytest.raises(ConfigError, match=f"{keras.__version__} has no BatchNormalization"):
        runpy.run_path(private.__file__)
