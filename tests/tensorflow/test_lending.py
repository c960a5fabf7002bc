"""Results that TensorFlow has borrowed from the engine stay as they are while it has them."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.communicator.process import default_communicator
from ringreduce.effects import handoff, native
from ringreduce.tensorflow import GradientBridge
from tests.ranks import on_ranks

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(native.library() is None, reason="needs the native library"),
]
COUNT = 70_001  # Smaller results are copied.


def averaging(ring):
    """A function that returns the mean of a tensor full of a number, and that of one element."""
    bridge = GradientBridge(1 << 20)

    @tf.function
    def mean(number):
        return bridge.mean(ring, [tf.fill([COUNT], number), number[tf.newaxis]], ["many", "one"])

    return lambda number: mean(tf.constant(number, tf.float64))


@on_ranks(2)
def test_means_that_a_program_keeps_stay_as_they_are():
    mean = averaging(default_communicator())
    kept = [mean(number + rr.rank()) for number in range(5)]
    for number, (many, one) in enumerate(kept):
        assert (many.numpy() == number + 0.5).all()
        assert one.numpy().tolist() == [number + 0.5]


@on_ranks(2)
def test_memory_lives_as_long_as_its_last_result():
    before = handoff._areas.copy()
    ring = default_communicator().split(0)
    mean = averaging(ring)
    many, _ = mean(rr.rank())
    variable = tf.Variable(many)
    del mean
    gc.collect()
    ring.close()
    assert len(handoff._areas - before) == 1
    assert (many.numpy() == 0.5).all()
    del many
    assert (variable.numpy() == 0.5).all()
    variable.assign_add(tf.ones(COUNT, tf.float64))  # TensorFlow does not write into it.
    handoff._drop_unused_areas()
    assert not handoff._areas - before
    assert (variable.numpy() == 1.5).all()


def trained(sharded, keeps):
    """The weights after six steps; `keeps` gets their tensors, and copies, after each."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(257)])
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.1), sharded=sharded)
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.arange(1800, dtype="float32").reshape(6, 300) / 1800
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: keeps(model.trainable_variables)
    )
    rr.fit(model, x, x[:, :257], batch_size=2, epochs=2, verbose=0, callbacks=[note])
    return [weight.numpy() for weight in model.trainable_variables]


@on_ranks(2)
def test_weights_that_a_program_keeps_stay_as_they_are():
    kept = []

    def keep(variables):
        values = [variable.value.read_value() for variable in variables]
        kept.append((values, [value.numpy() for value in values]))

    due = trained(False, lambda variables: None)
    found = trained(True, keep)
    assert all((a == b).all() for a, b in zip(found, due, strict=True))
    assert len(kept) == 6
    for values, copies in kept:
        assert all((a.numpy() == b).all() for a, b in zip(values, copies, strict=True))
