"""What of an optimizer, or of arguments, must be equal on all ranks."""

import warnings
from functools import partial

import keras
import numpy as np
import pytest
from keras import layers

from ringreduce.keras.checks.settings import settings_in, settings_of_model, settings_of_optimizer

pytestmark = pytest.mark.tensorflow


class Own:
    def get_config(self):
        raise NotImplementedError


def of_sgd(*given, **options):
    return settings_of_optimizer(keras.optimizers.SGD(*given, **options))


@pytest.mark.parametrize(
    ("value", "settings"),
    [
        (
            {"a": [1, np.float32(0.5)], "b": {"c": "text", "name": "dense_7"}, "d": None},
            {"a.0": "1", "a.1": "0.5", "b.c": "'text'", "d": "None"},
        ),
        # No numbers.
        ({"loss": len, "own": Own(), "set": {1}}, {"loss": "len", "own": "Own", "set": "set"}),
    ],
)
def test_numbers_texts_and_names_are_found_at_any_depth(value, settings):
    assert settings_in(value) == settings


def test_a_constant_learning_rate_is_copied_so_it_may_differ():
    assert of_sgd(0.1, name="one") == of_sgd(0.2, name="other")
    slow, fast = (
        settings_of_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)))
        for rate in (0.1, 0.2)
    )
    assert slow == fast


def test_others_are_found_by_their_names():
    usual = of_sgd()
    for name, value in (("momentum", 0.5), ("clipnorm", 1.0), ("use_ema", True)):
        changed = of_sgd(**{name: value})
        assert {key for key in usual if changed[key] != usual[key]} == {name}


def test_a_schedule_counts(recwarn):
    decay = keras.optimizers.schedules.ExponentialDecay
    assert of_sgd(decay(0.1, 10, 0.5)) != of_sgd(decay(0.2, 10, 0.5))
    assert of_sgd(lambda: 0.1) == of_sgd(lambda: 0.2)
    assert not recwarn


class Holds(layers.Layer):
    """A user's layer, which can only be written down if `value` can."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def call(self, inputs):
        return inputs


class Whole(keras.Model):
    """A subclassed model, whose layers are attributes, and which has no configuration."""

    def __init__(self, own, activation):
        super().__init__()
        self.own, self.dense = own, layers.Dense(2, activation=activation)

    def call(self, inputs):
        return self.dense(inputs)


def sequential(*parts, **options):
    return keras.Sequential([keras.Input((3,), **options), *parts])


def recurrent(activation):
    within = layers.Bidirectional(layers.SimpleRNN(2, activation=activation))
    return sequential(layers.Reshape((3, 1)), within)


def with_softmax(is_there):
    return sequential(layers.ReLU(), *[layers.Softmax()] * is_there, layers.Dense(2))


def adapted(layer, numbers):
    is_text = not isinstance(layer, layers.IntegerLookup)
    layer.adapt(np.array([f"w{n}" for n in numbers] if is_text else numbers))
    return layer


def weighing(kind, mode, last):
    return keras.Sequential([adapted(kind(output_mode=mode), [1, 1, 2, last])])


def looking_up(words):
    return keras.Sequential([layers.StringLookup(vocabulary=[str(n) for n in range(words)])])


# A layer, its setting, what makes a model with a value, and two values that differ.
DIFFERENT = [
    ("dense", "activation", lambda name: sequential(layers.Dense(2, name)), "relu", "tanh"),
    ("dropout", "rate", lambda rate: sequential(layers.Dropout(rate)), 0.25, 0.75),
    ("dense", "dtype", lambda name: sequential(layers.Dense(2, dtype=name)), "float32", "float16"),
    ("string_lookup", "vocabulary", looking_up, 200, 201),
    ("lookup", "vocabulary.txt", partial(weighing, layers.IntegerLookup, "int"), 2, 1),
    ("lookup", "vocabulary.txt", partial(weighing, layers.StringLookup, "tf_idf"), 2, 1),
    ("lookup", "vocabulary.txt", partial(weighing, layers.TextVectorization, "tf_idf"), 2, 1),
    ("simple_rnn_cell", "activation", recurrent, "tanh", "relu"),
    ("holds", "value", lambda value: sequential(Holds(value)), 3, 4),
    ("dense", "activation", lambda name: Whole(object(), name), "relu", "tanh"),
    ("dense", "class", with_softmax, False, True),
]
# How some of the values are shown.
SHOWN = {200: "200 values (", 201: "201 values (", False: "Dense", True: "Softmax"}


@pytest.mark.parametrize(("layer", "key", "make", "here", "there"), DIFFERENT)
def test_models_that_differ_are_told_by_layer_and_setting(layer, key, make, here, there):
    pairs = zip(settings_of_model(make(here)), settings_of_model(make(there)), strict=False)
    one, two = next((one, two) for one, two in pairs if one.found != two.found)
    assert layer in one.what
    if key != "vocabulary.txt":
        assert one.found[key].startswith(SHOWN.get(here, repr(here)))
        assert two.found[key].startswith(SHOWN.get(there, repr(there)))


EQUAL = {
    "names": lambda _: sequential(layers.Dense(2), layers.ELU(), layers.Dense(2, activation="elu")),
    "seeds": lambda other: sequential(
        layers.Dropout(0.5, seed=1 + other),
        layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=other)),
    ),
    "lambdas": lambda other: sequential(
        layers.Lambda([lambda x: x + 1, lambda x: x + 2][other], output_shape=(3,))
    ),
    "no configuration": lambda other: sequential(Holds(object())),
    "vocabularies that are not adapted": lambda _: keras.Sequential([layers.StringLookup()]),
    "vocabularies": lambda _: keras.Sequential([adapted(layers.StringLookup(), [1, 1, 2])]),
    "sizes of batches": lambda other: sequential(layers.Dense(2), batch_size=4 + other),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_differs_harmlessly_is_equal(name, recwarn):
    one, two = (settings_of_model(EQUAL[name](other)) for other in (0, 1))
    assert [each.found for each in one] == [each.found for each in two]
    assert not recwarn


def test_a_table_of_initial_values_is_not_listed():
    table = keras.initializers.Constant(np.zeros((100, 3)))
    model = sequential(layers.Embedding(100, 3, embeddings_initializer=table))
    assert [each.found for each in settings_of_model(model)[-2:]] == [
        {"class": "Embedding"},
        {"class": "Sequential"},
    ]


def test_warnings_that_were_shown_once_are_not_shown_again():
    model, registry = sequential(layers.Dense(2)), {}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn_explicit("a mistake", UserWarning, "train.py", 1, registry=registry)
            settings_of_model(model)
    assert len(shown) == 1
