"""Hyperparameters by KerasTuner: each trial trains on two workers.

``python examples/recipes/tune_keras.py``. The tuner's process chooses values and keeps the scores;
the workers of a trial start with it and end with it.
"""

import argparse
import hashlib
import json
from pathlib import Path

import keras
import keras_tuner
import numpy as np

import ringreduce

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--workers", type=int, default=2, help="of each trial")
parser.add_argument("--trials", type=int, default=3)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--folder", default="tuning", help="for trials and their models")
SEED, HELD_OUT = 1, 0.25


def load():
    """Points of a plane, and on which side of a circle each lies."""
    x = np.random.default_rng(SEED).normal(size=(600, 2)).astype("float32")
    return x, (np.square(x).sum(axis=1) > 1.5).astype("float32")[:, None]


def train(values, epochs, path):
    """On each worker of a trial: one model with these hyperparameters."""
    import ringreduce.keras as rr

    rr.init()
    keras.utils.set_random_seed(SEED)
    x, y = load()
    layers = [keras.layers.Dense(values["units"], activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(values["rate"])),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    history = rr.fit(
        *(model, x, y), batch_size=50, epochs=epochs, validation_split=HELD_OUT, verbose=0
    )
    rr.on_rank_zero(lambda: model.save(path))
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return history.history["val_loss"][-1], hashlib.sha256(weights).hexdigest()


class RingTuner(keras_tuner.RandomSearch):
    """Has workers make each trial; hyperparameters are declared where they are chosen."""

    def __init__(self, workers, epochs, **options):
        super().__init__(**options)
        self.workers, self.epochs = workers, epochs

    def run_trial(self, trial):
        values = {
            "units": trial.hyperparameters.Int("units", 4, 32, step=4),
            "rate": trial.hyperparameters.Float("rate", 1e-4, 1e-1, sampling="log", default=1e-3),
        }
        path = self.path_of(trial)
        results = ringreduce.launch(
            *(train, self.workers, values, self.epochs, path),
            output="failed",
        )
        losses, digests = zip(*results, strict=True)
        said = {"values": values, "val_loss": losses[0], "weights_sha256": digests}
        print(json.dumps(said), flush=True)
        return losses[0]  # The least is the best.

    def path_of(self, trial):
        """The model of a trial."""
        return str(Path(self.get_trial_dir(trial.trial_id)) / "model.keras")


def main():
    arguments = parser.parse_args()
    tuner = RingTuner(
        arguments.workers,
        arguments.epochs,
        max_trials=arguments.trials,
        seed=SEED,
        directory=arguments.folder,
        project_name="circle",
    )
    tuner.search()
    [best] = tuner.oracle.get_best_trials(1)
    model = keras.models.load_model(tuner.path_of(best))
    x, y = load()
    first = int(len(x) * (1 - HELD_OUT))
    loss = model.evaluate(x[first:], y[first:], verbose=0)
    print(json.dumps({"best": best.hyperparameters.values, "val_loss": best.score, "loaded": loss}))


if __name__ == "__main__":
    main()
