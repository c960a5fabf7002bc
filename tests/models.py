"""Tiny models for tests of the Keras integration, and how two optimizers are compared: exactly."""

import time

import keras
import numpy as np

import ringreduce.keras as rr
from tests.programs.shared import built

__all__ = [
    *("EAGERLY", "INPUTS", "MUON_TRAINS", "TARGETS", "CountSteps", "assert_equal_state", "fit"),
    *("make_model", "model_of_ranks", "passes_until_refused"),
]

# In Keras 3.12 it looks for the path of a `tf.Variable`, which has none, and raises.
MUON_TRAINS = not keras.__version__.startswith("3.12.")

# Options of `compile` where the step need not be a function: tracing takes most of the time.
EAGERLY = {"run_eagerly": True}

INPUTS = np.arange(48, dtype="float32").reshape(12, 4) / 48
TARGETS = INPUTS[:, :2]


def make_model():
    """The same two layers with the same weights each time, under the same names."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, name="first"),
            keras.layers.Dense(2, name="second"),
        ],
        name="model",
    )


def fit(model, optimizer=None, *, compile=None, **options):
    """Train for three steps an epoch; compile before that if there is an optimizer."""
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse", **(compile or {}))
    model.history_seen = model.fit(
        INPUTS, TARGETS, batch_size=4, shuffle=False, verbose=0, **options
    ).history
    return model


def assert_equal_state(expected, actual):
    """Two models have equal weights, and their optimizers equal variables, to the last bit."""
    pairs = [
        *zip(expected.variables, actual.variables, strict=True),
        *zip(expected.optimizer.variables, actual.optimizer.variables, strict=True),
    ]
    for one, other in pairs:
        assert one.numpy().tobytes() == other.numpy().tobytes(), one.name


def model_of_ranks(optimizer, *layers, is_built=True, **options):
    """A model of all ranks: eager on 2, since tracing takes longer, and a graph on 3."""
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])
    options = {"run_eagerly": rr.size() == 2, **options}
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return built(model, np.zeros((1, 4)), np.zeros((1, 2))) if is_built else model


class CountSteps(keras.callbacks.Callback):
    """Counts the steps of each epoch, and keeps the newest logs."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def on_epoch_begin(self, epoch, logs=None):
        self.counts.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.counts[-1] += 1
        self.logs = dict(logs)


def passes_until_refused(comm, read=lambda: None):
    """Read pass after pass, until the neighbours have compared what they have read."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        read()
        comm.barrier()
    raise AssertionError("nobody has noticed")
