"""A scope of tf.distribute is refused by its name, also where it has one replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD

import ringreduce.keras as rr
from ringreduce import ConfigError
from ringreduce.unchanged import table
from tests.models import EAGERLY
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

STRATEGIES = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(["/cpu:0"]),
    "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "central": lambda: tf.distribute.experimental.CentralStorageStrategy(["/cpu:0"]),
    "workers": tf.distribute.MultiWorkerMirroredStrategy,
}
X = np.ones((8, 2), "float32")
NAMED = r"inside a tf.distribute strategy of 1 replica \(.*Strategy.*\). Use one or the other"


def model(optimizer=None):
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    if optimizer is not None:
        made.compile(optimizer, "mse", **EAGERLY)
    return made


@pytest.mark.parametrize("name", ["mirrored", *map(in_full, ("one device", "central", "workers"))])
@pytest.mark.usefixtures("world_of_one")
def test_a_strategy_is_named_wherever_it_is_met(name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        with pytest.raises(ConfigError, match=f"is used {NAMED}"):
            rr.DistributedOptimizer(SGD(0.1))
        made = model()
    # Only the model was made within.
    made.compile(rr.DistributedOptimizer(SGD(0.1)), "mse")
    with pytest.raises(ConfigError, match=f"got the model {made.name}, which was made {NAMED}"):
        rr.fit(made, X, X[:, :1], verbose=0)
    # Only training is.
    trained = model(rr.DistributedOptimizer(SGD(0.1)))
    with strategy.scope(), pytest.raises(ConfigError, match=f"is used {NAMED}"):
        rr.fit(trained, X, X[:, :1], verbose=0)
    optimizer = rr.DistributedOptimizer(SGD(0.1))
    variable = keras.Variable(1.0)
    optimizer.build_inner([variable])
    with strategy.scope(), pytest.raises(ConfigError, match=f"is used {NAMED}"):
        optimizer.apply([tf.constant(1.0)], [variable])


@pytest.mark.usefixtures("world_of_one")
def test_an_unchanged_program_trains_alone_within_one():
    losses = []
    for fit in (keras.Model.fit, lambda *args, **more: table._fit(keras.Model.fit, *args, **more)):
        keras.utils.set_random_seed(1)
        with STRATEGIES["mirrored"]().scope():
            made = model(SGD(0.125))
        losses += fit(made, X, X[:, :1], batch_size=4, verbose=0).history["loss"]
    assert losses[0] == losses[1] > 0


@on_ranks(2)
def test_several_ranks_evaluate_no_model_that_was_made_within_one():
    with STRATEGIES["mirrored"]().scope():
        made = model(SGD(0.1))
    for call in (lambda: rr.evaluate(made, X, X[:, :1]), lambda: rr.predict(made, X)):
        with pytest.raises(ConfigError, match=f"which was made {NAMED}"):
            call()
