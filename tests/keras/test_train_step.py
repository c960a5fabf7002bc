"""The lines of docs/guides/train-step.md: what the trial says, and that it is so."""

import re
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.testing import ring_of_threads
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

PAGE = Path(__file__).parents[2] / "docs/guides/train-step.md"
LINES = re.findall(r"^\| `(loss = .*?)` \| (nothing|a sum|neither)", PAGE.read_text(), re.MULTILINE)
SAID = {"nothing": "", "a sum": 'gradients="sum"', "neither": "differ from the mean"}
# At least one of each kind.
QUICK = "tf.reduce_mean((y - self(x)) ** 2)", "global_batch_size=64)", "/ tf.reduce_sum(y)"
ROWS = 64
X = np.random.default_rng(1).normal(size=(ROWS, 3)).astype("float32")
Y = (1 + np.arange(ROWS)[:, None] % 5).astype("float32")


def model_of(line, ring, **options):
    """A model whose step has that line."""

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            names = {"self": self, "x": x, "y": y, "tf": tf, "keras": keras}
            with tf.GradientTape() as tape:
                exec(line, names)
            gradients = tape.gradient(names["loss"], self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"value": tf.reduce_mean(names["loss"])}

    model = Own([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    # Ranks are threads here, which share a seed.
    model.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.01), ring, **options)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def trained(size, line, rows=ROWS, **options):
    """The weights after a step on all rows, of rank 0 of so many, and what it was warned of."""

    def work(ring):
        model = model_of(line, ring, **options)
        how = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "communicator": ring}
        how["check"] = "step"
        rr.fit(model, X[:rows], Y[:rows], **how)
        return np.concatenate([weights.ravel() for weights in model.get_weights()])

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        weights = ring_of_threads(size, work)[0]
    return weights, [str(w.message) for w in shown if w.category is rr.ParityWarning]


def test_the_page_has_lines_of_each_kind():
    assert len(LINES) == 11
    assert {kind for _, kind in LINES} == SAID.keys()


@pytest.mark.parametrize(
    ("line", "kind"),
    [each if each[0].endswith(QUICK) else in_full(*each) for each in LINES],
    ids=[line for line, _ in LINES],
)
def test_what_is_said_of_a_line_is_so(line, kind):
    alone, nothing = trained(1, line)
    weights, texts = trained(2, line)
    assert nothing == []
    assert (np.abs(weights - alone).max() < 1e-6) == (kind == "nothing")
    assert len(texts) == (kind != "nothing")
    assert all(SAID[kind] in text for text in texts)
    if kind == "a sum":
        is_first = line == next(each for each, its in LINES if its == kind)
        # Ranks have 16 and 15, or 11 and 9.
        for size, rows in ((2, 31), *(((2, ROWS), (3, 31)) if is_first else ())):
            added, texts = trained(size, line, rows, gradients="sum")
            assert texts == []
            assert np.abs(added - trained(1, line, rows)[0]).max() < 1e-6


def test_a_mean_that_is_to_be_added_up_is_named():
    _, [text] = trained(2, LINES[0][0], gradients="sum")
    assert "means over rows: added up they are too large" in text


def test_who_divides_by_the_rows_of_a_rank_says_so():
    line = f"loss = tf.reduce_sum((y - self(x)) ** 2) / {ROWS // 2}"
    assert trained(2, line, gradients="mean")[1] == []
