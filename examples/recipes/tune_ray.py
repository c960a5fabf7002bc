"""Hyperparameters by Ray Tune: trials side by side, each on a ring of two workers.

``python examples/recipes/tune_ray.py``. Tune's scheduler sees the loss of each epoch.
"""

import argparse
import json

import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

from ringreduce.ray import RingReduceTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--workers", type=int, default=2, help="of each trial")
parser.add_argument("--at-once", type=int, default=2, help="trials side by side")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--storage", help="folder that all hosts reach")


def train(values):
    """On each worker of a trial."""
    import hashlib

    import keras
    import numpy as np

    import ringreduce.keras as rr
    from ringreduce.ray import ReportCheckpoint

    comm = rr.init()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(values["rate"])
    model.compile(optimizer=rr.DistributedOptimizer(optimizer), loss="mse")
    rr.fit(
        *(model, x, x.sum(axis=1, keepdims=True)),
        batch_size=32,
        epochs=values["epochs"],
        verbose=0,
        callbacks=[ReportCheckpoint()],
    )
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return comm.all_gather_object(hashlib.sha256(weights).hexdigest())


def trial(values, workers, storage):
    """In a process of Tune's: has Ray Train make one trial."""
    trainer = RingReduceTrainer(
        train,
        train_loop_config=values,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=f"ring-{tune.get_context().get_trial_id()}",
            storage_path=storage,
            callbacks=[TuneReportCallback()],
        ),
    )
    digests = trainer.fit().return_value
    print(json.dumps({"weights_sha256": digests}), flush=True)


def main():
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.workers * arguments.at_once + 1)
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(trial, workers=arguments.workers, storage=arguments.storage),
            {"CPU": 0.01},  # Its workers compute, for which Ray Train asks.
        ),
        param_space={"rate": tune.grid_search([0.001, 0.1]), "epochs": arguments.epochs},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", max_concurrent_trials=arguments.at_once
        ),
        run_config=tune.RunConfig(storage_path=arguments.storage),
    )
    results = tuner.fit()
    for result in results:
        losses = result.metrics_dataframe["loss"].tolist()
        print(json.dumps({"rate": result.config["rate"], "losses": losses}))
    best = results.get_best_result()
    print(json.dumps({"best": best.config["rate"], "model": best.metrics["checkpoint_path"]}))


if __name__ == "__main__":
    main()
