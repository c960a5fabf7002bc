"""Trains with a backup, and kills one rank at a random step of the first attempt."""

import json
import os
import signal
import sys

import keras
import numpy as np
from shared import digest

import ringreduce.keras as rr

folder, seed = sys.argv[1], int(sys.argv[2])
comm = rr.init()
attempt = int(os.environ.get("RINGREDUCE_RESTART", "0"))
EPOCHS, STEPS = 4, 6
random = np.random.default_rng(max(seed, 0))
victim, step = int(random.integers(comm.size)), int(random.integers(EPOCHS * STEPS))


class Killer(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        if seed >= 0 and not attempt and comm.rank == victim and self.seen == step:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen += 1


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).integers(-4, 5, (16 * STEPS - 3, 4)).astype("float32")
layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
history = rr.fit(
    *(model, x, x.sum(1, keepdims=True)),
    batch_size=16,
    epochs=EPOCHS,
    verbose=0,
    callbacks=Killer(),
    backup_dir=folder,
)
weights = digest(model.get_weights())
print(json.dumps({"rank": comm.rank, "attempt": attempt, "digest": weights}), flush=True)
