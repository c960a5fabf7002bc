"""Click rates from numbers and categories: bags of ids of unlike tables, and their products."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(6)
ROWS, SIZE = (97, 501, 1003), 4

rng = np.random.default_rng(0)
numbers = rng.normal(size=(600, 3)).astype("float32")
lengths = rng.integers(0, 4, 600)
bags = [tf.RaggedTensor.from_row_lengths(rng.integers(0, n, lengths.sum()), lengths) for n in ROWS]
clicks = (numbers.sum(axis=1) + 0.1 * lengths > 0).astype("float32")


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        bag = {"output_dim": SIZE, "combiner": "mean"}
        self.tables = [rr.ShardedEmbedding(n, **bag) for n in ROWS]  # ringreduce
        self.bottom = layers.Dense(SIZE, activation="relu")
        self.top = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])

    def call(self, inputs):
        dense, *ids = inputs
        vectors = [self.bottom(dense), *(t(i) for t, i in zip(self.tables, ids, strict=True))]
        rows = ops.stack(vectors, axis=1)
        products = ops.reshape(ops.matmul(rows, ops.transpose(rows, (0, 2, 1))), (-1, 16))
        return ops.sigmoid(self.top(ops.concatenate([vectors[0], products], axis=1)))


model = Model()
data = tf.data.Dataset.from_tensor_slices(((numbers, *bags), clicks)).batch(64)
model.compile(
    loss="binary_crossentropy",
    optimizer=rr.DistributedOptimizer(keras.optimizers.Adagrad(0.1)),  # ringreduce
)
history = rr.fit(model, data, epochs=3, verbose=2)  # ringreduce
report(losses=history.history["loss"], rate=rr.evaluate(model, data))  # ringreduce
