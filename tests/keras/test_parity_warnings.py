"""Warnings of what N ranks and one process train differently: only where it can be so."""

import inspect
import warnings
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import ringreduce.keras as rr
from ringreduce.keras import private
from ringreduce.keras.checks.warnings import differences
from ringreduce.testing import ring_of_threads
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


class Drawing(layers.Layer):
    """A user's own, which may draw random numbers."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        return inputs


def attention(**options):
    inputs = keras.Input((6, 4))
    return keras.Model(inputs, layers.MultiHeadAttention(2, 3, **options)(inputs, inputs))


@pytest.mark.parametrize(
    ("make", "is_random"),
    [
        (lambda: layers.Dropout(0.1), True),
        (lambda: layers.Dropout(0.0), False),
        (lambda: layers.GaussianNoise(0.1), True),
        (layers.LayerNormalization, False),
        (lambda: layers.LSTM(3, dropout=0.1), True),
        (lambda: layers.Bidirectional(layers.GRU(3, recurrent_dropout=0.1)), True),
        (lambda: layers.Bidirectional(layers.LSTM(3)), False),
        (lambda: layers.RNN(layers.SimpleRNNCell(3, dropout=0.1)), True),
        (lambda: attention(dropout=0.1), True),
        (attention, False),
        (lambda: keras.Sequential([layers.Reshape((6, 4, 1)), layers.RandomFlip()]), True),
        (Drawing, True),
    ],
)
def test_layers_that_draw_random_numbers_are_named(make, is_random):
    model = keras.Sequential([keras.Input((6, 4)), make()])
    model.compile(loss="mse")
    texts = differences(model)
    assert len(texts) == is_random
    assert all(text.endswith(": each rank draws other random numbers") for text in texts)


def test_a_loss_that_is_a_sum_is_named_with_a_remedy():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(loss=keras.losses.MeanSquaredError(reduction="sum"))
    assert differences(model) == [
        "the loss mean_squared_error: with reduction='sum' it is no mean over samples (use the "
        "default, sum_over_batch_size, and, unless the optimizer is Adam or alike, batch_size "
        "times the rate)"
    ]


def test_a_model_with_a_generator_of_its_own_is_named():
    model = keras.Sequential([keras.Input((6, 4)), layers.Dense(1)], name="gan")
    model.generator = keras.random.SeedGenerator(1)
    assert differences(model) == ["gan: each rank draws other random numbers"]


@pytest.mark.parametrize("reaches", [True, False])
def test_a_mask_counts_only_if_it_reaches_the_loss(reaches):
    words = layers.Embedding(10, 3, mask_zero=True, name="words")
    recurrent = layers.LSTM(4, return_sequences=reaches)
    model = keras.Sequential([keras.Input((6,)), words, recurrent, layers.Dense(2)])
    model.compile(loss="mse")
    texts = differences(model)
    assert len(texts) == reaches
    assert all(text.startswith("words: if the mask") for text in texts)


def test_a_mask_may_reach_the_loss_of_a_model_that_is_subclassed():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.words = layers.Embedding(10, 3, mask_zero=True)

        def call(self, inputs):
            return self.words(inputs)

    assert len(differences(Model())) == 1


X = np.arange(16, dtype="float32")[:, None]
# On each rank some rows are left out by a mask of what is not 0, others in each part of them.
Y = np.where(np.arange(16) % 5 == 1, 3.0, 0.0).astype("float32")[:, None]


def masked(y, outputs):
    mask = ops.cast(y != 0, "float32")
    return ops.sum(mask * ops.square(y - outputs)) / ops.maximum(ops.sum(mask), 1.0)


class Summed(keras.losses.Loss):
    def __call__(self, y, outputs, sample_weight=None):
        return ops.sum(ops.square(y - outputs))


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, y, outputs, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.max(outputs)))

    def result(self):
        return self.most + 0.0


class Merged(Largest):
    def merge_states(self, states):
        return [max(most for (most,) in states)]


class Summing(Largest):
    """Its state is a sum."""

    def update_state(self, y, outputs, sample_weight=None):
        self.most.assign_add(ops.sum(y))


def fixed(ring, loss, metrics=()):
    """A compiled model whose weight stays 1."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[1.0]])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.0), ring)
    model.compile(optimizer, loss, metrics=[metric() for metric in metrics], run_eagerly=True)
    return model


def warned_by(work, category):
    """The results of two ranks, and the texts of this category's warnings of both."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        results = ring_of_threads(2, work)
    return results, [str(warning.message) for warning in shown if warning.category is category]


def trained(loss, *metrics):
    """Of each rank the history of a fit, and an evaluation; the warnings of all."""

    def work(ring):
        validated = {"validation_data": (X, Y)} if metrics else {}
        options = {"batch_size": 16, "verbose": 0, "communicator": ring, **validated}
        history = rr.fit(fixed(ring, loss, metrics), X, Y, **options).history
        how = {"communicator": ring, "return_dict": True}
        evaluated = rr.evaluate(fixed(ring, loss, metrics), X, Y, **how) if metrics else {}
        return {name: values[0] for name, values in history.items()}, evaluated

    return warned_by(work, rr.ParityWarning)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        in_full(masked, "the loss masked is no mean over samples"),
        (Summed(), "the gradients of its loss are sums over rows"),
    ],
    ids=["function", "whole"],
)
def test_a_loss_that_is_no_mean_over_samples_is_named(loss, said):
    _, [text] = trained(loss)
    assert said in text


def noisy(y, outputs):
    return ops.mean(outputs + keras.random.normal(ops.shape(outputs)))


@pytest.mark.parametrize(
    "loss", [lambda y, outputs: ops.mean(ops.square(y - outputs)), in_full(noisy)]
)
def test_a_mean_and_what_draws_random_numbers_are_not(loss):
    assert trained(loss)[1] == []


def test_a_metric_whose_state_is_no_sum_is_named_and_left_out_everywhere():
    results, texts = trained("mse", Largest, partial(Summing, "share"))
    assert len(texts) == 2  # Of fit and of evaluate.
    assert all("the metric largest is left out" in text for text in texts)
    for history, evaluated in results:
        assert not {"largest", "val_largest"} & {*history, *evaluated}
        assert {"share", "val_share"} - history.keys() == set()


def most(y, outputs):
    return ops.max(outputs)


def test_a_metric_that_is_a_function_of_a_batch_is_left_out_of_training_alone():
    results, [text] = trained("mse", lambda: most)
    assert "the metric most is left out of what the ranks show of training" in text
    for history, evaluated in results:
        assert "most" not in history
        # One batch of 16 rows, which one rank has whole.
        assert history["val_most"] == evaluated["most"] == 15.0


def test_a_metric_that_merges_states_is_that_of_all_rows():
    results, texts = trained("mse", Merged)
    assert texts == []
    for history, evaluated in results:
        assert history["largest"] == history["val_largest"] == evaluated["largest"] == 15.0


def of_lookups(vocabularies, dtype="int64"):
    """What is warned of where each rank looks words up in a `dataset.map` with its own layer."""
    words = np.array([["a"], ["b"]] * 2)

    def work(ring):
        lookup = layers.StringLookup(vocabulary=vocabularies[ring.rank])
        data = tf.data.Dataset.from_tensor_slices((words, np.ones((4, 1), "float32"))).batch(4)
        data = data.map(lambda x, y: (tf.cast(lookup(x), dtype), y))
        rr.fit(fixed(ring, "mse"), data, verbose=0, communicator=ring)

    return warned_by(work, rr.DataWarning)[1]


def test_a_lookup_in_a_dataset_that_each_rank_has_adapted_is_named():
    [text] = of_lookups([["a", "b"], ["b", "a"]])
    assert "other integers or words in x of the first batch: on rank 1 not those of rank 0" in text
    # Pixels and floats are often random on purpose.
    assert of_lookups([["a", "b"], ["b", "a"]], "uint8") == []


def test_no_metric_of_kerass_own_is_tried():
    for one in vars(keras.metrics).values():
        if inspect.isclass(one):
            assert private.is_of_keras(one)
