"""Trains 2.5 M weights, 10 MB, for some steps, and says of each when it was done, by how many.

One rank writes a file in a callback, for longer than lost ranks are waited for. A rank ends its
connections when it finds a file `reset` with its number, and exits on SIGUSR2. SIGTERM tells it to
go. With a third argument it backs up.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
from shared import digest, reset_connections

import ringreduce.keras as rr

signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))
STEPS, EPOCHS, BATCH, WRITES_S = 40, int(sys.argv[1]), 48, float(sys.argv[2])
FOLDER = Path(sys.argv[3])
LIFE = int(os.environ.get("RINGREDUCE_LIFE") or 0)
if LIFE:
    print(json.dumps({"newcomer": LIFE, "pid": os.getpid()}), flush=True)
ring = rr.init()
RANK = ring.config.rank
ended = []


class Ends(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not ended:
            print(json.dumps({"rank": RANK, "pid": os.getpid()}), flush=True)
        ended.append((time.monotonic(), list(ring.members)))


class Writes(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with open(FOLDER / "written", "wb") as file:
            for _ in range(20):
                file.write(bytes([RANK]) * 1000)
                file.flush()
                time.sleep(WRITES_S / 20)
        found = sorted(set((FOLDER / "written").read_bytes()))
        of = {"epoch": epoch, "found": found, "members": list(ring.members)}
        print(json.dumps({"writes": RANK, **of}), flush=True)


def reset_when_told():
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.remove(FOLDER / f"reset{RANK}")
            reset_connections()
        time.sleep(0.02)


threading.Thread(target=reset_when_told, daemon=True).start()
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
    backup_dir=f"{FOLDER}/backup" if len(sys.argv) > 4 else None,
    callbacks=[Ends(), *([rr.callbacks.OnRankZero(Writes())] if WRITES_S else [])],
)
found = {
    "rank": RANK,
    "life": LIFE,
    "ended": ended,
    "iterations": int(model.optimizer.iterations.numpy()),
    "weights": model.layers[0].get_weights()[0][0, :50].tolist(),
    "digest": digest(model.get_weights()),
}
print(json.dumps(found), flush=True)
