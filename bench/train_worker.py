"""A process of a training benchmark: trains a few steps on each order of the driver.

``python -m bench.train_worker single ...``, or the same for each rank of a ring.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringreduce.keras as rr
from bench import models
from bench.systems import RINGS
from bench.turns import Line
from ringreduce import Communicator

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.001),
}


class StepClock(keras.callbacks.Callback):
    """Seconds of each training step, from batch end to batch end, and the ring's time in it."""

    looks_at_batches = False  # `rr.fit` may make several steps in a call: each takes its share

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    def on_train_begin(self, logs: Any = None) -> None:
        self.ends: list[float] = []
        self.batches: list[int] = []  # the numbers of those that ended then
        self.communicated: list[tuple[float, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())
        self.batches.append(batch)
        self.communicated.append(communicated(self._comm))

    def report(self) -> dict[str, Any]:
        """Times of all steps but those of the first call, whose start is unknown."""
        made = np.diff(self.batches)
        steps = int(made.sum())
        (busy, waited), (busy_before, waited_before) = self.communicated[-1], self.communicated[0]
        return {
            "seconds": np.repeat(np.diff(self.ends) / made, made).tolist(),
            "communication_s": (busy - busy_before) / steps,
            "waiting_s": (waited - waited_before) / steps,
        }


def update_part(optimizer: Any, variables: list[Any], size: int) -> None:
    """Have `optimizer` update 1 / `size` of each variable, in a copy: the least a rank must do."""
    counts = [int(np.prod(variable.shape)) // size for variable in variables]
    copies = [keras.Variable("zeros", (count,)) for count in counts]
    optimizer.build(copies)
    apply = optimizer.apply_gradients

    def part(tensor: Any, count: int) -> Any:
        return tf.reshape(tf.convert_to_tensor(tensor), [-1])[:count]

    def apply_part(pairs: Any) -> Any:
        gradients, wholes = zip(*pairs, strict=True)
        for copy, whole, count in zip(copies, wholes, counts, strict=True):
            copy.assign(part(whole, count))
        return apply(zip(map(part, gradients, counts), copies, strict=True))

    optimizer.apply_gradients = apply_part


def pss_mb() -> float:
    """This process's memory, with its part of what others share, in MB."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1e3


def communicated(comm: Communicator) -> tuple[float, float]:
    """Seconds so far that the ring was busy with gradients, and that steps waited for it."""
    statistics = comm.statistics()
    return statistics.reducing_s, statistics.waited_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("single", "mirrored", *RINGS, "unreduced"))
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--bucket-bytes", type=int, required=True)
    parser.add_argument("--compression", required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    parser.add_argument("--sharded", action="store_true")
    arguments = parser.parse_args()

    comm = rr.init()
    strategy = contextlib.nullcontext()
    if arguments.system == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * arguments.workers
        tf.config.set_logical_device_configuration(cpu, logical)
        names = [f"CPU:{i}" for i in range(arguments.workers)]
        strategy = tf.distribute.MirroredStrategy(names).scope()
    keras.utils.set_random_seed(1)
    inputs, labels = models.batches(arguments.model, models.BATCHES, arguments.global_batch)
    shares_rows = arguments.system == "rr.fit"
    share = arguments.global_batch // comm.size
    own = slice(None) if shares_rows else slice(comm.rank * share, (comm.rank + 1) * share)
    data = tf.data.Dataset.from_tensor_slices((inputs[:, own], labels[:, own])).repeat()

    with strategy:
        model = models.make(arguments.model)
        optimizer = OPTIMIZERS[arguments.optimizer]()
        if arguments.system in RINGS:
            options = {
                "bucket_bytes": arguments.bucket_bytes,
                "compression": arguments.compression,
                "shard_state": arguments.sharded,
            }
            optimizer = rr.DistributedOptimizer(optimizer, **options)
        elif arguments.sharded:
            update_part(optimizer, model.trainable_variables, comm.size)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, jit_compile=arguments.jit)

    line = Line(comm.rank, transport=comm.transport)
    clock = StepClock(comm)
    fit = partial(rr.fit, model) if shares_rows else model.fit
    for order in line.orders():
        found = fit(
            data, steps_per_epoch=order["steps"] + 1, verbose=0, shuffle=False, callbacks=[clock]
        )
        facts = {"loss": found.history["loss"][-1], "pss_mb": pss_mb()}
        line.answer(**clock.report(), **facts)


if __name__ == "__main__":
    main()
