"""What of an optimizer, or of arguments, must be equal on all ranks."""

import keras
import numpy as np
import pytest

from ringreduce.keras.settings import settings_in, settings_of_optimizer

pytestmark = pytest.mark.tensorflow


class Own:
    def get_config(self):
        raise NotImplementedError


def of_sgd(*given, **options):
    return settings_of_optimizer(keras.optimizers.SGD(*given, **options))


def test_numbers_and_texts_are_found_at_any_depth():
    value = {"a": [1, np.float32(0.5)], "b": {"c": "text", "name": "dense_7"}, "d": None}
    assert settings_in(value) == {"a.0": "1", "a.1": "0.5", "b.c": "'text'", "d": "None"}


def test_what_is_no_number_is_known_by_its_name():
    assert settings_in({"loss": len, "own": Own(), "set": {1}}) == {
        "loss": "len",
        "own": "Own",
        "set": "set",
    }


def test_a_constant_learning_rate_is_copied_so_it_may_differ():
    assert of_sgd(0.1, name="one") == of_sgd(0.2, name="other")
    slow, fast = (keras.optimizers.SGD(rate) for rate in (0.1, 0.2))
    scaled = keras.optimizers.LossScaleOptimizer
    assert settings_of_optimizer(scaled(slow)) == settings_of_optimizer(scaled(fast))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"momentum": 0.5}, "momentum"),
        ({"clipnorm": 1.0}, "clipnorm"),
        ({"use_ema": True}, "use_ema"),
    ],
)
def test_others_are_found_by_their_names(options, name):
    found, usual = of_sgd(**options), of_sgd()
    assert {each for each in usual if found[each] != usual[each]} == {name}


def test_a_schedule_counts(recwarn):
    decay = keras.optimizers.schedules.ExponentialDecay
    assert of_sgd(decay(0.1, 10, 0.5)) != of_sgd(decay(0.2, 10, 0.5))
    assert of_sgd(lambda: 0.1) == of_sgd(lambda: 0.2)
    assert not recwarn
