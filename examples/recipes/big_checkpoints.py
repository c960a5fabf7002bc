"""Checkpoints by Orbax, written by rank 0 while training goes on, and training from one.

``ringreduce run -n 2 examples/recipes/big_checkpoints.py --epochs 3``, and the same once more with
``--epochs 6``: it goes on after the third epoch, and ends with the weights of six at a stretch.
"""

import argparse
import hashlib
import os

import keras
import numpy as np

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--folder", default="checkpoints", help="that all ranks reach")


def make_model():
    """A compiled regression."""
    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(64, activation="tanh")(inputs))
    model = keras.Model(inputs, outputs)  # A Sequential one would not find its weights again.
    model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    return model


def epochs_in(folder):
    """The numbers of the epochs that were saved."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [int(name) for name in names if name.isdigit()]


def main():
    arguments = parser.parse_args()
    rr.init()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
    y = np.tanh(x).sum(axis=1, keepdims=True)

    folder = os.path.abspath(os.path.expanduser(arguments.folder))
    saved = rr.on_rank_zero(epochs_in, folder)
    model = rr.load_model(folder) if saved else make_model()
    history = rr.fit(
        *(model, x, y),
        batch_size=32,
        epochs=arguments.epochs,
        initial_epoch=max(saved, default=-1) + 1,
        verbose=0,
        callbacks=[keras.callbacks.OrbaxCheckpoint(folder, max_to_keep=2)],
    )
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    print("epochs", *history.epoch, "end with", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
