"""Trains 2.5 M weights, 10 MB, for some steps, and says of each when it was done, by how many."""

import json
import os
import sys
import time

import keras
import numpy as np
from shared import digest

import ringreduce.keras as rr

STEPS, EPOCHS, BATCH = 40, int(sys.argv[1]), 48
ring = rr.init()
ended = []


class Ends(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not ended:
            print(json.dumps({"rank": ring.config.rank, "pid": os.getpid()}), flush=True)
        ended.append((time.monotonic(), list(ring.members)))


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 100)).astype("float32")
layers = [keras.layers.Dense(1500, "tanh"), keras.layers.Dense(1500, "tanh"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((100,)), *layers])
model.compile(
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", jit_compile=False
)
rr.fit(
    *(model, x, x.sum(1, keepdims=True)),
    batch_size=BATCH,
    epochs=EPOCHS,
    verbose=0,
    callbacks=Ends(),
)
found = {
    "rank": ring.config.rank,
    "ended": ended,
    "iterations": int(model.optimizer.iterations.numpy()),
    "weights": model.layers[0].get_weights()[0][0, :50].tolist(),
    "digest": digest(model.get_weights()),
}
print(json.dumps(found), flush=True)
