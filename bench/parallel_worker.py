"""A process of the bench of split models: trains a few steps on each order of the driver.

``python -m bench.parallel_worker single ...``, or the same for each rank of a ring.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import ringreduce.keras as rr
from bench.turns import Line

INPUTS, CLASSES, MICRO_BATCHES = 784, 10, 8
KINDS = ("single", "parallel", "split", "pipeline")


class BatchClock(keras.callbacks.Callback):
    """Seconds from batch end to batch end."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


class Passes:
    """By how many seconds a step would differ if its stage waited for the schedule alone."""

    def __init__(self, pipeline: rr.Pipeline) -> None:
        self.found: list[float] = []
        self._waited_s = 0.0
        self._gradients = pipeline._stage.gradients
        self._incoming = pipeline._stage._incoming
        # Of M micro-batches each stage waits for as long as S - 1 take.
        self._scheduled = 1 + (pipeline.stages - 1) / MICRO_BATCHES
        pipeline._stage.gradients = self._timed
        pipeline._stage._incoming = lambda *which: self._waiting(self._incoming(*which))

    def _timed(self, *batch: Any) -> Any:
        self._waited_s, begin_s = 0.0, time.perf_counter()
        gradients = self._gradients(*batch)
        whole_s = time.perf_counter() - begin_s
        self.found.append((whole_s - self._waited_s) * self._scheduled - whole_s)
        return gradients

    def _waiting(self, incoming: Iterator[Any]) -> Iterator[Any]:
        ended = object()
        while True:
            begin_s = time.perf_counter()
            taken = next(incoming, ended)
            self._waited_s += time.perf_counter() - begin_s
            if taken is ended:
                return
            yield taken


def layers(width: int, group: Any = None) -> list[Any]:
    """Three hidden layers of `width`, in pairs that are cut by columns and by rows with a group."""
    if group is None:
        hidden = [keras.layers.Dense(width, "relu") for _ in range(3)]
        return [keras.Input((INPUTS,)), *hidden, keras.layers.Dense(CLASSES)]
    cut = {"communicator": group}
    return [
        keras.Input((INPUTS,)),
        rr.ColumnParallelDense(width, activation="relu", **cut),
        rr.RowParallelDense(width, activation="relu", **cut),
        rr.ColumnParallelDense(width, activation="relu", **cut),
        rr.RowParallelDense(CLASSES, **cut),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=KINDS)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    arguments = parser.parse_args()
    kind, batch = arguments.system, arguments.global_batch

    comm = rr.init()
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer: Any = keras.optimizers.SGD(0.01, momentum=0.9)
    rings, clock = [comm], BatchClock()
    options: dict[str, Any] = {"batch_size": batch, "verbose": 0, "callbacks": [clock]}
    if kind == "pipeline":
        every = layers(arguments.width)
        halves = [lambda: every[:3], lambda: every[3:]]
        pipeline = rr.Pipeline(halves, MICRO_BATCHES)
        pipeline.compile(optimizer, loss)
        rings += [pipeline.chain, pipeline.replicas]
        fit: Any = pipeline.fit
        options["check"] = False
        passes = Passes(pipeline)
    else:
        ring = comm
        if kind == "split":
            group, ring = comm.split(0), comm.split(comm.rank)
            rings += [group, ring]
            model = keras.Sequential(layers(arguments.width, group))
        else:
            model = keras.Sequential(layers(arguments.width))
        if kind != "single":
            optimizer = rr.DistributedOptimizer(optimizer, ring)
            own = slice(ring.rank * batch // ring.size, (ring.rank + 1) * batch // ring.size)
        model.compile(optimizer, loss, jit_compile=False)
        fit = model.fit
        options["batch_size"] = batch // ring.size

    line = Line(comm.rank, transport=comm.transport)
    bounds = None
    for order in line.orders():
        rows = batch * (order["steps"] + 1)
        x = rng.normal(size=(rows, INPUTS)).astype(np.float32)
        y = rng.integers(0, CLASSES, rows)
        if kind == "parallel":
            x = x.reshape(-1, batch, INPUTS)[:, own].reshape(-1, INPUTS)
            y = y.reshape(-1, batch)[:, own].reshape(-1)
        before = sum(each.statistics().bytes_sent for each in rings)
        history = fit(x, y, shuffle=False, **options)
        sent = sum(each.statistics().bytes_sent for each in rings) - before
        if kind == "pipeline":
            bounds = (np.diff(clock.ends) + passes.found[-order["steps"] :]).tolist()
        line.answer(
            seconds=np.diff(clock.ends).tolist(),
            loss=history.history["loss"][-1],
            bytes=sent / (order["steps"] + 1),
            memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            bounds=bounds,
        )


if __name__ == "__main__":
    main()
