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
from tests.scope import in_full

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


def trained(sharded, keeps=lambda variables: None, jit=False):
    """The variables of a model after six steps, after each of which `keeps` gets them."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(257)])
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.1), shard_state=sharded)
    model.compile(optimizer, "mse", jit_compile=jit)
    x = np.arange(1800, dtype="float32").reshape(6, 300) / 1800
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: keeps(model.trainable_variables)
    )
    rr.fit(model, x, x[:, :257], batch_size=2, epochs=2, verbose=0, callbacks=[note])
    return model.trainable_variables


def are_equal(found, due):
    return all((a.numpy() == b.numpy()).all() for a, b in zip(found, due, strict=True))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("keepers", [in_full((0,)), in_full((1,)), (0, 1)])
@on_ranks(2)
def test_weights_that_a_program_keeps_stay_as_they_are(keepers, jit):
    kept = []

    def keep(variables):
        values = [variable.value.read_value() for variable in variables]
        kept.append((values, [value.numpy() for value in values]))

    due = trained(False, jit=jit)
    found = trained(True, keep if rr.rank() in keepers else lambda variables: None, jit)
    assert are_equal(found, due)
    assert len(kept) == 6 * (rr.rank() in keepers)
    for values, copies in kept:
        assert all((a.numpy() == b).all() for a, b in zip(values, copies, strict=True))


CHANGES = [
    in_full(lambda variable: variable.assign_add(tf.ones(variable.shape))),
    lambda variable: variable.scatter_nd_update([[0]], tf.ones((1, 257))),
    in_full(lambda variable: variable[0].assign(tf.ones(257))),
]


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_what_a_rank_does_to_its_weights_stays_there(change):
    """They lie in memory that all ranks of a host have."""
    due, ring = trained(False), default_communicator()
    for changes in range(2):
        found = trained(True)
        ring.barrier()
        if rr.rank() == changes:
            change(found[0].value)
        ring.barrier()
        assert are_equal(found, due) == (rr.rank() != changes)


@pytest.mark.parametrize("drops", [0, in_full(1)])
@on_ranks(2)
def test_weights_stay_when_another_rank_has_dropped_its_model(drops):
    due, found = trained(False), trained(True)
    if rr.rank() == drops:
        del found
        gc.collect()
        handoff._drop_unused_areas()
    default_communicator().barrier()
    for _ in range(2):  # What is new has not their memory.
        trained(True)
    assert rr.rank() == drops or are_equal(found, due)
