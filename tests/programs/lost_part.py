"""Rank 1 is killed in a step of a model with parts; rank 0 says what it sees."""

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf
from shared import error_of, say

import ringreduce.keras as rr

comm = rr.init()


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Experts(rr.parts.PartLayer):
    def build(self, shape):
        self.expert = self.add_part((comm.size, shape[-1]), "ones")

    def call(self, rows):
        def ask(rows):
            every = tf.stack([tf.shape(rows)[0], 0])  # to rank 0
            sent, received = rr.all_to_all(rows, every)
            return rr.all_to_all(sent * self.expert[0], received)[0]

        return tf.ensure_shape(rr.parts.in_parts(ask, rows), rows.shape)


data = comm
if sys.argv[1] == "split":
    data = comm.split(comm.rank)
    pieces = [kind(2, communicator=comm) for kind in (rr.ColumnParallelDense, rr.RowParallelDense)]
    layers = [keras.Input((2,)), *pieces]
elif sys.argv[1] == "table":
    layers = [keras.Input((2,), dtype="int64"), rr.ShardedEmbedding(16, 2), keras.layers.Flatten()]
else:
    layers = [keras.Input((2,)), Experts()]
model = keras.Sequential([*layers, keras.layers.Dense(1)])
model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.1), data), loss="mse")
x, y = np.ones((64, 2)), np.ones((64, 1))
given = {"batch_size": 4, "verbose": 0, "callbacks": [Kill()], "communicator": data}
say("lost", **error_of(lambda: rr.fit(model, x, y, **given)))
