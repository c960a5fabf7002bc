"""A process that trains with Keras's `fit` on orders: alone, mirrored, or as a rank of a ring.

``python -m bench.strategies.worker ring ...``. Orders name the way, one of `WAYS`:

    {"do": "speed", "way", "model", "steps"}    when so many steps began and ended
    {"do": "learn", "way", "task", "seed", "steps", "every"}    a task from the beginning
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import keras
import tensorflow as tf

import ringreduce.keras as rr
from bench.strategies.curve import Curve
from bench.strategies.tasks import Data, optimizer, task
from bench.strategies.ways import NAMED, RANK, RING, Way
from bench.train_worker import StepClock
from bench.turns import Line
from ringreduce.keras.strategies import EveryStep


class CurveCallback(keras.callbacks.Callback):
    """Lets a `Curve` test."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self._curve = curve

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._curve.after(batch + 1)


class Trainer:
    """A compiled model with this rank's part of each batch."""

    def __init__(
        self, way: Way, name: str, every: int, scope: Any, *, seed: int = 1, steps: int = 0
    ) -> None:
        chosen, comm = task(name), rr.init()
        keras.utils.set_random_seed(seed)
        self.data: Data = chosen.data(seed, steps)
        share = self.data.inputs.shape[1] // comm.size
        own = slice(comm.rank * share, (comm.rank + 1) * share)
        batches = (self.data.inputs[:, own], self.data.labels[:, own])
        self._batches = tf.data.Dataset.from_tensor_slices(batches).repeat()
        with scope:
            self.model = chosen.make()
            made = distributed(optimizer(chosen.optimizer), way, every)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(optimizer=made, loss=loss)
        logits = tf.function(lambda inputs: self.model(inputs, training=False))
        self.predict = lambda inputs: logits(inputs).numpy()

    def fit(self, steps: int, callback: keras.callbacks.Callback) -> float:
        """Train; the loss of the last step or the mean of all, as Keras has it."""
        history = self.model.fit(
            self._batches, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[callback]
        )
        return float(history.history["loss"][-1])


def distributed(inner: Any, way: Way, every: int) -> Any:
    """`inner` as the optimizer of `way`."""
    if way.strategy is None:
        return inner
    strategies = {
        "every-step": EveryStep,
        "local": lambda: rr.LocalSGD(every),
        "diloco": lambda: rr.DiLoCo(every, overlap=way.overlap(every)),
    }
    compression: Any = way.compression
    if compression == "powersgd":
        compression = rr.PowerSGD(rank=RANK, start_step=0)
    return rr.DistributedOptimizer(
        inner, strategy=strategies[way.strategy](), compression=compression
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("group", choices=("single", "mirrored", RING))
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    arguments = parser.parse_args()

    comm = rr.init()
    mirrored = None
    if arguments.group == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * arguments.workers
        tf.config.set_logical_device_configuration(cpu, logical)
        mirrored = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(arguments.workers)])

    def trainer(order: dict[str, Any], name: str, **options: Any) -> Trainer:
        scope = mirrored.scope() if mirrored is not None else contextlib.nullcontext()
        return Trainer(NAMED[order["way"]], name, arguments.every, scope, **options)

    kept: dict[tuple[str, str], Trainer] = {}
    line = Line(comm.rank, transport=comm.transport)
    for order in line.orders():
        way = NAMED[order["way"]]
        overlap = way.overlap(arguments.every)
        if order["do"] == "speed":
            key = way.name, order["model"]
            if key not in kept:
                kept[key] = trainer(order, order["model"])
            clock = StepClock(comm)
            # The start of the first step is unknown. Those of an overlap more: so each begin of a
            # meeting has its end among the steps that are counted.
            uncounted = 1 + overlap
            loss = kept[key].fit(uncounted + order["steps"], clock)
            line.answer(began=clock.ends[uncounted - 1], ended=clock.ends[-1], loss=loss)
        else:
            # Models of former orders, and what was compiled for them, are not needed any more.
            keras.backend.clear_session()
            made = trainer(order, order["task"], seed=order["seed"], steps=order["steps"])
            curve = Curve(made.predict, made.data, order["every"], overlap, comm.barrier)
            made.fit(order["steps"], CurveCallback(curve))
            line.answer(curve=curve.points, accuracy=curve.tested())


if __name__ == "__main__":
    main()
