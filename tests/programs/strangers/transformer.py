"""A small transformer on sequences; two workers have the heads and units of one model."""

import keras
import numpy as np
from report import report

import ringreduce.keras as rr  # ringreduce

comm = rr.init()  # ringreduce
group = comm.split(comm.rank // 2)  # ringreduce
data = comm.split(comm.rank % 2)  # ringreduce
keras.utils.set_random_seed(8)
LENGTH, WORDS, WIDTH = 12, 30, 16


def block(x):
    y = keras.layers.LayerNormalization()(x)
    y = rr.ParallelMultiHeadAttention(4, WIDTH // 4, communicator=group)(y, y)  # ringreduce
    x = keras.layers.Add()([x, y])
    y = keras.layers.LayerNormalization()(x)
    y = rr.ColumnParallelDense(4 * WIDTH, "gelu", communicator=group)(y)  # ringreduce
    y = rr.RowParallelDense(WIDTH, communicator=group)(y)  # ringreduce
    return keras.layers.Add()([x, y])


rng = np.random.default_rng(0)
x = rng.integers(0, WORDS, (200, LENGTH))
y = (x[:, :6].sum(1) > x[:, 6:].sum(1)).astype("float32")[:, None]
inputs = keras.Input((LENGTH,), dtype="int32")
embedded = keras.layers.Embedding(WORDS, WIDTH)(inputs)
pooled = keras.layers.GlobalAveragePooling1D()(block(block(embedded)))
model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
model.compile(
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.05), data),  # ringreduce
)
history = rr.fit(  # ringreduce
    model, x, y, batch_size=24, epochs=3, shuffle=False, verbose=2, communicator=data
)
found = rr.predict(model, x[:5], communicator=data)  # ringreduce
report(losses=history.history["loss"], found=found[:, 0].tolist())
