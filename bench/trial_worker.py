"""A process of the benchmark of a training's start: trains two steps on an order of the driver.

``python -m bench.trial_worker keras MODEL``, ``ring MODEL``, for each rank of a ring, or
``unreduced MODEL``: one of several processes with a share of each batch, which exchange nothing.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import keras
import numpy as np

import ringreduce.keras as rr
from bench import models
from bench.fit_worker import begun
from bench.turns import Line


class Clock(keras.callbacks.Callback):
    """When the first batch has passed."""

    first_s = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.first_s = self.first_s or time.perf_counter()


def resnet50() -> tuple[keras.Model, tuple[int, ...]]:
    """ResNet50 for 128 x 128 x 3: 23.6 M parameters."""
    shape = (128, 128, 3)
    return keras.applications.ResNet50(weights=None, input_shape=shape, classes=10), shape


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("keras", "ring", "unreduced"))
    parser.add_argument("model")
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0, help="of unreduced ones")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    rank, optimizer = begun(given.system, given.rank)
    share = slice(given.rank, None, given.workers)
    if given.model == "resnet50":
        model, shape = resnet50()
    else:
        model = models.make(given.model)
        shape = model.input_shape[1:]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=given.model != "resnet50")
    model.compile(optimizer, loss)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * given.global_batch, *shape)).astype(np.float32)
    y = rng.integers(0, 10, size=len(x))
    line = Line(rank)
    for order in line.orders():
        clock = Clock()
        batch_size = given.global_batch // given.workers
        options = {"batch_size": batch_size, "verbose": 0, "callbacks": [clock]}
        began_s = time.perf_counter()
        if given.system == "keras":
            model.fit(x, y, **options)
        else:
            rr.fit(model, x[share], y[share], check=order["check"], **options)
        line.answer(seconds=clock.first_s - began_s)


if __name__ == "__main__":
    main()
