"""Trainings that `ringreduce verify` records, with planted faults.

The arguments are a folder, and the cases that are to be recorded.
"""

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
CHOSEN = sys.argv[2:]
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
    if case not in CHOSEN:
        return
    keras.utils.clear_session()  # The same names in each.
    keras.utils.set_random_seed(seed)
    inputs = outputs = keras.Input((8,))
    for layer in [keras.layers.Dense(6), *layers, keras.layers.Dense(1)]:
        outputs = layer(outputs)
    made = model(inputs, outputs)
    optimizer = rr.DistributedOptimizer(inner or keras.optimizers.Adam(0.01), **options)
    made.compile(optimizer, loss="mse", run_eagerly=not (in_graph or jit), jit_compile=jit)
    wanted(case)
    options = {"batch_size": 16, "epochs": 3, "verbose": 0, "callbacks": [Writes()]}
    # For the next case the program goes on.
    with contextlib.suppress(SystemExit):
        rr.fit(made, *DATA, **options)
        raise AssertionError("rr.fit has returned")


def loops(case, *layers, steps=9, tape=False, jit=None, divisor=None, **options):
    """Trains in a loop of its own: as a function that XLA compiles, or not; or eagerly."""
    if case not in CHOSEN:
        return
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6), *layers])
    inner = keras.optimizers.Adam(0.01)
    optimizer = inner if tape else rr.DistributedOptimizer(inner, **options)
    optimizer.build(model.trainable_variables)
    wanted(case)

    def step(x, y):
        with rr.DistributedGradientTape() if tape else tf.GradientTape() as noting:
            errors = (y - model(x, training=True)) ** 2
            loss = tf.reduce_sum(errors) / divisor if divisor else tf.reduce_mean(errors)
        gradients = noting.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = step if jit is None else tf.function(step, jit_compile=jit)
    with contextlib.suppress(SystemExit):
        for number in range(steps):
            begin = 16 * (number % 4)
            rows = (array[begin : begin + 16][comm.rank :: comm.size] for array in DATA)
            step(*(array.astype("float32") for array in rows))
        if steps > 8:
            raise AssertionError("the loop has gone on")


def wanted(case):
    """Have the next training recorded."""
    folder = Path(sys.argv[1], case)
    if comm.rank == 0:
        folder.mkdir()
    comm.barrier()
    os.environ["RINGREDUCE_VERIFY"] = f"7 {folder}"


# Training by a group is not waited for.
os.environ["RINGREDUCE_VERIFY"] = "1 nowhere"
try:
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(), communicator=comm.split(0))
    optimizer.apply([tf.ones(1)], [keras.Variable([1.0])])
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
trains("divided", in_graph=True, shard_state=True, gradient_accumulation_steps=2)
trains("alone", strategy=rr.LocalSGD(2))
loops("loop", jit=False, shard_state=True)
loops("loop-accumulates", gradient_accumulation_steps=2, jit=False, steps=17)
loops("loop-sums", tape=True, divisor=96)
loops("loop-jit", keras.layers.BatchNormalization(name="norm"), jit=True)
# A loop that rr.fit follows before it has made all steps is not what is compared.
if "loop-before" in CHOSEN:
    with contextlib.suppress(SystemExit):
        loops("loop-before", steps=2)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        rr.fit(model, *DATA, batch_size=16, epochs=3, verbose=0)
        raise AssertionError("rr.fit has returned")
# Written when the program ends.
loops("loop-short", steps=3, jit=False)
