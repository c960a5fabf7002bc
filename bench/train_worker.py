"""One system of a training benchmark: waits for the driver's word, trains a few steps, reports.

``python -m bench.train_worker single ...``, or several under ``ringreduce run``. The lead
process (rank 0) talks to the driver in lines of JSON; the other ranks follow it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringreduce.keras as rr
from bench import models

BATCHES = 8  # distinct batches, used in turn


class StepClock(keras.callbacks.Callback):
    """Seconds of each training step, from batch end to batch end."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("single", "mirrored", "ringreduce", "unreduced"))
    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
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
    inputs, labels = models.batches(arguments.model, BATCHES, arguments.global_batch)
    share = arguments.global_batch // comm.size
    own = slice(comm.rank * share, (comm.rank + 1) * share)
    data = tf.data.Dataset.from_tensor_slices((inputs[:, own], labels[:, own])).repeat()

    with strategy:
        model = models.make(arguments.model)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        if arguments.system == "ringreduce":
            optimizer = rr.DistributedOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss)

    lead = Lead(arguments.system, arguments.port) if comm.rank == 0 else None
    clock = StepClock()
    while steps := comm.broadcast_object(lead.wait_for_order() if lead else None):
        # One more, since the first has no beginning to be measured from.
        fit = model.fit(
            data, steps_per_epoch=steps + 1, verbose=0, shuffle=False, callbacks=[clock]
        )
        loss_sum = comm.all_reduce(np.array([fit.history["loss"][-1]]), "mean")
        if lead:
            lead.report(np.diff(clock.ends).tolist(), float(loss_sum[0]))


class Lead:
    """The driver's end of the line, seen from the system's first process."""

    def __init__(self, system: str, port: int) -> None:
        self._line = socket.create_connection(("127.0.0.1", port)).makefile("rw")
        self._say({"system": system})

    def wait_for_order(self) -> int:
        """How many steps to train next; 0 to end, also when the driver has gone."""
        line = self._line.readline()
        return int(json.loads(line)["steps"]) if line else 0

    def report(self, seconds: list[float], loss: float) -> None:
        self._say({"seconds": seconds, "loss": loss})

    def _say(self, message: dict[str, Any]) -> None:
        self._line.write(json.dumps(message) + "\n")
        self._line.flush()


if __name__ == "__main__":
    main()
