"""Train on unequal amounts of data: every worker has its own part, of any length.

``ringreduce run -n 2 examples/uneven_data.py``. Worker r gets twice as much as worker r + 1, as a
stream of unknown length. A worker whose data ends makes empty steps until all have ended; the
mean is over the samples of the step.
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
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64, help="of each worker")


def own_part(arrays, comm):
    """This worker's rows of `arrays`: shares of 2^(size - 1), ..., 2, 1."""
    shares = 2.0 ** np.arange(comm.size)[::-1]
    bounds = np.concatenate([[0], np.cumsum(shares) / shares.sum()])
    start, end = (bounds[comm.rank : comm.rank + 2] * len(arrays[0])).astype(int)
    return [array[start:end] for array in arrays]


def stream(arrays, batch_size):
    """`arrays` in batches, from a generator: their number is unknown."""

    def generate():
        for start in range(0, len(arrays[0]), batch_size):
            yield tuple(array[start : start + batch_size] for array in arrays)

    spec = tuple(tf.TensorSpec((None, *a.shape[1:]), tf.as_dtype(a.dtype)) for a in arrays)
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


class CountSteps(keras.callbacks.Callback):
    """Counts the training steps of the last epoch."""

    steps = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    keras.utils.set_random_seed(digits.SEED)
    train, test = digits.load()
    own = own_part(train, comm)
    model = digits.make_model()
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.002)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    count = CountSteps()
    rr.fit(
        model,
        stream(own, arguments.batch_size),
        per_rank_data=True,  # Each worker has its own data.
        epochs=arguments.epochs,
        verbose=2,
        callbacks=[count],
    )
    _, accuracy = model.evaluate(*test, verbose=0)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digests = comm.all_gather_object(hashlib.sha256(weights).hexdigest())
    facts = comm.all_gather_object([len(own[0]), count.steps])
    if comm.rank == 0:
        result = {
            "samples": [samples for samples, _ in facts],
            "steps_each": [steps for _, steps in facts],
            "accuracy": accuracy,
            "weights_sha256": digests,
        }
        print(json.dumps(result, indent=2))
    if len(set(digests)) > 1:
        sys.exit("the workers ended with different weights")


if __name__ == "__main__":
    main()
