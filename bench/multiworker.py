"""A process of a training benchmark under MultiWorkerMirroredStrategy, on the driver's orders.

``python -m bench.multiworker ...`` with TF_CONFIG. Keras 3's `fit` does not work under this
strategy (keras#20585), so that the steps are a loop of our own, as TensorFlow's guide has it.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

from bench import models
from bench.train_worker import BATCHES
from bench.turns import Line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    arguments = parser.parse_args()

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    keras.utils.set_random_seed(1)
    inputs, labels = models.batches(arguments.model, BATCHES, arguments.global_batch)
    share = arguments.global_batch // arguments.workers
    own = slice(rank * share, (rank + 1) * share)
    batches = tf.data.Dataset.from_tensor_slices((inputs[:, own], labels[:, own])).repeat()
    with strategy.scope():
        model = models.make(arguments.model)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    distributed = strategy.distribute_datasets_from_function(lambda _: batches)

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / arguments.global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    line = Line(rank, transport=None)
    for order in line.orders():
        ends, losses = [], []
        data = iter(distributed)  # From the first batch on, as `fit` begins.
        for _ in range(order["steps"] + 1):
            losses.append(step(next(data)).numpy())
            ends.append(time.perf_counter())
        # As for the others: without the first step, whose start is unknown.
        seconds = np.diff(ends).tolist()
        # Their mean, as `fit` has it.
        loss = float(np.mean(losses))
        line.answer(seconds=seconds, communication_s=0.0, waiting_s=0.0, loss=loss)


if __name__ == "__main__":
    main()
