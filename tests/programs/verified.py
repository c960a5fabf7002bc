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


class Clips(keras.Model):
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


def trains(case, *layers, seed=1, model=keras.Model, optimizer=keras.optimizers.Adam, rate=0.01):
    keras.utils.clear_session()  # The same names in each.
    keras.utils.set_random_seed(seed)
    inputs = outputs = keras.Input((8,))
    for layer in [keras.layers.Dense(6), *layers, keras.layers.Dense(1)]:
        outputs = layer(outputs)
    made = model(inputs, outputs)
    eager = case != "alike"
    made.compile(rr.DistributedOptimizer(optimizer(rate)), loss="mse", run_eagerly=eager)
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

trains("alike", rr.SyncBatchNormalization())
layers = keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5, name="drop")
trains("layers", *layers)
# Adam makes steps of one size.
trains("clipping", model=Clips, optimizer=keras.optimizers.SGD)
for number in range(2 if comm.size == 1 else 1):
    seed = int.from_bytes(os.urandom(3), "little")
    trains(f"unseeded-{number}", seed=seed, rate=0.01 * comm.size)
