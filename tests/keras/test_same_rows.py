"""A loop of one's own whose ranks all read the same rows is told so, once; no other is."""

import inspect
import logging
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.keras.checks.warnings import _Data
from ringreduce.tensorflow.kept import kept
from tests.ranks import on_ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(200)]

STEPS = 12


class Heard(logging.Handler):
    """Collects what the watcher of this rank's ring says of rows."""

    def __init__(self):
        super().__init__()
        self.texts, self.has_any = [], threading.Event()

    def emit(self, record):
        if "same gradients" in (text := record.getMessage()):
            self.texts.append(text)
            self.has_any.set()


def rows_of(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).normal(size=(4, 3)).astype("float32")


def loop(rows, how="eager", scale=1.0):
    """Train on ``rows(step, rank)`` in a loop, as if it was the first one of its program."""
    kept(rr.init().config, _Data).is_compared = False
    keras.utils.set_random_seed(1 + rr.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    if how != "tape":
        optimizer = rr.DistributedOptimizer(optimizer)

    def step(x):
        with rr.DistributedGradientTape() if how == "tape" else tf.GradientTape() as tape:
            loss = scale * tf.reduce_mean(tf.square(model(x)))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    step = tf.function(step) if how == "graph" else step
    for number in range(STEPS):
        step(tf.constant(rows(number, rr.rank())))  # The line that is named, in a graph.


@on_ranks(2)
def test_the_same_rows_in_a_loop_are_a_warning_that_names_shard():
    data = kept(rr.init().config, _Data)
    logging.getLogger("ringreduce").addHandler(heard := Heard())
    data.is_divided = False
    loop(rows_of)
    # Such as a call that builds the model, or a common warm-up.
    loop(lambda step, rank: rows_of(step, rank if step > 5 else 0))
    loop(lambda step, _: rows_of(step, 0), scale=0.0)
    for data.is_divided, how in ((True, "eager"), (False, "graph")):
        loop(lambda step, _: rows_of(step, 0), how)
    if rr.rank() == 0:
        assert heard.has_any.wait(60)  # What came before it was compared before it.
        [text] = heard.texts
        lines, first = inspect.getsourcelines(loop)
        line = next(n for n, line in enumerate(lines, first) if "that is named" in line)
        assert text == (
            "[0/2] this rank and rank 1 have computed the same gradients in steps 2 to 9 of the "
            f"loop at test_same_rows.py:{line}, to the last bit: they train on the same rows, so "
            "that 2 ranks do the work of one. Give each rank its own rows, by rr.shard(dataset) "
            "before batching; or call rr.fit. If the rows are equal on purpose, ignore this."
        )
    rr.init().barrier()


@on_ranks(3)
def test_a_loop_with_a_tape_is_told_once_though_rank_0_has_two_neighbours():
    kept(rr.init().config, _Data).is_divided = False
    logging.getLogger("ringreduce").addHandler(heard := Heard())
    loop(lambda step, _: rows_of(step, 0), "tape")
    rr.init().barrier()
    if rr.rank() == 0:
        assert heard.has_any.wait(60)
    rr.init().barrier()
    assert len(heard.texts) == (rr.rank() == 0)
    logging.getLogger("ringreduce").removeHandler(heard)
