"""What of an optimizer, or of arguments, must be equal on all ranks."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

from ringreduce.keras.settings import settings_in, settings_of_model, settings_of_optimizer

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
    return layers.Bidirectional(layers.SimpleRNN(2, activation=activation))


def adapted(layer, numbers):
    is_text = not isinstance(layer, layers.IntegerLookup)
    layer.adapt(np.array([f"w{n}" for n in numbers] if is_text else numbers))
    return layer


# A model, or another if 1 is given, and the first difference between the two.
DIFFERENT = {
    "activation": (
        lambda other: sequential(layers.Dense(2, activation="tanh" if other else "relu")),
        ("layer 'dense", "activation", "'relu'", "'tanh'"),
    ),
    "rate": (
        lambda other: sequential(layers.Dropout(0.25 + other / 2)),
        ("layer 'dropout", "rate", "0.25", "0.75"),
    ),
    "precision": (
        lambda other: sequential(layers.Dense(2, dtype="mixed_float16" if other else None)),
        ("layer 'dense", "dtype", "'float32'", "'mixed_float16'"),
    ),
    "vocabulary": (
        lambda other: keras.Sequential(
            [layers.StringLookup(vocabulary=[str(number) for number in range(200 + other)])]
        ),
        ("layer 'string_lookup", "vocabulary", "200 values (", "201 values ("),
    ),
    **{
        f"adapted {kind.__name__}": (
            lambda other, kind=kind, options=options: keras.Sequential(
                [adapted(kind(**options), [1, 1, 2, 2 - other])]
            ),
            ("lookup", "vocabulary.txt", "", ""),
        )
        for kind, options in (
            (layers.IntegerLookup, {}),
            (layers.StringLookup, {"output_mode": "tf_idf"}),
            (layers.TextVectorization, {"output_mode": "tf_idf"}),
        )
    },
    "a layer of a layer": (
        lambda other: sequential(layers.Reshape((3, 1)), recurrent("relu" if other else "tanh")),
        ("layer 'simple_rnn_cell", "activation", "'tanh'", "'relu'"),
    ),
    "a user's layer": (
        lambda other: sequential(Holds(1 + other)),
        ("layer 'holds", "value", "1", "2"),
    ),
    "a subclassed model": (
        lambda other: Whole(object(), "tanh" if other else "relu"),
        ("layer 'dense", "activation", "'relu'", "'tanh'"),
    ),
    "a layer more": (
        lambda other: sequential(layers.ReLU(), *[layers.Softmax()] * other, layers.Dense(2)),
        ("layer 'dense", "class", "Dense", "Softmax"),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_models_that_differ_are_told_by_layer_and_setting(name):
    make, (layer, key, here, there) = DIFFERENT[name]
    pairs = zip(settings_of_model(make(0)), settings_of_model(make(1)), strict=False)
    one, two = next((one, two) for one, two in pairs if one.found != two.found)
    assert layer in one.what
    assert one.found[key].startswith(here)
    assert two.found[key].startswith(there)


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
