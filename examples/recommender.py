"""Learn which of 20,000 items 60,000 users like: two tables, of which each worker has a part.

Runs alone (``python examples/recommender.py``), with plain Keras's tables, and as workers of one
job: ``ringreduce run -n 2 examples/recommender.py``. Both train on the same batches.
"""

import argparse
import hashlib
import json
import time

import digits
import keras
import numpy as np

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=256, help="over all workers together")
parser.add_argument("--json", metavar="FILE", help="rank 0 writes the result here")
USERS, ITEMS, WIDTH, COUNT = 60_000, 20_000, 50, 25_600


def load():
    """Users and items of some pairs, and whether the user liked the item."""
    rng = np.random.default_rng(digits.SEED)
    users = rng.integers(0, USERS, COUNT)
    items = np.minimum(rng.zipf(1.3, COUNT), ITEMS) - 1  # few items are liked by many
    kind_of_user, kind_of_item = rng.integers(0, 4, USERS), rng.integers(0, 4, ITEMS)
    return users, items, (kind_of_user[users] == kind_of_item[items]).astype("float32")


def make_model(table):
    """A vector for each user and item, and a small network on both."""
    user, item = keras.Input((), dtype="int64"), keras.Input((), dtype="int64")
    vectors = [table(USERS, WIDTH, name="users")(user), table(ITEMS, WIDTH, name="items")(item)]
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(vectors))
    outputs = keras.layers.Dense(1, activation="sigmoid")(hidden)
    return keras.Model([user, item], outputs)


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    keras.utils.set_random_seed(digits.SEED)
    users, items, liked = load()
    model = make_model(rr.ShardedEmbedding if comm.size > 1 else keras.layers.Embedding)
    optimizer = keras.optimizers.Adam(0.003)
    if comm.size > 1:
        optimizer = rr.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    clock = [time.perf_counter()]
    fit = rr.fit if comm.size > 1 else keras.Model.fit
    history = fit(
        model,
        [users, items],
        liked,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        shuffle=False,
        verbose=2,
        callbacks=[digits.EpochClock(clock)],
    )
    dense = b"".join(w.tobytes() for layer in model.layers[-2:] for w in layer.get_weights())
    result = {
        "workers": comm.size,
        "rows": [layer.get_weights()[0].shape[0] for layer in model.layers[2:4]],
        "loss": history.history["loss"][-1],
        "samples_per_s": COUNT / float(np.median(np.diff(clock))),
        "shared_weights_sha256": comm.all_gather_object(hashlib.sha256(dense).hexdigest()),
    }
    if comm.rank == 0:
        print(json.dumps(result, indent=2))
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(result, file)


if __name__ == "__main__":
    main()
