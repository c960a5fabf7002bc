"""A fixed number of rows: what needs it, as a stateful RNN, is refused by name on several ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD

import ringreduce.keras as rr
from ringreduce import ConfigError
from ringreduce.testing import ring_of_threads
from tests.models import EAGERLY
from tests.ranks import on_ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


@on_ranks(2)
def test_its_layer_and_the_rows_of_each_rank_are_named_before_the_first_step():
    rnn = keras.layers.SimpleRNN(2, stateful=True, name="memory")
    model = keras.Sequential([keras.Input(batch_shape=(8, 3, 1)), rnn, keras.layers.Dense(1)])
    model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", **EAGERLY)
    x, y = np.ones((16, 3, 1), "float32"), np.ones((16, 1), "float32")
    for call in (
        lambda: rr.fit(model, x, y, batch_size=8, shuffle=False, verbose=0),
        lambda: rr.evaluate(model, x, y, batch_size=8),
        lambda: rr.predict(model, x, batch_size=8),
    ):
        with pytest.raises(ConfigError, match=r"memory, which is stateful.* 8 rows.*gets 4 in"):
            call()
    assert not int(model.optimizer.iterations)


X = np.arange(72, dtype="float32").reshape(24, 3) % 2
Y = X[:, :1]


def fixed(optimizer, *layers):
    """A model of inputs with 8 rows."""
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input(batch_shape=(8, 3)), *layers, dense])
    model.compile(optimizer, "mse", **EAGERLY)
    return model


class OfEightRows(keras.layers.Layer):
    def call(self, x):
        return keras.ops.reshape(x, (8, 3))


class Spreads(keras.layers.Layer):
    def call(self, x):
        return x + keras.ops.zeros((8, 3))


@on_ranks(2)
def test_layers_that_take_any_number_of_rows_train_as_in_one_process():
    plain, ours = fixed(SGD(0.25)), fixed(rr.DistributedOptimizer(SGD(0.25)))
    how = {"batch_size": 8, "shuffle": False, "verbose": 0}
    expected = plain.fit(X, Y, **how).history
    assert rr.fit(ours, X, Y, **how).history == expected
    pairs = zip(plain.get_weights(), ours.get_weights(), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


@on_ranks(2)
def test_a_layer_that_needs_all_rows_is_refused_before_a_step():
    named = r"works only on 8 rows.* gets 4 of 8 rows.*keras.Input\(\(3,\)\)"
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    for data in ((X, Y), (batches,), (batches.repeat(1).batch(1).unbatch(),)):
        model = fixed(rr.DistributedOptimizer(SGD(0.25)), OfEightRows())
        with pytest.raises(ConfigError, match=named):
            rr.fit(model, *data, batch_size=8 if len(data) == 2 else None, verbose=0)
        assert not int(model.optimizer.iterations)


@on_ranks(2)
def test_it_trains_where_each_rank_gets_as_many_rows_and_is_evaluated_by_whole_batches():
    plain, ours = (fixed(o, OfEightRows()) for o in (SGD(0.25), rr.DistributedOptimizer(SGD(0.25))))
    rr.fit(ours, X[:16], Y[:16], batch_size=16, verbose=0)
    plain.set_weights(ours.get_weights())
    # 12 rows for each would be a batch and a half.
    assert rr.evaluate(ours, X, Y, batch_size=8) == plain.evaluate(X, Y, batch_size=8, verbose=0)
    outputs = rr.predict(ours, X, batch_size=8)
    assert np.array_equal(outputs, plain.predict(X, batch_size=8, verbose=0))


def test_rows_that_would_spread_over_a_batch_are_refused():
    def work(ring):
        model = fixed(rr.DistributedOptimizer(SGD(0.25), communicator=ring), Spreads())
        with pytest.raises(ConfigError, match=r"gets 1 of 2 rows of a batch"):
            rr.fit(model, X, Y, batch_size=2, verbose=0, communicator=ring)

    ring_of_threads(2, work)
