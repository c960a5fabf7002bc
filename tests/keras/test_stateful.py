"""A stateful RNN, which keeps a state for each row, is refused by its name on several ranks."""

import keras
import numpy as np
import pytest

import ringreduce.keras as rr
from ringreduce import ConfigError
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
