"""A process of the bench of tables: trains a few steps on each order of the driver.

``python -m bench.embedding_worker single ...``, or the same for each rank of a ring.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringreduce.keras as rr
from bench.train_worker import StepClock
from bench.turns import Line

BATCHES = 32  # distinct batches, repeated
# By name, rows and width of each table.
TABLES = {
    "recommender": [(80_000, 50)],
    "two": [(30_000, 64), (30_000, 64)],
    "million": [(1_000_000, 64)],
}
OPTIMIZERS = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}
TOUCHED = "-touched"
KINDS = ("single", "single-jit", "mirrored", "parallel", "sharded")


def make(tables: str, is_sharded: bool) -> keras.Model:
    """A vector of each table for each sample, and two dense layers on them."""
    keras.utils.set_random_seed(1)
    inputs, vectors = [], []
    for number, (rows, width) in enumerate(TABLES[tables]):
        inputs.append(keras.Input((), dtype="int64"))
        kind = rr.ShardedEmbedding if is_sharded else keras.layers.Embedding
        vectors.append(kind(rows, width, name=f"table{number}")(inputs[-1]))
    joined = keras.layers.Concatenate()(vectors) if len(vectors) > 1 else vectors[0]
    hidden = keras.layers.Dense(64, activation="relu")(joined)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def batches(tables: str, ids: str, batch: int) -> tuple[list[np.ndarray], np.ndarray]:
    """For each table ids of shape (batches, batch); and targets."""
    rng = np.random.default_rng(0)
    found = []
    for rows, _ in TABLES[tables]:
        shape = (BATCHES, batch)
        drawn = rng.zipf(1.2, shape) if ids == "zipf" else rng.integers(0, rows, shape)
        # Not the most frequent ones side by side.
        found.append((drawn - 1) * 7919 % rows if ids == "zipf" else drawn)
    return found, rng.normal(size=(BATCHES, batch)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=[k + t for k in KINDS for t in ("", TOUCHED)])
    parser.add_argument("--tables", choices=TABLES, required=True)
    parser.add_argument("--ids", choices=("zipf", "uniform"), required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    arguments = parser.parse_args()
    kind = arguments.system.removesuffix(TOUCHED)
    is_touched = kind != arguments.system

    comm = rr.init()
    strategy: Any = contextlib.nullcontext()
    if kind == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * arguments.workers
        tf.config.set_logical_device_configuration(cpu, logical)
        names = [f"CPU:{i}" for i in range(arguments.workers)]
        strategy = tf.distribute.MirroredStrategy(names).scope()
    ids, targets = batches(arguments.tables, arguments.ids, arguments.global_batch)
    share = arguments.global_batch // comm.size
    own = slice(comm.rank * share, (comm.rank + 1) * share)
    inputs = tuple(each[:, own] for each in ids)
    data = tf.data.Dataset.from_tensor_slices((inputs, targets[:, own])).repeat()

    with strategy:
        model = make(arguments.tables, kind == "sharded")
        optimizer = OPTIMIZERS[arguments.optimizer](0.01)
        if is_touched or kind in ("parallel", "sharded"):
            rows = "touched" if is_touched else "all"
            optimizer = rr.DistributedOptimizer(optimizer, update_rows=rows)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=kind == "single-jit")

    line = Line(comm.rank, transport=comm.transport)
    clock = StepClock(comm)
    for order in line.orders():
        before = comm.statistics().bytes_sent
        steps = order["steps"] + 1
        fit = model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[clock])
        line.answer(
            **clock.report(),
            loss=fit.history["loss"][-1],
            bytes=(comm.statistics().bytes_sent - before) / steps,
            memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )


if __name__ == "__main__":
    main()
