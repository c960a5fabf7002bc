"""Warnings of what N ranks and one process train differently: only where it can be so."""

import inspect
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import ringreduce.keras as rr
from ringreduce.keras import mistakes, private, probe
from ringreduce.testing import ring_of_threads

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("reaches", [True, False])
def test_a_mask_counts_only_if_it_reaches_the_loss(reaches):
    layers = keras.layers
    words = layers.Embedding(10, 3, mask_zero=True, name="words")
    model = keras.Sequential(
        [keras.Input((6,)), words, layers.LSTM(4, return_sequences=reaches), layers.Dense(2)]
    )
    model.compile(loss="mse")
    found = mistakes.differences(model)
    assert len(found) == reaches
    assert all(text.startswith("words: if the mask") for text in found)


def test_a_mask_may_reach_the_loss_of_a_model_that_is_subclassed():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.words = keras.layers.Embedding(10, 3, mask_zero=True)

        def call(self, inputs):
            return self.words(inputs)

    assert len(mistakes.differences(Model())) == 1


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
    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, y, outputs, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.max(outputs)))

    def result(self):
        return self.most + 0.0


class Merged(Largest):
    def merge_states(self, states):
        return [max(most for (most,) in states)]


class Share(Largest):
    """Its state is a sum."""

    def __init__(self):
        super().__init__()
        self.name = "share"

    def update_state(self, y, outputs, sample_weight=None):
        self.most.assign_add(ops.sum(y))


def trained(loss, *metrics, validate=False):
    """Of each rank the history of a fit, and an evaluation; the warnings of all."""

    def made(ring):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.layers[0].kernel.assign([[1.0]])
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.0), ring)
        model.compile(optimizer, loss, metrics=[metric() for metric in metrics], run_eagerly=True)
        return model

    def work(ring):
        options = {"batch_size": 16, "verbose": 0, "communicator": ring}
        if validate:
            options["validation_data"] = (X, Y)
        history = rr.fit(made(ring), X, Y, **options).history
        found = {}
        if metrics:
            found = rr.evaluate(made(ring), X, Y, communicator=ring, return_dict=True)
        return {name: values[0] for name, values in history.items()}, found

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        results = ring_of_threads(2, work)
    return results, [str(one.message) for one in shown if one.category is rr.ParityWarning]


@pytest.mark.parametrize("loss", [masked, Summed()], ids=["function", "whole"])
def test_a_loss_that_is_no_mean_over_samples_is_named(loss):
    _, [text] = trained(loss)
    assert f"the loss {getattr(loss, 'name', 'masked')} is no mean over samples" in text


def noisy(y, outputs):
    return ops.mean(outputs + keras.random.normal(ops.shape(outputs)))


@pytest.mark.parametrize("loss", [lambda y, outputs: ops.mean(ops.square(y - outputs)), noisy])
def test_a_mean_and_what_draws_random_numbers_are_not(loss):
    assert trained(loss)[1] == []


def test_a_metric_whose_state_is_no_sum_is_named_and_left_out_everywhere():
    results, texts = trained("mse", Largest, Share, validate=True)
    assert len(texts) == 2  # Of fit and of evaluate.
    assert all("the metric largest is left out" in text for text in texts)
    for history, evaluated in results:
        assert not {"largest", "val_largest"} & {*history, *evaluated}
        assert {"share", "val_share"} - history.keys() == set()


def test_a_metric_that_merges_states_is_that_of_all_rows():
    results, texts = trained("mse", Merged, validate=True)
    assert texts == []
    for history, evaluated in results:
        assert history["largest"] == history["val_largest"] == evaluated["largest"] == 15.0


def of_lookups(vocabularies, dtype="int64"):
    """What is warned of where each rank looks words up in a `dataset.map` with its own layer."""
    words = np.array([["a"], ["b"]] * 2)

    def work(ring):
        lookup = keras.layers.StringLookup(vocabulary=vocabularies[ring.rank])
        data = tf.data.Dataset.from_tensor_slices((words, np.ones((4, 1), "float32"))).batch(4)
        data = data.map(lambda x, y: (tf.cast(lookup(x), dtype), y))
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.layers[0].kernel.assign([[0.0]])
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.0), ring)
        model.compile(optimizer, "mse", run_eagerly=True)
        rr.fit(model, data, verbose=0, communicator=ring)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        ring_of_threads(2, work)
    return [str(one.message) for one in shown if one.category is rr.DataWarning]


def test_a_lookup_in_a_dataset_that_each_rank_has_adapted_is_named():
    (text,) = of_lookups([["a", "b"], ["b", "a"]])
    assert "other integers or words in x of the first batch: on rank 1 not those of rank 0" in text
    # Pixels and floats are often random on purpose.
    assert of_lookups([["a", "b"], ["b", "a"]], "uint8") == []


def test_none_of_kerass_own_is_tried():
    for name in dir(keras.losses):
        one = getattr(keras.losses, name)
        if callable(one) and name not in ("get", "serialize", "deserialize", "Loss"):
            is_made = inspect.isclass(one) and "Wrapper" not in name
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            model.compile(loss=one() if is_made else one)
            model._compile_loss.build(X, X)
            assert list(probe._own_losses(model)) == [], name
    for one in vars(keras.metrics).values():
        if inspect.isclass(one):
            assert private.is_of_keras(one)
