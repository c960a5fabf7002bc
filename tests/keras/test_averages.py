"""What steps change beside what is trained is rank 0's when an epoch ends, wherever it hangs."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.layers import BatchNormalization, Dense
from keras.optimizers import SGD

import ringreduce.keras as rr
from ringreduce.keras.model.averages import Averages, untrained
from ringreduce.testing import ring_of_threads
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [
    *(pytest.mark.tensorflow, pytest.mark.timeout(300)),
    pytest.mark.filterwarnings("ignore:2 ranks will not train exactly"),
]

# Rank 0 has ones of each batch, and the last one fives.
X = np.float32([[1], [1], [1], [1], [5], [5], [5], [5]])


class Nested(keras.layers.Layer):
    """Keeps the mean of its rows, in what Keras lists and does not, beside a layer."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Identity()
        self.plain = {"mean": tf.Variable([0.0])}

    def build(self, shape):
        options = {"shape": (1,), "initializer": "zeros", "trainable": False}
        self.center = self.add_weight(**options)
        self.half = self.add_weight(dtype="bfloat16", **options)

    @property
    def means(self):
        return [self.center, self.half, self.plain["mean"]]

    def call(self, values, training=False):
        if training:
            for each in self.means:
                each.assign(tf.cast([tf.reduce_mean(values)], each.dtype))
        return self.inner(values) - self.center


class Contrastive(keras.Sequential):
    """Has a frozen encoder that follows its rows, and a queue of them."""

    def __init__(self, layers):
        super().__init__(layers)
        self.follower = Dense(1, trainable=False)
        self.follower.build((None, 1))
        self.queue = self.add_weight(shape=(4, 1), initializer="zeros", trainable=False)
        self.place = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def train_step(self, data):
        mean = tf.reduce_mean(data[0])
        self.follower.kernel.assign([[mean]])
        self.queue.value.scatter_nd_update([[int(self.place)]], [[mean]])
        self.place.assign_add(1)
        return super().train_step(data)


def compiled(*layers, kind=keras.Sequential, **options):
    keras.utils.set_random_seed(3)
    model = kind([keras.Input((1,)), *layers, Dense(1, kernel_initializer="ones")])
    model.compile(rr.DistributedOptimizer(SGD(0.0), **options), "mse", run_eagerly=True)
    return model


def fit(model, **options):
    return rr.fit(model, X, X, batch_size=8, shuffle=False, verbose=0, **options)


def values_of(variables):
    return [np.asarray(variable.numpy(), np.float32).tolist() for variable in variables]


@pytest.mark.parametrize("size", [2, in_full(3)])
@on_ranks()
def test_they_are_rank_0s_wherever_they_hang():
    nested, spectral = Nested(), keras.layers.SpectralNormalization(Dense(2))
    frozen = Dense(1, trainable=False)
    model = compiled(nested, frozen, spectral, kind=Contrastive)
    frozen.kernel.assign([[rr.rank() + 1.0]])
    spectral.vector_u.assign([[1.0, rr.rank()]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Spectral normalization has made other weights of other vectors.
        fit(model, epochs=2, check=False)
    assert values_of(nested.means) == [[1.0]] * 3
    assert values_of([model.follower.kernel]) == [[[1.0]]]
    assert values_of([model.queue, model.place]) == [[[1.0], [1.0], [0.0], [0.0]], 2.0]
    # No step has changed it.
    assert values_of([frozen.kernel]) == [[[rr.rank() + 1.0]]]
    assert not any("whole numbers" in str(warning.message) for warning in caught)
    return values_of([spectral.vector_u])


@on_ranks(2)
def test_a_model_is_evaluated_with_rank_0s_and_keeps_its_own():
    nested = Nested()
    model = compiled(nested)
    nested.center.assign([rr.rank() + 1.0])
    assert rr.predict(model, X).tolist() == (X - 1).tolist()
    assert values_of([nested.center]) == [[rr.rank() + 1.0]]
    return rr.evaluate(model, X, X - 1)


class Counting(keras.layers.Layer):
    def build(self, shape):
        options = {"dtype": "int32", "initializer": "zeros", "trainable": False, "shape": ()}
        self.steps = self.add_weight(name="steps", **options)
        self.found = self.add_weight(name="found", **options)

    def call(self, values, training=False):
        if training:
            self.steps.assign_add(1)
            self.found.assign_add(tf.cast(tf.reduce_mean(values), "int32"))
        return values


@on_ranks(2)
def test_whole_numbers_that_differ_are_told_once_and_stay():
    counting = Counting()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(compiled(counting), epochs=3)
    assert values_of([counting.steps, counting.found]) == [3.0, [3.0, 15.0][rr.rank()]]
    texts = [str(w.message) for w in caught if "whole numbers" in str(w.message)]
    assert len(texts) == (rr.rank() == 0)
    assert all("/found, whole numbers" in text and "/steps" not in text for text in texts)


@on_ranks(2)
def test_what_is_of_a_ranks_rows_or_draws_stays_its_own():
    local, shared = BatchNormalization(momentum=0.5), BatchNormalization(momentum=0.5)
    dropout, recurrent = keras.layers.Dropout(0.5), keras.layers.SimpleRNN(1, stateful=True)
    for norm in (local, shared):
        norm.build((None, 1))
    model = compiled(local, shared, dropout, local_variables=[local.gamma, local.beta])
    fit(model)
    assert values_of([local.moving_mean]) == [[[0.5], [2.5]][rr.rank()]]
    states = [dropout.seed_generator.state.numpy().tolist()]
    assert len({str(each) for each in rr.init().all_gather_object(states)}) == 2
    recurrent.build((4, 1, 1))
    model = keras.Sequential([keras.Input((1, 1), batch_size=4), recurrent])
    assert not {*map(id, recurrent.states)} & {*map(id, untrained(model))}
    return values_of([shared.moving_mean, shared.moving_variance])


def test_all_travel_in_one_exchange_once_it_is_known_what_changes():
    def work(ring):
        norms = [BatchNormalization(), BatchNormalization()]
        model = keras.Sequential([keras.Input((1,)), *norms, Dense(1, trainable=False)])
        averages, counts = Averages(model, ring), []
        moving = [v for norm in norms for v in norm.non_trainable_variables]
        assert len(untrained(model)) == len(moving) + 2
        for number in (None, 3, 3, None):
            averages.begin()
            # On one rank, and what it has already, is no change.
            for variable in [] if number is None else moving[ring.rank :]:
                variable.assign([number + ring.rank])
            moving[0].assign(moving[0])
            before = ring.statistics().collectives
            averages.take_those_of_rank_0()
            counts.append(ring.statistics().collectives - before)
        assert values_of(moving) == [[3.0]] * 4
        return counts

    # In the first epoch names and shapes are compared too; in the second others change.
    assert ring_of_threads(2, work) == [[2, 3, 1, 1]] * 2
