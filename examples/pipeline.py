"""Train a model in two stages: half of its layers on one worker, half on the next.

``ringreduce run -n 2 examples/pipeline.py``, or ``-n 4`` for two such pairs, each of which trains
on half of the data. Within a pair activations go forward and gradients back; between the pairs,
workers with the same stage average gradients.
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
parser.add_argument("--batch-size", type=int, default=60, help="over all pairs together")
WIDTH = 128


def make_stage(stage):
    """The layers of one stage; the first one's output is the second one's input."""
    if stage == 0:
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
                keras.layers.Conv2D(64, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(WIDTH, activation="relu"),
            ]
        )
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(10)])


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    if comm.size % 2:
        sys.exit("needs an even number of workers")
    stage = comm.rank % 2
    pair = comm.split(comm.rank // 2)  # within it, the first stage has rank 0
    replicas = comm.split(stage)  # the workers that train the same stage
    own_size = arguments.batch_size // replicas.size

    keras.utils.set_random_seed(digits.SEED)
    train, (test_pixels, test_labels) = digits.load()
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(digits.SPLIT, seed=digits.SEED)
    data = rr.shard(data, replicas).batch(own_size, drop_remainder=True)
    model = make_stage(stage)
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.003), communicator=replicas)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def activations(rows):
        """What the second stage receives for so many rows."""
        return rr.recv(tf.TensorSpec((rows, WIDTH)), 0, communicator=pair)

    @tf.function
    def step(pixels, labels):
        with tf.GradientTape() as tape:
            if stage == 0:
                # A scalar 0, whose gradient is what the second stage sends back.
                loss = rr.send(model(pixels, training=True), 1, communicator=pair)
            else:
                loss = loss_of(labels, model(activations(own_size), training=True))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    for epoch in range(arguments.epochs):
        losses = [step(pixels, labels) for pixels, labels in data]
        if stage == 1:
            loss = rr.all_reduce(tf.reduce_mean(losses), "mean", communicator=replicas)
            if replicas.rank == 0:
                print(f"epoch {epoch + 1}: loss {float(loss):.4f}", flush=True)

    rr.verify_replicas(model.trainable_variables, replicas)
    accuracy = None
    if stage == 0:
        rr.send(model(test_pixels), 1, communicator=pair)
    else:
        answers = np.argmax(model(activations(len(test_pixels))), axis=1)
        accuracy = float((answers == test_labels).mean())
    accuracy = comm.broadcast_object(accuracy, 1)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    stages = pair.all_gather_object(hashlib.sha256(weights).hexdigest())
    digests = comm.all_gather_object(hashlib.sha256("".join(stages).encode()).hexdigest())
    if comm.rank == 0:
        result = {"pairs": replicas.size, "accuracy": accuracy, "weights_sha256": digests}
        print(json.dumps(result, indent=2))
    if len(set(digests)) > 1:
        sys.exit("the pairs ended with different weights")


if __name__ == "__main__":
    main()
