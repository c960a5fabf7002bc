"""Warnings of what N ranks and one process train differently: only where it can be so."""

import keras
import pytest

from ringreduce.keras import mistakes

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
