"""A process of the benchmark of `rr.fit`'s loop: trains a few epochs on each order of the driver.

``python -m bench.fit_worker keras``, ``ring``, alone or for each rank of a ring, or ``unreduced``:
one of several processes that train on their rows of each global batch, and exchange nothing.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringreduce.keras as rr
from bench.turns import Line

INPUTS, HIDDEN = 20, 32


class EpochClock(keras.callbacks.Callback):
    """When each epoch begins; it looks at no batch."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.begins: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begins.append(time.perf_counter())


class BatchCallback(keras.callbacks.Callback):
    """A user's, which looks at each batch and at one of its numbers."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.largest = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.largest = max(self.largest, logs["loss"])


def begun(system: str, rank: int = 0) -> tuple[int, keras.Optimizer]:
    """Begin as one process of Keras, or as a rank; return the rank, and the optimizer for that."""
    keras.utils.set_random_seed(1)
    optimizer = keras.optimizers.Adam(0.001)
    if system == "keras":
        return 0, optimizer
    ring = rr.init()
    return rank if system == "unreduced" else ring.rank, rr.DistributedOptimizer(optimizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("keras", "ring", "unreduced"))
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0, help="of unreduced ones")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    rank, optimizer = begun(arguments.system, arguments.rank)
    share = slice(arguments.rank, None, arguments.workers)
    model = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer=optimizer, loss="mse")
    line = Line(rank)
    for order in line.orders():
        rng = np.random.default_rng(0)
        rows = arguments.global_batch * order["steps"]
        x = rng.normal(size=(rows, INPUTS)).astype(np.float32)
        y = rng.normal(size=(rows, 1)).astype(np.float32)
        data: tuple[Any, ...] = (x[share], y[share])
        options = {"batch_size": arguments.global_batch // arguments.workers}
        if order["data"] == "dataset":
            batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(arguments.global_batch)
            if arguments.workers > 1:
                batches = batches.map(lambda x, y: (x[share], y[share]))
            data, options = (batches,), {}
        clock = EpochClock()
        callbacks = [clock, *([BatchCallback()] if order["looks"] else [])]
        # One before, which traces, and one after, which only ends the last that is measured.
        options |= {"epochs": order["epochs"] + 2, "verbose": 0, "callbacks": callbacks}
        if arguments.system != "keras":
            rr.fit(model, *data, **options)
        else:
            model.fit(*data, **options)
        line.answer(seconds=np.diff(clock.begins)[1:].tolist())


if __name__ == "__main__":
    main()
