"""Trainings that `ringreduce verify` records, with planted faults; the argument is a folder."""

import contextlib
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from shared import keep_graphs, say

import ringreduce.keras as rr

keep_graphs()
comm = rr.init()
generator = np.random.default_rng(0)
DATA = generator.normal(size=(72, 8)).astype("float32"), generator.normal(size=(72, 1))


class Steps(keras.Model):
    """Has a step of its own, which takes what `loss_of` returns, and returns it as it is."""

    def loss_of(self, errors):
        return tf.reduce_mean(errors)

    def used(self, gradients):
        return gradients

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of((y - self(x, training=True)) ** 2)
        gradients = self.used(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Sums(Steps):
    """Divides by the rows of the whole batch."""

    def loss_of(self, errors):
        return tf.reduce_sum(errors) / 16


class Silent(Steps):
    """Returns nothing; and has a variable that Keras does not know."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.steps_made = tf.Variable(0.0, trainable=False)

    def train_step(self, data):
        super().train_step(data)
        self.steps_made.assign_add(1.0)
        return {}


class Clips(Steps):
    """Clips gradients in its own step, where they are still those of each rank."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result()}


class Writes(keras.callbacks.ModelCheckpoint):
    """Leaves a file, which must not be."""

    def __init__(self):
        super().__init__(Path(sys.argv[1], "left.keras"), save_freq=1)


def trains(
    case, *layers, seed=1, model=keras.Model, inner=None, in_graph=False, jit=False, **options
):
    keras.utils.clear_session()  # The same names in each.
    keras.utils.set_random_seed(seed)
    inputs = outputs = keras.Input((8,))
    for layer in [keras.layers.Dense(6), *layers, keras.layers.Dense(1)]:
        outputs = layer(outputs)
    made = model(inputs, outputs)
    optimizer = rr.DistributedOptimizer(inner or keras.optimizers.Adam(0.01), **options)
    made.compile(optimizer, loss="mse", run_eagerly=not (in_graph or jit), jit_compile=jit)
    folder = Path(sys.argv[1], case)
    if comm.rank == 0:
        folder.mkdir()
    os.environ["RINGREDUCE_VERIFY"] = f"7 {folder}"
    options = {"batch_size": 16, "epochs": 3, "verbose": 0, "callbacks": [Writes()]}
    # For the next case the program goes on.
    with contextlib.suppress(SystemExit):
        rr.fit(made, *DATA, **options)
        raise AssertionError("rr.fit has returned")


# Other training than by rr.fit is not waited for.
os.environ["RINGREDUCE_VERIFY"] = "1 nowhere"
try:
    rr.DistributedOptimizer(keras.optimizers.SGD()).apply([tf.ones(1)], [keras.Variable([1.0])])
except SystemExit as error:
    say("other", code=error.code)

trains("alike", rr.SyncBatchNormalization(), in_graph=True)
layers = keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5, name="drop")
trains("layers", *layers)
# Adam makes steps of one size.
trains("clipping", model=Clips, inner=keras.optimizers.SGD(0.01))
for number in range(2 if comm.size == 1 else 1):
    random_seed = int.from_bytes(os.urandom(3), "little")
    rate = keras.optimizers.Adam(0.01 * comm.size)
    trains(f"unseeded-{number}", seed=random_seed, inner=rate)
trains("sums", model=Sums)
trains("silent", model=Silent, jit=True)
trains("divided", in_graph=True, sharded=True, accumulate_steps=2)
trains("alone", strategy=rr.LocalSGD(2))
