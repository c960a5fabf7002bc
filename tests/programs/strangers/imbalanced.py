"""Rare classes: class_weight, a Normalization layer, precision and recall."""

import keras
import numpy as np
from keras import layers
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(7)

rng = np.random.default_rng(0)
features = (3 + 5 * rng.normal(size=(1000, 6))).astype("float32")
targets = (features[:, :2].sum(axis=1) > 19).astype("int32")[:, None]
positive = int(targets.sum())
class_weight = {0: 1.0 / (1000 - positive), 1: 1.0 / positive}

normalizer = layers.Normalization()
normalizer.adapt(features)
hidden, output = layers.Dense(16, activation="relu"), layers.Dense(1, activation="sigmoid")
model = keras.Sequential([keras.Input((6,)), normalizer, hidden, output])
model.compile(
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(20.0)),  # ringreduce
    loss="binary_crossentropy",
    metrics=[keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")],
)
train, held_back = (features[:900], targets[:900]), (features[900:], targets[900:])
how = {"batch_size": 100, "epochs": 3, "shuffle": False, "verbose": 2, "class_weight": class_weight}
history = rr.fit(model, *train, validation_data=held_back, **how)  # ringreduce
report(model, losses=history.history["loss"], recalls=history.history["val_recall"])
