"""Train the classifier of digits.py in workers that Ray starts, on its cluster or on this machine.

``python examples/ray_digits.py --workers 2``. A worker that fails is started again with the others,
and training goes on after the last whole epoch.
"""

import argparse
import json

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig

from ringreduce.ray import RingReduceTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=128, help="over all workers together")
parser.add_argument("--storage", help="folder for checkpoints that all hosts reach")


def train(config):
    import hashlib

    import keras
    from digits import SEED, load, make_model

    import ringreduce.keras as rr
    from ringreduce.ray import ReportCheckpoint

    comm = rr.init()
    keras.utils.set_random_seed(SEED)
    (pixels, labels), test = load()
    model = make_model()
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.Adam()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    rr.fit(
        *(model, pixels, labels),
        batch_size=config["batch_size"],
        epochs=config["epochs"],
        verbose=2,
        callbacks=[ReportCheckpoint()],
    )
    _, accuracy = rr.evaluate(model, *test)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digests = comm.all_gather_object(hashlib.sha256(weights).hexdigest())
    return {"workers": comm.size, "accuracy": accuracy, "weights_sha256": digests}


def main():
    arguments = parser.parse_args()
    ray.init()
    trainer = RingReduceTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs, "batch_size": arguments.batch_size},
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(
            storage_path=arguments.storage, failure_config=FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print(json.dumps(result.return_value, indent=2))
    print("checkpoint:", result.checkpoint.path)


if __name__ == "__main__":
    main()
