"""Train with a custom loop: a tape that averages, a plain optimizer, batch normalization.

Runs alone (``python examples/custom_loop.py``) and, unchanged, as workers of one job:
``ringreduce run -n 2 examples/custom_loop.py``. The global batch is the same either way. Ends
with an error if the workers' weights differ in any bit.
"""

import argparse
import hashlib
import json
import sys

import digits
import keras
import numpy as np
import tensorflow as tf

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=120, help="over all workers together")


def make_model():
    """A convolutional classifier that normalizes over the batches of all workers."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
            rr.SyncBatchNormalization(momentum=0.9),
            keras.layers.Activation("relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    keras.utils.set_random_seed(digits.SEED)  # all workers must shuffle in the same order
    (pixels, labels), (test_pixels, test_labels) = digits.load()
    data = tf.data.Dataset.from_tensor_slices((pixels, labels)).shuffle(
        digits.SPLIT, seed=digits.SEED
    )
    data = rr.shard(data).batch(arguments.batch_size // comm.size, drop_remainder=True)

    model = make_model()
    optimizer = keras.optimizers.Adam(0.003)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Without the state of random layers, which may differ.
    rr.broadcast_variables([*model.weights, *optimizer.variables])

    @tf.function
    def step(batch, target):
        with rr.DistributedGradientTape() as tape:
            loss = loss_of(target, model(batch, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    for epoch in range(arguments.epochs):
        losses = [step(batch, target) for batch, target in data]
        loss = rr.all_reduce(tf.reduce_mean(losses), "mean")
        if comm.rank == 0:
            print(f"epoch {epoch + 1}: loss {float(loss):.4f}", flush=True)

    # Each worker counts its part of the test data; the parts may have different lengths.
    own = slice(comm.rank, None, comm.size)
    answers = np.argmax(model(test_pixels[own], training=False), axis=1)
    right = rr.all_reduce(tf.constant(int((answers == test_labels[own]).sum())))
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digests = comm.all_gather_object(hashlib.sha256(weights).hexdigest())
    if comm.rank == 0:
        result = {
            "workers": comm.size,
            "accuracy": int(right) / len(test_labels),
            "weights_sha256": digests,
        }
        print(json.dumps(result, indent=2))
    if len(set(digests)) > 1:
        sys.exit("the workers ended with different weights")


if __name__ == "__main__":
    main()
