"""Ranks make as many iterators of a dataset as plain Keras does, whatever their part of it.

Each iterator of a seeded shuffle takes a seed of it. Where training and validation data come from
one shuffle, one iterator more on a rank gives it other rows from then on.
"""

from collections.abc import Callable
from functools import cache, partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from tests.models import EAGERLY
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

X = np.arange(1.0, 13.0, dtype="float32")[:, None]


def shuffled():
    return tf.data.Dataset.from_tensor_slices((X, 2 * X)).shuffle(12, seed=2)


def order_of(data):
    return tuple(y.item() for _, y in data.as_numpy_iterator())


@cache
def orders():
    """Those of the first iterators of a `shuffled`."""
    data = shuffled()
    every = [order_of(data) for _ in range(24)]
    assert len(set(every)) == 24
    return every


def seeds_taken(data):
    """How many iterators were made of a `shuffled`; this makes another."""
    return orders().index(order_of(data))


def model_with(optimizer):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer, "mse", **EAGERLY)
    return model


def unknown(data):
    return data.filter(lambda *_: True)


class Stops(keras.callbacks.Callback):
    """Stops after a batch."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= batch == self.at


def trained(fit, evaluate, predict, model, parts, **options):
    train, validation = parts
    callbacks = [Stops(options.pop("stops"))] if "stops" in options else []
    fitted = fit(
        model, train, validation_data=validation, callbacks=callbacks, verbose=0, **options
    )
    return [value for values in fitted.history.values() for value in values]


def evaluated(fit, evaluate, predict, model, parts, times=1, **options):
    return [evaluate(model, parts[1], verbose=0, **options) for _ in range(times)]


def predicted(fit, evaluate, predict, model, parts, **options):
    # Those that were read are known by what is predicted of them.
    return sorted(predict(model, parts[1], verbose=0, **options).ravel().tolist())


PLAIN = keras.Model.fit, keras.Model.evaluate, keras.Model.predict
OURS = rr.fit, rr.evaluate, rr.predict
# Rows to train on of 12, how the rest is batched, and what is done with both.
CASES: dict[str, tuple[int, Callable, Callable]] = {
    "one batch validates": (8, lambda v: v.batch(4), partial(trained, epochs=3)),
    "as many batches as ranks": (8, lambda v: v.batch(2), partial(trained, epochs=2)),
    "odd batches": (6, lambda v: v.batch(2), partial(trained, epochs=2)),
    "every second epoch": (8, lambda v: v.batch(4), partial(trained, epochs=4, validation_freq=2)),
    "a step validates": (6, lambda v: v.batch(2), partial(trained, epochs=2, validation_steps=1)),
    "all steps validate": (6, lambda v: v.batch(2), partial(trained, epochs=2, validation_steps=3)),
    "epochs of steps": (8, lambda v: v.batch(4), partial(trained, epochs=4, steps_per_epoch=3)),
    "unknown": (8, lambda v: unknown(v.batch(4)), partial(trained, epochs=2)),
    "stopped at the last batch": (8, lambda v: v.batch(4), partial(trained, epochs=2, stops=1)),
    "stopped before": (8, lambda v: v.batch(4), partial(trained, epochs=2, stops=0)),
    "evaluated": (8, lambda v: v.batch(4), partial(evaluated, times=2)),
    "evaluated of unknown length": (8, lambda v: unknown(v.batch(4)), partial(evaluated, times=2)),
    "evaluated in steps": (6, lambda v: v.batch(2), partial(evaluated, times=2, steps=2)),
    "predicted": (8, lambda v: v.batch(4), predicted),
    "predicted of unknown length": (8, lambda v: unknown(v.batch(4)), predicted),
    "predicted in steps": (6, lambda v: v.batch(2), partial(predicted, steps=1)),
}
QUICK = [
    *("one batch validates", "stopped at the last batch"),
    *("evaluated of unknown length", "predicted"),
]
ON_3 = ["one batch validates", "unknown", "evaluated", "predicted of unknown length"]


def run(name, work, optimizer):
    rows, batched, function = CASES[name]
    data = shuffled()
    parts = data.take(rows).batch(4), batched(data.skip(rows))
    return function(*work, model_with(optimizer), parts), seeds_taken(data)


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((2, name) for name in QUICK),
        *(in_full(2, name) for name in CASES if name not in QUICK),
        *(in_full(3, name) for name in ON_3),
    ],
)
@on_ranks()
def test_a_shuffle_that_several_parts_share_gives_what_it_gives_one_process(name):
    numbers, seeds = run(name, OURS, rr.DistributedOptimizer(keras.optimizers.SGD(1 / 256)))
    expected, seeds_alone = run(name, PLAIN, keras.optimizers.SGD(1 / 256))
    assert seeds == seeds_alone > 0
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)
    return numbers, seeds
