"""Train on handwritten digits with Keras's callbacks, which act alike on all workers.

Each worker validates on different digits. All see the validation loss over all workers, stop after
the same epoch with the same weights, and only rank 0 writes a checkpoint:
``ringreduce run -n 2 examples/early_stopping.py``. Runs alone too.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=60, help="at most")
parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
parser.add_argument("--learning-rate", type=float, default=0.05, help="for one worker")
TRAINING, SEED = 1200, 1


def load(batch_size):
    """This worker's training and validation digits."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    whole = (pixels[order] / 16).astype("float32"), labels[order]
    training = tf.data.Dataset.from_tensor_slices(tuple(part[:TRAINING] for part in whole))
    training = rr.shard(training.shuffle(TRAINING, seed=SEED)).batch(batch_size)
    validation = tf.data.Dataset.from_tensor_slices(tuple(part[TRAINING:] for part in whole))
    return training, rr.shard(validation).batch(batch_size)


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    keras.utils.set_random_seed(SEED)
    training, validation = load(arguments.batch_size)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    rate = arguments.learning_rate * comm.size
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    with tempfile.TemporaryDirectory() as folder:
        best = Path(folder) / "best.keras"
        history = model.fit(
            training,
            validation_data=validation,
            epochs=arguments.epochs,
            shuffle=False,  # done above, in the same order on every worker
            verbose=0,
            callbacks=[
                rr.callbacks.Together(
                    [
                        keras.callbacks.ReduceLROnPlateau(patience=2, factor=0.5),
                        keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True),
                        keras.callbacks.ModelCheckpoint(best, save_best_only=True),
                    ]
                )
            ],
        )
        wrote = best.exists()
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    ends = comm.all_gather_object(
        {
            "epochs": len(history.epoch),
            "val_loss": history.history["val_loss"][-1],
            "learning_rate": float(model.optimizer.learning_rate),
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
        }
    )
    checkpoints = comm.all_gather_object(wrote)
    if comm.rank == 0:
        end = ends[0]
        print(
            f"{comm.size} workers: all stopped after epoch {end['epochs']}, val_loss "
            f"{end['val_loss']:.4f}, learning rate {end['learning_rate']:g}"
        )
        for rank, theirs in enumerate(ends):
            print(f"rank {rank}: weights {theirs['weights_sha256']}")
    if any(theirs != ends[0] for theirs in ends):
        sys.exit(f"rank {comm.rank}: the workers did not end alike: {ends}")
    if checkpoints != [True] + [False] * (comm.size - 1):
        sys.exit(f"rank {comm.rank}: checkpoints were written on the wrong ranks: {checkpoints}")


if __name__ == "__main__":
    main()
