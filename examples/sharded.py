"""Divide the update of a wide network among the workers of a host.

``ringreduce run -n 2 examples/sharded.py``, then with ``--whole``: the weights are the same, each
worker keeps all of Adam's state, and a step takes longer.
"""

import argparse
import hashlib
import json
import sys
import time

import digits
import keras

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=128, help="over all workers together")
parser.add_argument("--width", type=int, default=2048, help="of each of three layers")
parser.add_argument("--whole", action="store_true", help="each worker makes the whole update")


class Clock(keras.callbacks.Callback):
    """Takes the time of the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self.began


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    keras.utils.set_random_seed(digits.SEED)
    (pixels, labels), _ = digits.load()
    layers = [keras.layers.Dense(arguments.width, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    optimizer = rr.DistributedOptimizer(
        keras.optimizers.Adam(1e-4), shard_state=not arguments.whole
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    clock = Clock()
    how = {"batch_size": arguments.batch_size, "epochs": arguments.epochs, "verbose": 2}
    history = rr.fit(model, pixels.reshape(len(pixels), -1), labels, callbacks=[clock], **how)
    state = sum(v.value.numpy().nbytes for v in optimizer.variables)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    everyone = comm.all_gather_object([hashlib.sha256(weights).hexdigest(), state])
    if comm.rank == 0:
        result = {
            "samples_per_s": round(len(pixels) / clock.seconds),
            "loss": history.history["loss"][-1],
            "state_mb": [round(nbytes / 1e6, 1) for _, nbytes in everyone],
            "weights_sha256": [digest for digest, _ in everyone],
        }
        print(json.dumps(result, indent=2))
    if len({digest for digest, _ in everyone}) > 1:
        sys.exit("the workers ended with different weights")


if __name__ == "__main__":
    main()
