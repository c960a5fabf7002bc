"""How many collectives a training makes beside those of its steps: around it, and in each epoch.

Three trainings of 2 ranks tell them apart, of e epochs of s steps:

    collectives = around + e * (epoch + s * step)

A number that depends on time, such as who measures how long, would show as a fraction.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

import ringreduce.keras as rr
from bench import report
from bench.facts import facts
from ringreduce.communicator.communicator import Communicator
from ringreduce.testing import ring_of_threads

# By which `ringreduce run --elastic` tells workers how many must be left.
_MINIMUM = "RINGREDUCE_ELASTIC"
WIDTH, BATCH, NORMALIZATIONS = 8, 8, 53  # as many as a ResNet-50 has
ELASTIC = "dense, elastic"
COLUMNS = f"{'training':<34} {'around':>7} {'an epoch':>9} {'a step':>7}"


class _Training(NamedTuple):
    """What makes a training, and the communicators whose collectives count."""

    fit: Callable[..., Any]  # takes x, y and the arguments of model.fit
    counted: Sequence[Communicator]


def _network(normalizations: int = 0) -> keras.Sequential:
    normalized = [keras.layers.BatchNormalization() for _ in range(normalizations)]
    return keras.Sequential(
        [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), *normalized, keras.layers.Dense(1)]
    )


def _in_fit(ring: Communicator, normalizations: int = 0, **more: Any) -> _Training:
    model = _network(normalizations)
    model.compile(rr.DistributedOptimizer(keras.optimizers.Adam(), ring), "mse", metrics=["mae"])

    def fit(x: np.ndarray, y: np.ndarray, **options: Any) -> None:
        rr.fit(model, x, y, communicator=ring, check=False, **options, **more)

    return _Training(fit, [ring])


def _validated(ring: Communicator) -> _Training:
    rows = np.zeros((4 * BATCH, WIDTH), "float32"), np.zeros((4 * BATCH, 1), "float32")
    return _in_fit(ring, validation_data=rows)


def _with_callback(ring: Communicator) -> _Training:
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs=None: None)
    return _in_fit(ring, callbacks=[callback])


def _bare(ring: Communicator) -> _Training:
    model = _network()
    model.compile(rr.DistributedOptimizer(keras.optimizers.Adam(), ring), "mse", metrics=["mae"])
    together = rr.callbacks.Together([], ring)

    def fit(x: np.ndarray, y: np.ndarray, batch_size: int, **options: Any) -> None:
        own = slice(ring.rank, None, ring.size)
        options = {**options, "batch_size": batch_size // ring.size}
        model.fit(x[own], y[own], callbacks=[together], **options)

    return _Training(fit, [ring])


def _split(ring: Communicator) -> _Training:
    pair, data = ring.split(0), ring.split(ring.rank)
    assert pair is not None
    assert data is not None
    inputs = keras.Input((WIDTH,))
    hidden = rr.ColumnParallelDense(WIDTH, communicator=pair)(inputs)
    model = keras.Model(inputs, rr.RowParallelDense(1, communicator=pair)(hidden))
    model.compile(rr.DistributedOptimizer(keras.optimizers.Adam(), data), "mse", metrics=["mae"])

    def fit(x: np.ndarray, y: np.ndarray, **options: Any) -> None:
        rr.fit(model, x, y, communicator=data, check=False, **options)

    return _Training(fit, [ring, pair, data])


def _pipeline(ring: Communicator) -> _Training:
    stages = (
        lambda: [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)],
        lambda: [keras.layers.Dense(1)],
    )
    pipeline = rr.Pipeline(stages, 2, communicator=ring)
    pipeline.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])

    def fit(x: np.ndarray, y: np.ndarray, **options: Any) -> None:
        pipeline.fit(x, y, check=False, **options)

    return _Training(fit, [ring, pipeline.chain, pipeline.replicas])


TRAININGS: dict[str, Callable[[Communicator], _Training]] = {
    "dense": _in_fit,
    "dense, on_epoch_begin": _with_callback,
    "dense, validation": _validated,
    "1 BatchNormalization": lambda ring: _in_fit(ring, 1),
    f"{NORMALIZATIONS} BatchNormalizations": lambda ring: _in_fit(ring, NORMALIZATIONS),
    "model.fit with Together": _bare,
    "split layers": _split,
    "Pipeline of 2 stages": _pipeline,
    ELASTIC: _in_fit,
}


def counted(name: str, epochs: int, steps: int) -> int:
    """Collectives of rank 0 in the training called `name`, its groups' included."""

    def work(ring: Communicator) -> int:
        training = TRAININGS[name](ring)
        before = sum(each.statistics().collectives for each in training.counted)
        x = np.random.default_rng(0).normal(size=(steps * BATCH, WIDTH)).astype("float32")
        training.fit(x, x[:, :1], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
        return sum(each.statistics().collectives for each in training.counted) - before

    os.environ.update({_MINIMUM: "1"} if name == ELASTIC else {})
    try:
        return ring_of_threads(2, work)[0]
    finally:
        os.environ.pop(_MINIMUM, None)


def row(name: str) -> dict[str, Any]:
    """The figures of one training."""
    base, longer, more = counted(name, 2, 2), counted(name, 2, 4), counted(name, 4, 2)
    step = (longer - base) / 4
    epoch = (more - base) / 2 - 2 * step
    return {"training": name, "around": base - 2 * (epoch + 2 * step), "epoch": epoch, "step": step}


def run(*, json_file: str | None) -> None:
    """Count, print a table, and write rows."""
    warnings.simplefilter("ignore")  # of batch normalization, and data that are small on purpose
    header = facts()
    report.describe(header, "2 ranks; collectives of rank 0, those of its groups included")
    print(COLUMNS, flush=True)
    rows = []
    for name in TRAININGS:
        rows.append(found := row(name))
        print(
            f"{name:<34} {found['around']:>7g} {found['epoch']:>9g} {found['step']:>7g}", flush=True
        )
    report.write(json_file, rows, header)
