"""A trial before the first step leaves no trace: training gives the same bits as without it."""

import random
from collections import deque

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD, Adam
from tensorflow.python.eager import context

import ringreduce.keras as rr
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.model import trial_in_fit as of_training
from tests.scope import in_full

pytestmark = [
    *(pytest.mark.tensorflow, pytest.mark.timeout(200)),
    pytest.mark.filterwarnings("ignore:2 ranks will not train exactly"),
    pytest.mark.filterwarnings("ignore:ranks draw the same random numbers"),
]

X = np.random.default_rng(6).normal(size=(32, 3)).astype("float32")
Y = X[:, :1] * 2


def net(*inner, kind=keras.Sequential):
    return kind([keras.Input((3,)), layers.Dense(4, "tanh"), *inner, layers.Dense(1)])


class Own(keras.Sequential):
    """Has a step of its own, which `also` does something."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x, training=True)) ** 2) * self.also(x)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"value": loss}

    def also(self, x):
        return 1.0


class OfTensorFlow(Own):
    def also(self, x):
        return tf.random.uniform(())


class OfNumpy(Own):
    def also(self, x):
        return np.random.uniform() + keras.random.uniform(())


class OfGenerator(Own):
    def also(self, x):
        if not hasattr(self, "drawing"):
            self.drawing = tf.random.Generator.from_seed(5)
        return self.drawing.uniform(())


class OfKerasGenerator(Own):
    def also(self, x):
        return keras.random.uniform((), seed=self.drawing)


class Counting(Own):
    """Has a variable of TensorFlow's, a number, a queue, and a list and a table in others."""

    def also(self, x):
        self.seen.assign_add(1.0)
        self.count, self.inner[0][0] = self.count + 1, self.inner[0][0] + 1
        self.table["rows"].append(1)
        self.queue.append(self.count)
        return self.seen * 0.01 * (sum(self.queue) + self.inner[0][0] + len(self.table["rows"]))


class Lazy(keras.Model):
    """Has layers in lists and tables, and a model, of which it makes variables when called."""

    def __init__(self):
        super().__init__()
        inner = keras.Sequential([layers.Dropout(0.2, seed=2), layers.Dense(1)])
        self.blocks = [layers.Dense(4, "tanh"), inner]
        self.table = {"last": layers.BatchNormalization()}

    def call(self, x, training=False):
        for block in (*self.blocks, self.table["last"]):
            x = block(x, training=training) if block is not self.blocks[0] else block(x)
        return x


class Seeded(layers.Layer):
    """Draws by a generator that was given no seed, beside the global one."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator()

    def call(self, x):
        return x + keras.random.normal(tf.shape(x), seed=self.generator) + keras.random.uniform(())


def of_generator():
    model = net(kind=OfKerasGenerator)
    model.drawing = keras.random.SeedGenerator()
    return model


def counting():
    model = net(kind=Counting)
    model.seen, model.count, model.inner = tf.Variable(0.0), 0, [[0]]
    model.table, model.queue = {"rows": [1]}, deque([5, 2], 2)
    return model


def scheduled():
    return Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), use_ema=True)


class Stateful(layers.Layer):
    """Draws by TensorFlow's stateful ops, with a seed of its own and with none."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x), seed=3) + tf.random.uniform(tf.shape(x))


CASES = {
    "dropout": (lambda: net(layers.Dropout(0.3, seed=1), layers.GaussianNoise(0.1)), Adam),
    "normalized": (lambda: net(layers.BatchNormalization()), Adam),
    "unseeded": (lambda: net(Seeded()), Adam),
    "stateful": (lambda: net(Stateful()), Adam),
    "of TensorFlow": (lambda: net(kind=OfTensorFlow), SGD),
    "of numpy": (lambda: net(kind=OfNumpy), SGD),
    "of a generator": (lambda: net(kind=OfGenerator), SGD),
    "of Keras's generator": (of_generator, SGD),
    "loss scale": (net, lambda: keras.optimizers.LossScaleOptimizer(Adam(0.1), 8.0, 2)),
    "averaged, scheduled": (net, scheduled),
    "counting": (counting, SGD),
    "in its first call": (Lazy, Adam),
    "spectral": (lambda: net(layers.SpectralNormalization(layers.Dense(3))), Adam),
}


def trained(case, check):
    """History, variables, and what is drawn next, after two epochs on this rank."""
    make, inner = CASES[case]
    keras.utils.set_random_seed(1)
    model = make()
    optimizer = rr.DistributedOptimizer(inner())
    metrics = None if isinstance(model, Own) else ["mae", keras.metrics.R2Score()]
    model.compile(optimizer, "mse", metrics=metrics)
    how = {"batch_size": 16, "epochs": 2, "verbose": 0, "check": check}
    history = rr.fit(model, X, Y, **how).history
    every = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    drawn = random.random(), np.random.uniform(), float(tf.random.uniform(()))
    counted = [v for v in vars(model).items() if isinstance(v[1], int)]
    return history, [np.array(variable).tobytes() for variable in every], drawn, counted


def with_and_without(case, checks):
    """How often a step was tried, and whether what is left is the same with and without that."""
    tried = []
    real = of_training.try_step
    of_training.try_step = lambda *given: (tried.append(real(*given)), tried[-1])[1]
    try:
        alone = trained(case, False)
        others = [trained(case, check) for check in checks]
    finally:
        of_training.try_step = real
    return [verdict.why for verdict in tried], [same_parts(alone, other) for other in others]


def same_parts(one, other):
    return [a == b for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize(
    ("case", "checks"),
    [
        ("loss scale", [True]),
        ("in its first call", [True]),
        ("stateful", [True]),
        *(in_full(case, [True, "data", "step"]) for case in CASES),
    ],
)
def test_training_goes_on_as_without_a_trial(case, checks, ranks):
    (tried, same), (_, same_there) = ranks(2, with_and_without, case, checks)
    assert tried == [""] * sum(check != "data" for check in checks)
    assert same == same_there == [[True] * 4] * len(checks)


def made_ready_anew(case):
    """Whether a trial makes TensorFlow forget kernels, those of traced functions among them."""
    model = CASES[case][0]()
    model.compile(rr.DistributedOptimizer(SGD()), "mse")
    cleared = []
    real = context.Context.clear_kernel_cache
    context.Context.clear_kernel_cache = lambda own: (cleared.append(1), real(own))[1]
    try:
        verdict = of_training.try_step(model, (X[:12], Y[:12]), default_communicator())
    finally:
        context.Context.clear_kernel_cache = real
    return verdict.why, bool(cleared)


@pytest.mark.parametrize(("case", "forgets"), [("dropout", False), ("stateful", True)])
def test_kernels_are_kept_where_none_has_a_place_in_random_numbers(case, forgets, ranks):
    assert ranks(1, made_ready_anew, case) == [("", forgets)]
