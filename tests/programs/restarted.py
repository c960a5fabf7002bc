"""Trains with a backup; at a random step one rank is killed, or told to go, if it is to be."""

import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from shared import digest

import ringreduce.keras as rr
from ringreduce.effects.notice import _listener
from ringreduce.keras.elastic.leaving import Looks

Looks._wishes = lambda looks, count: (1, 1)  # After each step.

folder, seed = sys.argv[1], int(sys.argv[2])
case = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
comm = rr.init()
attempt = int(os.environ.get("RINGREDUCE_RESTART", "0"))
EPOCHS, STEPS = 4, 6
random = np.random.default_rng(max(seed, 0))
victim, step = int(random.integers(comm.size)), int(random.integers(EPOCHS * STEPS))


class Killer(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        if seed >= 0 and not attempt and comm.rank == victim and self.seen == step:
            os.kill(os.getpid(), signal.SIGTERM if case.get("is_told") else signal.SIGKILL)
            while not all(notice.reason for notice in _listener._heard):
                time.sleep(0.001)
        self.seen += 1


class Parts(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return tuple(array[16 * index : 16 * (index + 1)] for array in (x, y))


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).integers(-4, 5, (16 * STEPS - 3, 4)).astype("float32")
y = x.sum(1, keepdims=True)
data = {
    "arrays": lambda: {"x": x, "y": y, "batch_size": 16},
    "sequence": lambda: {"x": Parts()},
    "dataset": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(99, seed=5).batch(16)
    },
}[case.get("data", "arrays")]()
layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
optimizer = rr.DistributedOptimizer(
    keras.optimizers.Adam(0.01),
    shard_state=case.get("shards", False),
    gradient_accumulation_steps=case.get("accumulated", 1),
)
compiled = {"jit_compile": case.get("is_compiled", False), "metrics": ["mae"]}
model.compile(optimizer=optimizer, loss="mse", **compiled)
history = rr.fit(*(model,), **data, epochs=EPOCHS, verbose=0, callbacks=Killer(), backup_dir=folder)
weights = digest(model.get_weights())
facts = {"rank": comm.rank, "attempt": attempt, "digest": weights, "history": history.history}
facts["weights"] = [float(n) for weight in model.get_weights() for n in np.ravel(weight)]
print(json.dumps(facts), flush=True)
