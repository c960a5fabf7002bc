"""A small transformer that classifies time series; the last batch is not full."""

import keras
import numpy as np
from keras import layers
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(5)

rng = np.random.default_rng(0)
labels = rng.integers(0, 2, 300)
times = np.arange(24) / 24
phases = rng.uniform(0, 2 * np.pi, (300, 1))
series = np.sin(2 * np.pi * (2 + labels[:, None]) * times + phases)
series = (series + 0.3 * rng.normal(size=series.shape)).astype("float32")[..., None]


def block(x):
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=8)(x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(x + attended)
    y = layers.Conv1D(16, 1, activation="relu")(x)
    return layers.LayerNormalization(epsilon=1e-6)(x + layers.Conv1D(8, 1)(y))


inputs = keras.Input((24, 1))
x = block(layers.Conv1D(8, 3, padding="same")(inputs))
x = layers.GlobalAveragePooling1D()(x)
model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
model.compile(
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)),  # ringreduce
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
stopping = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
how = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 2, "callbacks": [stopping]}
history = rr.fit(model, series, labels, validation_split=0.2, **how)  # ringreduce
report(model, losses=history.history["loss"], validation=history.history["val_loss"])
