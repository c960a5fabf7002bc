"""Train a model in two stages: half of its layers on one worker, half on the next.

``ringreduce run -n 2 examples/pipeline.py``, or ``-n 4`` for two such pairs, each of which trains
on half of each batch. Within a pair activations go forward and gradients back; between the pairs,
workers with the same stage average gradients.
"""

import argparse
import hashlib
import json
import sys

import digits
import keras
import numpy as np

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=60, help="over all pairs together")


def first():
    """The layers of the first stage; they exist on every other worker only."""
    return [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
    ]


def second():
    """Those of the second stage, which get what the first one gives."""
    return [keras.layers.Dense(10)]


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    if comm.size % 2:
        sys.exit("needs an even number of workers")
    keras.utils.set_random_seed(digits.SEED)
    train, (test_pixels, test_labels) = digits.load()

    pipeline = rr.Pipeline([first, second], micro_batches=5)
    judge = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pipeline.compile(keras.optimizers.Adam(0.003), judge)
    size, epochs = arguments.batch_size, arguments.epochs
    history = pipeline.fit(*train, batch_size=size, epochs=epochs, verbose=0)
    if comm.rank == 0:
        for epoch, loss in enumerate(history.history["loss"]):
            print(f"epoch {epoch + 1}: loss {loss:.4f}")

    answers = np.argmax(pipeline.predict(test_pixels), axis=1)
    weights = b"".join(weight.tobytes() for weight in pipeline.model.get_weights())
    stages = pipeline.chain.all_gather_object(hashlib.sha256(weights).hexdigest())
    digests = comm.all_gather_object(hashlib.sha256("".join(stages).encode()).hexdigest())
    if comm.rank == 0:
        accuracy = float((answers == test_labels).mean())
        result = {"pairs": comm.size // 2, "accuracy": accuracy, "weights_sha256": digests}
        print(json.dumps(result, indent=2))
    if len(set(digests)) > 1:
        sys.exit("the pairs ended with different weights")


if __name__ == "__main__":
    main()
