"""A process of a training benchmark under MultiWorkerMirroredStrategy, on the driver's orders.

``python -m bench.multiworker ...`` with TF_CONFIG. Keras 3's `fit` does not work under this
strategy (keras#20585), so that the steps are a loop of our own, as TensorFlow's guide has it.
Orders are those of `bench.strategies.worker`, and of ``bench train``, which name no `do`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bench.strategies.curve import Curve
from bench.strategies.tasks import optimizer, task
from bench.turns import Line


class Replicated:
    """A model under the strategy, with this worker's part of each batch."""

    def __init__(
        self, strategy: Any, rank: int, workers: int, name: str, *, seed: int = 1, steps: int = 0
    ) -> None:
        chosen = task(name)
        keras.utils.set_random_seed(seed)
        self.data = chosen.data(seed, steps)
        share = self.data.inputs.shape[1] // workers
        own = slice(rank * share, (rank + 1) * share)
        arrays = (self.data.inputs[:, own], self.data.labels[:, own])
        batches = tf.data.Dataset.from_tensor_slices(arrays).repeat()
        # How many losses the workers' batches have together.
        count = arrays[1][0].size * workers
        with strategy.scope():
            self.model = model = chosen.make()
            own_optimizer = optimizer(chosen.optimizer)
            own_optimizer.build(model.trainable_variables)
            loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        self._batches = strategy.distribute_datasets_from_function(lambda _: batches)

        def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True)) / count
            gradients = tape.gradient(loss, model.trainable_variables)
            own_optimizer.apply(gradients, model.trainable_variables)
            return loss

        @tf.function
        def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            losses = strategy.run(replica_step, args=batch)
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        logits = tf.function(lambda inputs: model(inputs, training=False))
        self.predict = lambda inputs: logits(inputs).numpy()
        self._step = step

    def steps(self, count: int) -> Any:
        """Train `count` steps from the first batch on, as `fit` begins; yields each loss."""
        data = iter(self._batches)
        for _ in range(count):
            yield float(self._step(next(data)).numpy())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    arguments = parser.parse_args()

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    place = strategy, rank, arguments.workers
    kept: dict[str, Replicated] = {}
    line = Line(rank, transport=None)
    for order in line.orders():
        if order.get("do") == "learn":
            keras.backend.clear_session()
            made = Replicated(*place, order["task"], seed=order["seed"], steps=order["steps"])
            curve = Curve(made.predict, made.data, order["every"])
            for number, _ in enumerate(made.steps(order["steps"]), start=1):
                curve.after(number)
            line.answer(curve=curve.points, accuracy=curve.tested())
            continue
        if order["model"] not in kept:
            kept[order["model"]] = Replicated(*place, order["model"])
        ends, losses = [], []
        for loss in kept[order["model"]].steps(order["steps"] + 1):
            ends.append(time.perf_counter())
            losses.append(loss)
        line.answer(
            # As for the others: without the first step, whose start is unknown.
            seconds=np.diff(ends).tolist(),
            began=ends[0],
            ended=ends[-1],
            communication_s=0.0,
            waiting_s=0.0,
            # Their mean, as `fit` has it.
            loss=float(np.mean(losses)),
        )


if __name__ == "__main__":
    main()
