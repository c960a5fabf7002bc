"""Classify short made-up texts with a large embedding, whose gradients are sent as rows.

ringreduce run -n 2 examples/embedding.py

A batch uses about a thousand of the embedding's 50 000 rows, and only those are sent to the
other workers. At the end the program prints how much was sent, how much whole gradients would
be, and a digest of every worker's weights; the exit code is 1 if the digests differ.
"""

import argparse
import hashlib
import sys

import keras
import numpy as np
import tensorflow as tf

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
parser.add_argument("--sparse-as-dense", action="store_true", help="send the whole embedding")
WORDS, WIDTH, TEXTS, LENGTH, SEED = 50_000, 64, 2048, 20, 1


def load():
    """Texts as word numbers, shape (TEXTS, LENGTH), and labels; the same on every worker.

    Common words occur in all texts. Of the others, even ones are likelier where the label is 0.
    """
    rng = np.random.default_rng(SEED)
    labels = rng.integers(0, 2, TEXTS)
    words = (WORDS / 2 * rng.power(0.3, (TEXTS, LENGTH))).astype("int32")
    is_of_label = rng.random(words.shape) < 0.8
    return 2 * words + np.where(is_of_label, labels[:, None], 1 - labels[:, None]), labels


def make_model():
    """An uncompiled classifier of the mean of a text's words."""
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, WIDTH),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ]
    )


def main():
    """Train, report, and return the exit code."""
    arguments = parser.parse_args()
    comm = rr.init()
    keras.utils.set_random_seed(SEED)
    words, labels = load()
    data = rr.shard(tf.data.Dataset.from_tensor_slices((words, labels)))
    data = data.batch(arguments.batch_size // comm.size, drop_remainder=True)

    model = make_model()
    optimizer = rr.DistributedOptimizer(
        keras.optimizers.SGD(10.0), sparse_as_dense=arguments.sparse_as_dense
    )
    model.compile(
        optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    before = model.evaluate(words, labels, verbose=0)
    # Rank 0's weights are sent to all before the first step; they are not counted.
    model.fit(data.take(1), shuffle=False, verbose=0)
    sent, steps = comm.statistics().bytes_sent, int(optimizer.iterations)
    model.fit(data, epochs=arguments.epochs, shuffle=False, verbose=0)
    sent = (comm.statistics().bytes_sent - sent) / 1e6
    steps = int(optimizer.iterations) - steps
    after = model.evaluate(words, labels, verbose=0)

    whole = sum(weight.nbytes for weight in model.get_weights()) / 1e6
    dense = steps * whole * 2 * (comm.size - 1) / comm.size
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digests = comm.all_gather_object(hashlib.sha256(weights).hexdigest())
    if comm.rank == 0:
        print(f"loss before {before:.4f}, after {after:.4f}")
        print(f"sent by rank 0 in {steps} steps: {sent:.1f} MB; dense, on a ring: {dense:.1f} MB")
        for rank, digest in enumerate(digests):
            print(f"rank {rank} weights sha256 {digest}")
    return int(len(set(digests)) > 1)


if __name__ == "__main__":
    sys.exit(main())
