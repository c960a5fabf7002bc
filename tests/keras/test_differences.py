"""What `rr.fit` warns of by name, since N ranks cannot train as one process does with it."""

import keras
import pytest
from keras import layers

from ringreduce.keras.mistakes import differences

pytestmark = pytest.mark.tensorflow

SERIES = (6, 4)


class Own(layers.Layer):
    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        return inputs


def attention(**options):
    inputs = keras.Input(SERIES)
    return keras.Model(inputs, layers.MultiHeadAttention(2, 3, **options)(inputs, inputs))


RANDOM = {
    "dropout": lambda: layers.Dropout(0.1),
    "noise": lambda: layers.GaussianNoise(0.1),
    "recurrent": lambda: layers.LSTM(3, dropout=0.1),
    "recurrent state": lambda: layers.Bidirectional(layers.GRU(3, recurrent_dropout=0.1)),
    "cell": lambda: layers.RNN(layers.SimpleRNNCell(3, dropout=0.1)),
    "attention": lambda: attention(dropout=0.1),
    "augmentation": lambda: keras.Sequential([layers.Reshape((6, 4, 1)), layers.RandomFlip()]),
    "own": Own,
}
SAME = {
    "dropout": lambda: layers.Dropout(0.0),
    "recurrent": lambda: layers.Bidirectional(layers.LSTM(3)),
    "attention": attention,
    "normalization": lambda: layers.LayerNormalization(),
}


def found(layer):
    model = keras.Sequential([keras.Input(SERIES), layer])
    model.compile(loss="mse")
    return differences(model)


@pytest.mark.parametrize("name", RANDOM)
def test_layers_that_draw_random_numbers_are_named(name):
    (text,) = found(RANDOM[name]())
    assert text.endswith(": each rank draws other random numbers")


@pytest.mark.parametrize("name", SAME)
def test_layers_that_draw_none_are_not(name):
    assert found(SAME[name]()) == []


def test_a_model_with_a_generator_of_its_own_is_named():
    model = keras.Sequential([keras.Input(SERIES), layers.Dense(1)], name="gan")
    model.generator = keras.random.SeedGenerator(1)
    assert differences(model) == ["gan: each rank draws other random numbers"]
