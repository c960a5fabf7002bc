"""Models and training steps in which ranks disagree: all find out soon, and name the variable.

On real rings. Each scenario has a group of all ranks of its own, which breaks alone.
"""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import MismatchError
from ringreduce.communicator.process import default_communicator
from ringreduce.effects import native
from ringreduce.tensorflow import ops
from tests.rings import MISMATCH_S
from tests.scope import in_full

pytestmark = pytest.mark.tensorflow

ONES = np.ones((2, 4), np.float32)
SGD = keras.optimizers.SGD


def odd(other, usual):
    """Return the first on rank 1, and the second on the others."""
    return other if rr.rank() == 1 else usual


class Gate(keras.layers.Layer):
    """Passes gradients on, or not."""

    closed = False

    def call(self, inputs):
        return tf.stop_gradient(inputs) if self.closed else inputs + 0.0

    def compute_output_shape(self, shape):
        return shape


def make(
    ring,
    names=("first", "second", "third"),
    bucket_bytes=100,
    units=4,
    rate=0.0,
    gradient_accumulation_steps=1,
    momentum=0.0,
    activation=None,
    run_eagerly=True,
):
    """A model with a bucket for each layer; eager, but where what is traced is told apart."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(units, activation, name=name) for name in names]
    gate = Gate()
    model = keras.Sequential([keras.Input((4,)), layers[0], gate, *layers[1:]], name="model")
    model.gate = gate
    optimizer = rr.DistributedOptimizer(
        SGD(rate, momentum=momentum),
        communicator=ring,
        bucket_bytes=bucket_bytes,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=run_eagerly)
    return model


def fit(ring, **options):
    """Train a new model for a step."""
    model = make(ring, **options)
    model.fit(ONES, np.ones((2, model.output_shape[-1])), verbose=0)
    return model


def fit_twice(ring, **options):
    """The second time without the first layer's gradients, on one rank."""
    model = fit(ring, **options)
    model.gate.closed = odd(True, False)
    model.make_train_function(force=True)
    model.fit(ONES, ONES, verbose=0)


def fit_closed(ring):
    model = make(ring, run_eagerly=False)
    model.gate.closed = odd(True, False)
    model.fit(ONES, ONES, verbose=0)


def steps(ring, *calls):
    """Make a step for each: whether the first layer has no gradient, and the order is reversed."""
    model = make(ring)
    model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(closed, backwards):
        model.gate.closed = closed
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(ONES) ** 2)
        variables = model.trainable_variables
        pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
        model.optimizer.apply_gradients(pairs[::-1] if backwards else pairs)

    for closed, backwards in calls:
        step(closed, backwards)


OPEN, CLOSED, BACKWARDS = (False, False), (True, False), (False, True)


def pretending(ring, module):
    true = module.__version__
    module.__version__ = odd("99.0", true)
    try:
        fit(ring)
    finally:
        module.__version__ = true


def schedule(ring):
    rate = keras.optimizers.schedules.ExponentialDecay(odd(0.5, 0.25), 10, 0.5)
    fit(ring, rate=rate)


class Taped(keras.Model):
    """Averages gradients by itself."""

    def __init__(self, inner, ring):
        super().__init__()
        self.inner, self.ring = inner, ring

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, data):
        with rr.DistributedGradientTape(communicator=self.ring) as tape:
            loss = tf.reduce_mean(self(data[0]) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class FasterOnOneRank(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.optimizer.learning_rate = odd(0.5, 0.25)


def divided(ring, loss="mse", activation=None, own_step=False, **options):
    """Train by `rr.fit`."""
    model = make(ring, rate=0.25, activation=activation)
    optimizer = model.optimizer
    if own_step:
        model, optimizer = Taped(model, ring), "sgd"
    model.compile(optimizer=optimizer, loss=loss, run_eagerly=True)
    x = np.arange(48, dtype=np.float32).reshape(12, 4) % 5
    usual = {"batch_size": 12, "epochs": 2, "verbose": 0, "communicator": ring}
    rr.fit(model, x, x, **{**usual, **options})


# What is done, and what must be in every rank's error.
NO_GRADIENT = (
    "model/first/kernel: float32 of shape (4, 4)",
    "model/first/kernel: no gradient (None)",
)
SCENARIOS = {
    "names": (
        lambda ring: fit(
            ring, names=("first", *odd(("third", "second"), ("second", "third"))), run_eagerly=False
        ),
        ("model/second/kernel: float32", "model/third/kernel: float32", "has another model"),
    ),
    "more variables": (
        lambda ring: fit(ring, names=("first", "second", "third", "fourth")[: odd(4, 3)]),
        ("model/fourth/kernel: float32", "8 variables", "6 variables"),
    ),
    "shape": (
        lambda ring: fit(ring, units=odd(5, 4)),
        ("model/first/kernel: float32 of shape (4, 5)", "float32 of shape (4, 4)"),
    ),
    "TensorFlow": (
        lambda ring: pretending(ring, tf),
        ("runs TensorFlow 99.0", "runs TensorFlow 2."),
    ),
    "Keras": (lambda ring: pretending(ring, keras), ("runs Keras 99.0", "runs Keras 3.")),
    "buckets": (
        lambda ring: fit(ring, bucket_bytes=odd(10_000, 100)),
        ("1 bucket, the first of ", "(bucket_bytes=10000)", "(bucket_bytes=100)"),
    ),
    "momentum": (
        lambda ring: fit(ring, momentum=odd(0.5, 0.75)),
        ("found different optimizers: momentum is 0.75 on rank 0 and 0.5 on rank 1",),
    ),
    "schedule": (
        schedule,
        ("learning_rate.config.initial_learning_rate is 0.25 on rank 0 and 0.5 on rank 1",),
    ),
    "accumulated steps": (
        lambda ring: fit(ring, gradient_accumulation_steps=odd(3, 2)),
        ("strategy.steps is 2 on rank 0 and 3 on rank 1",),
    ),
    "activation": (
        lambda ring: fit(ring, activation=odd("tanh", "relu")),
        (
            "found different models: layer 'first': activation is 'relu' on rank 0 and 'tanh' on "
            "rank 1, in comparison of settings",
            "Build the same model on every rank, and adapt layers",
        ),
    ),
    "activation in a step of the user's": (
        lambda ring: divided(ring, activation=odd("tanh", "relu"), own_step=True),
        ("found different models: layer 'third': activation is 'relu' on rank 0 and 'tanh' on",),
    ),
    "batch size and seed of rr.fit": (
        lambda ring: divided(ring, **odd({"batch_size": 6, "seed": 3}, {})),
        (
            "found different arguments of rr.fit and compile: batch_size is 12 on rank 0 and 6 on "
            "rank 1; seed is 0 on rank 0 and 3 on rank 1",
        ),
    ),
    "loss": (
        lambda ring: divided(ring, odd("mae", "mse")),
        ("loss is 'mse' on rank 0 and 'mae' on rank 1",),
    ),
    "a callback of one rank": (
        lambda ring: divided(ring, callbacks=[FasterOnOneRank()]),
        ("the learning rate is 0.25 on rank 0 and 0.5 on rank 1", "alike on all ranks"),
    ),
    "None from the start": (fit_closed, NO_GRADIENT),
    "None later in fit": (lambda ring: fit_twice(ring, run_eagerly=False), NO_GRADIENT),
    "None later in fit, eagerly": (fit_twice, NO_GRADIENT),
    "None later in a function": (
        lambda ring: steps(ring, *[OPEN] * 3, *odd([CLOSED] * 2, [OPEN] * 2)),
        NO_GRADIENT,
    ),
    "a plan of before": (
        lambda ring: steps(ring, OPEN, CLOSED, OPEN, CLOSED, odd(CLOSED, OPEN)),
        NO_GRADIENT,
    ),
    "another order later": (
        lambda ring: steps(ring, OPEN, odd(BACKWARDS, OPEN)),
        ("model/first/kernel: float32", "model/third/bias: float32"),
    ),
}


def disagree(name, is_native):
    """Check how a scenario ends on this rank, and return when."""
    assert ops.are_available() is is_native
    act, texts = SCENARIOS[name]
    ring = default_communicator().split(0)
    with pytest.raises(MismatchError) as raised:
        act(ring)
    ended = time.monotonic()
    for text in texts:
        assert text in str(raised.value)
    with pytest.raises(MismatchError):
        ring.barrier()
    assert time.monotonic() - ended < 2
    ring.close()
    return ended


# How ranks reach each other: their number, hosts and variables.
WAYS = {
    "shm": (2, (), {"RINGREDUCE_TRANSPORT": "shm"}),
    "two hosts": (3, ("a", "a", "b"), {}),
    "zmq, in Python": (3, (), {"RINGREDUCE_TRANSPORT": "zmq", "RINGREDUCE_NATIVE": "0"}),
}


@pytest.mark.parametrize("way", ["shm", in_full("two hosts"), in_full("zmq, in Python")])
@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_soon_get_a_mismatch_with_both_sides(ranks, name, way):
    """The first cannot know before the last has come to the call in which they differ."""
    size, hosts, environment = WAYS[way]
    is_native = "RINGREDUCE_NATIVE" not in environment
    if is_native and native.library() is None:
        pytest.skip(native.why_missing())
    times = ranks.ring(size, hosts=hosts, **environment)(disagree, name, is_native)
    assert max(times) - min(times) < MISMATCH_S
