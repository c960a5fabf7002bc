"""Train a small transformer on handwritten digits with split layers and with divided data.

``ringreduce run -n 4 examples/hybrid.py``: ranks 0 and 1 have the pieces of one model, ranks 2 and
3 those of another; ranks 0 and 2, and 1 and 3, which have the same pieces, average gradients. Each
digit is read as a sequence of its 8 rows of pixels.
"""

import argparse
import hashlib
import json
import pathlib
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=100, help="over all workers together")
parser.add_argument("--pieces", type=int, default=2, help="workers that have one model")
TRAINED, WIDTH, HEADS = 1500, 32, 4


def load():
    """Training and test pixels (8 rows of 8, 0 to 1) and labels, always in the same order."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    pixels = (pixels[order].reshape(-1, 8, 8) / 16).astype("float32")
    labels = labels[order]
    return (pixels[:TRAINED], labels[:TRAINED]), (pixels[TRAINED:], labels[TRAINED:])


def make_model(group):
    """Two blocks, of whose heads and hidden units each rank of `group` has a part."""
    inputs = keras.Input((8, 8))
    x = keras.layers.Dense(WIDTH)(inputs)
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        attention = rr.ParallelMultiHeadAttention(HEADS, WIDTH // HEADS, communicator=group)
        x = x + keras.layers.Dropout(0.1)(attention(y, y))
        y = keras.layers.LayerNormalization()(x)
        y = rr.ColumnParallelDense(4 * WIDTH, "gelu", communicator=group)(y)
        x = x + keras.layers.Dropout(0.1)(rr.RowParallelDense(WIDTH, communicator=group)(y))
    x = keras.layers.Flatten()(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    group = comm.split(comm.rank // arguments.pieces)  # has the pieces of one model
    data = comm.split(comm.rank % arguments.pieces)  # has the same piece, and other rows
    keras.utils.set_random_seed(1)
    (pixels, labels), test = load()
    model = make_model(group)
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.003), communicator=data),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    rr.fit(
        model,
        pixels,
        labels,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        verbose=2,
        communicator=data,
    )
    loss, accuracy = rr.evaluate(model, *test, communicator=data)
    # All layers but those in pieces are equal on all ranks.
    alike = [layer for layer in model.layers if not isinstance(layer, rr.parts.PartLayer)]
    weights = b"".join(w.numpy().tobytes() for layer in alike for w in layer.trainable_weights)
    digests = comm.all_gather_object(hashlib.sha256(weights).hexdigest())

    def saved_and_loaded():
        """The accuracy of the saved model, which is one of plain Keras."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.keras"
            model.save(path)
            return keras.models.load_model(path).evaluate(*test, verbose=0)[1]

    of_file = rr.on_rank_zero(saved_and_loaded)
    result = {
        "workers": comm.size,
        "pieces": group.size,
        "loss": loss,
        "accuracy": accuracy,
        "accuracy_of_saved": of_file,
        "weights_sha256": digests,
    }
    if comm.rank == 0:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
