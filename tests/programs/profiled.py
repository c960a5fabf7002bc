"""Trainings with a slow rank under RINGREDUCE_PROFILE=1; the argument is a folder. Two ranks."""

import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from shared import keep_graphs, say

import ringreduce.keras as rr

keep_graphs()
comm = rr.init()
FILE = Path(sys.argv[1]) / "log.csv"


class Sleeps(keras.callbacks.Callback):
    """In each epoch the rank given for it sleeps before each execution; rank 0 in validation."""

    def __init__(self, *ranks, seconds=0.04):
        super().__init__()
        self.ranks, self.seconds = ranks, seconds

    def on_epoch_begin(self, epoch, logs=None):
        self.is_slow = comm.rank == self.ranks[epoch]

    def on_train_batch_begin(self, batch, logs=None):
        if self.is_slow:
            time.sleep(self.seconds)

    def on_test_begin(self, logs=None):
        if comm.rank == 0:
            time.sleep(1.4)


def numbers(count):
    generator = np.random.default_rng(0)
    return generator.integers(0, 50, (count, 3)), generator.normal(size=(count, 1))


def compiled(strategy=None, **options):
    layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(), strategy=strategy)
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def late():
    """Another rank is slower at first, so that no chance makes rank 1 the slowest there too."""
    board = keras.callbacks.TensorBoard(FILE.parent / "board", write_graph=False)
    callbacks = [keras.callbacks.CSVLogger(FILE), board, Sleeps(0, 1, 1, seconds=0.2)]
    x, y = numbers(96)
    options = {"batch_size": 16, "epochs": 3, "verbose": 0, "callbacks": callbacks}
    history = rr.fit(compiled(), x, y, validation_data=(x, y), profile=True, **options).history
    if comm.rank == 0:
        lines = FILE.read_text().splitlines()
        say("csv", names=lines[0].split(","), values=lines[-1].split(","))
    say("late", history=history)


def jit():
    data = rr.shard(tf.data.Dataset.from_tensor_slices(numbers(128))).batch(8, drop_remainder=True)
    model = compiled(jit_compile=True, steps_per_execution=3)
    callbacks = [rr.callbacks.Together([Sleeps(0, 0, seconds=0.1)])]
    say("jit", history=model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history)


def alone():
    """Uneven batches, and ranks that meet every fourth step."""
    model = compiled(rr.LocalSGD(4, overlap=1))
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "callbacks": [Sleeps(1, 1)]}
    say("alone", history=rr.fit(model, *numbers(177), **options).history)


late()
jit()
alone()
