"""Train a small classifier on the handwritten digits that ship with scikit-learn.

Runs alone (``python examples/digits.py``) and, unchanged, as workers of one job:
``ringreduce run -n 4 examples/digits.py``. The global batch is the same either way.
"""

import argparse
import hashlib
import json
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=128, help="over all workers together")
parser.add_argument("--optimizer", default="adam", help="name of a Keras optimizer")
parser.add_argument("--jit", action="store_true", help="have XLA compile the training step")
parser.add_argument("--json", metavar="FILE", help="rank 0 writes the result here")
parser.add_argument("--save-weights", metavar="FILE", help="rank 0 writes the weights here")
SPLIT, SEED = 1500, 1


def load():
    """Training and test pixels (8 x 8, 0 to 1) and labels, always in the same order."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    pixels = (pixels[order].reshape(-1, 8, 8, 1) / 16).astype("float32")
    return (pixels[:SPLIT], labels[order][:SPLIT]), (pixels[SPLIT:], labels[order][SPLIT:])


def make_model():
    """An uncompiled convolutional classifier."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


class EpochClock(keras.callbacks.Callback):
    """Appends the time to `clock` at the end of every epoch."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def on_epoch_end(self, epoch, logs=None):
        self.clock.append(time.perf_counter())


def samples_per_s(clock, batch_size):
    """Training speed in the median epoch, which is seldom the first, since that one compiles."""
    return SPLIT // batch_size * batch_size / float(np.median(np.diff(clock)))


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    keras.utils.set_random_seed(SEED)
    (pixels, labels), test = load()
    data = tf.data.Dataset.from_tensor_slices((pixels, labels)).shuffle(SPLIT, seed=SEED)
    data = data.batch(arguments.batch_size, drop_remainder=True)

    model = make_model()
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.get(arguments.optimizer)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=arguments.jit,
    )
    clock = [time.perf_counter()]
    # Of each batch every worker takes its part.
    rr.fit(model, data, epochs=arguments.epochs, verbose=2, callbacks=[EpochClock(clock)])
    loss, accuracy = model.evaluate(*test, verbose=0)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digests = comm.all_gather_object(hashlib.sha256(weights).hexdigest())
    result = {
        "workers": comm.size,
        "epochs": arguments.epochs,
        "loss": loss,
        "accuracy": accuracy,
        "samples_per_s": samples_per_s(clock, arguments.batch_size),
        "weights_sha256": digests,
    }
    if comm.rank == 0:
        print(json.dumps(result, indent=2))
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(result, file)
        if arguments.save_weights:
            np.savez(arguments.save_weights, *model.get_weights())


if __name__ == "__main__":
    main()
