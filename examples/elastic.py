"""Train while ranks are killed, and compare the weights with those of an undisturbed training.

    ringreduce run -n 4 --elastic 2 examples/elastic.py

Ranks 3 and 0 kill themselves, each at a random step. The others form a ring without them and make
that step again, with more rows each. At the end one of them trains the same model alone.
"""

import argparse
import os
import signal

import keras
import numpy as np
from sklearn.datasets import load_digits

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--seed", type=int, default=None, help="of the steps at which ranks are lost")
BATCH, VICTIMS = 120, (3, 0)


class Loss(keras.callbacks.Callback):
    """Kills this process in step `step`, counted from 1."""

    def __init__(self, step):
        super().__init__()
        self.step, self.steps = step, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(ring, epochs, loses=None, verbose=0):
    """A classifier of the digits, trained by `ring`; this rank is lost in step `loses`."""
    pixels, labels = load_digits(return_X_y=True)
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(128, activation="tanh"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.1), ring),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA compiles anew for each number of rows.
    )
    loss = Loss(loses)
    data = (pixels / 16).astype("float32"), labels
    options = {"batch_size": BATCH, "epochs": epochs, "verbose": verbose}
    rr.fit(model, *data, **options, callbacks=[loss], communicator=ring)
    return model.get_weights(), loss.steps


def main():
    arguments = parser.parse_args()
    ring = rr.init()
    size = ring.size
    drawn = np.random.default_rng(arguments.seed).integers(2, 15 * arguments.epochs, len(VICTIMS))
    steps = ring.broadcast_object(sorted(map(int, drawn)))
    lost = dict(zip(VICTIMS, steps, strict=True)) if size > len(VICTIMS) else {}
    weights, made = train(ring, arguments.epochs, lost.get(ring.rank), verbose=2)
    alone = ring.split(0 if ring.rank == 0 else None)
    if alone is not None:
        undisturbed, needed = train(alone, arguments.epochs)
        furthest = max(
            float(np.abs(a - b).max()) for a, b in zip(weights, undisturbed, strict=True)
        )
        print(f"{ring.size} of {size} ranks are left: {', '.join(map(str, ring.members))}")
        print(f"made {made} steps; undisturbed: {needed}")
        print(f"weights differ by at most {furthest:.1e} from those of an undisturbed training")


if __name__ == "__main__":
    main()
