"""`rr.fit` is `model.fit`: every argument and form of data, alone and on two ranks.

Three runs of each case must come to the same steps, losses and weights: plain Keras on rank 0,
`rr.fit` in a world of one on rank 1, meanwhile; then `rr.fit` on both ranks. All numbers are small
integers, and gradients are means of rows, so that sums are exact in any order and the weights tell
which rows each step has had.
"""

import functools
import warnings

import keras
import numpy as np
import pandas
import pytest
import scipy.sparse
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import Communicator, Config
from tests.models import CountSteps
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

REWRITES_GRAPHS = True

# The last batch has a row less than there are ranks.
COUNT, BATCH = 9, 4
X = 12 * np.random.default_rng(0).integers(1, 4, (COUNT, 3)).astype("float32")
Y = X[:, :1] * np.arange(COUNT)[:, None].astype("float32")
CLASSES = np.arange(COUNT)[:, None] % 3
WEIGHTS = np.arange(COUNT).astype("float32") % 3
# Of each output Keras averages the losses of batches, however many rows they have.
EVEN, BOTH = X[:8], {"a": Y[:8], "b": Y[:8]}
STARTS = range(0, COUNT, BATCH)
RAGGED = tf.RaggedTensor.from_row_lengths(X.ravel(), [0, 1, 4, 7, 3, 2, 2, 3, 5])
SPARSE = tf.sparse.from_dense(X * (X > 12))
SCIPY = scipy.sparse.coo_matrix(X * (X > 12))
# Steps of other models are eager: else most of the time would go into tracing.
TRACED = ("traced", "two", "ragged traced", "sparse traced")


def difference(targets, outputs):
    return outputs - targets


class Total(keras.layers.Layer):
    """The sums of ragged rows, times a weight."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(1, 1), name="kernel")

    def call(self, inputs):
        return tf.reduce_sum(inputs, 1, keepdims=True) * self.kernel


class WithLoss(keras.layers.Layer):
    """Has its own loss."""

    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs))
        return inputs


def dense():
    return keras.layers.Dense(1, use_bias=False)


@functools.cache
def single():
    """A world of one."""
    return Communicator(Config(rank=0, size=1))


@functools.cache
def model_of(kind, steps_per_execution, role):
    inputs, loss = keras.Input((3,)), difference
    if kind == "two":
        inputs = {"a": keras.Input((3,)), "b": keras.Input((1,))}
        outputs = dense()(inputs["a"]) + inputs["b"]
    elif kind == "list":
        inputs = [keras.Input((3,)), keras.Input((1,))]
        outputs = dense()(inputs[0]) + inputs[1]
    elif kind == "two outputs":
        outputs, loss = {"a": dense()(inputs), "b": dense()(inputs)}, dict.fromkeys("ab", loss)
    elif kind.startswith("ragged"):
        inputs = keras.Input((None,), ragged=True)
        outputs = Total()(inputs)
    elif kind.startswith("sparse"):
        inputs = keras.Input((3,), sparse=True)
        outputs = dense()(inputs)
    elif kind == "no targets":
        outputs, loss = WithLoss()(dense()(inputs)), None
    else:
        outputs = dense()(inputs)
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.SGD(1.0)
    if role != "plain":
        optimizer = rr.DistributedOptimizer(optimizer, single() if role == "alone" else rr.init())
    is_eager = steps_per_execution == 1 and kind not in TRACED
    model.compile(optimizer, loss, steps_per_execution=steps_per_execution, run_eagerly=is_eager)
    return model


def batches(*parts):
    return [tuple(part[i : i + BATCH] for part in parts) for i in STARTS]


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def unknown(*parts):
    return dataset(*parts).filter(lambda *_: True)


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts, more=0, length=3, **options):
        super().__init__(**options)
        self.parts, self.more, self.length = parts, more, length

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        return batches(*self.parts)[index % len(STARTS)]

    def on_epoch_end(self):
        if self.length is not None:
            self.length += self.more


def generated(*parts, times=1, make=lambda part: part):
    for _ in range(times):
        for batch in batches(*parts):
            yield tuple(make(part) for part in batch)


class Loader:
    """As torch's, of which Keras wants the real class."""

    def __init__(self, *parts):
        self.parts = parts

    def __iter__(self):
        return iter([list(batch) for batch in batches(*self.parts)])

    def __len__(self):
        raise TypeError("object of type 'Rows' has no len()")


class Counted(Loader):
    def __len__(self):
        return len(STARTS)


def scipy_batches():
    for first in STARTS:
        yield SCIPY.tocsr()[first : first + BATCH], Y[first : first + BATCH]


class Case:
    """Data that `make`, or `plain` for plain Keras, makes for each run, and arguments of `fit`."""

    def __init__(self, make, kind="dense", plain=None, steps_per_execution=1, **given):
        self.make, self.kind, self.plain, self.given = make, kind, plain or make, given
        self.steps_per_execution = steps_per_execution

    def model(self, role):
        model = model_of(self.kind, self.steps_per_execution, role)
        for variable in model.trainable_variables:
            variable.assign(np.arange(1, 1 + np.prod(variable.shape)).reshape(variable.shape))
        return model

    def fitted(self, role):
        """Train the same weights each time; return what has come of it."""
        model, steps = self.model(role), CountSteps()
        made = self.plain() if role == "plain" else self.make()
        given = {"shuffle": False, "verbose": 0, **made, **self.given, "callbacks": [steps]}
        fit = model.fit
        if role != "plain":
            communicator = single() if role == "alone" else rr.init()
            fit = functools.partial(rr.fit, model, communicator=communicator)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            history = fit(**given).history
        return {
            "steps": steps.counts,
            "history": {name: [float(v) for v in values] for name, values in history.items()},
            "weights": [weight.ravel().tolist() for weight in model.get_weights()],
            "ran out": any("ran out of data" in str(warning.message) for warning in warned),
        }


def arrays():
    return {"x": X, "y": Y, "batch_size": BATCH}


def validated(make, **given):
    """Arrays to train on, and others for validation."""
    return Case(lambda: {**arrays(), "validation_data": make()}, epochs=2, **given)


def of(function, *parts, **options):
    return lambda: {"x": function(*(parts or (X, Y)), **options)}


def named(**parts):
    return lambda: {"batch_size": BATCH, **parts}


SOURCES = {"dataset": dataset, "unknown": unknown, "py dataset": Batches}
LENGTHS = {
    "whole": {"epochs": 2},
    "within a pass": {"steps_per_epoch": 2, "epochs": 4},
    "of a pass": {"steps_per_epoch": 3, "epochs": 3},
    "beyond a pass": {"steps_per_epoch": 5, "epochs": 2},
    "executed by two": {"steps_per_execution": 2, "epochs": 2},
}
WEIGHTS_OF_OUTPUTS = {"a": WEIGHTS[:8], "b": WEIGHTS[:8]}
LOADED, COUNTED = {"plain": of(unknown)}, {"plain": of(dataset)}
CASES = {
    **{
        f"{source}, {length}": Case(make, **given)
        for source, make in [("arrays", arrays), *((n, of(f)) for n, f in SOURCES.items())]
        for length, given in LENGTHS.items()
    },
    **{f"{name}, weights": Case(of(make, X, Y, WEIGHTS)) for name, make in SOURCES.items()},
    **{
        f"{name}, class weights": Case(of(make, X, CLASSES), class_weight={0: 2.0, 2: 4.0})
        for name, make in SOURCES.items()
    },
    **{
        f"validated by {name}": validated(functools.partial(make, X, Y), validation_steps=2)
        for name, make in SOURCES.items()
    },
    # Arrays.
    "traced": Case(arrays, "traced", epochs=2),
    "no batch size": Case(lambda: {"x": X[:8], "y": Y[:8]}),
    "steps and no batch size": Case(lambda: {"x": X, "y": Y}, steps_per_epoch=3),
    "steps executed by two": Case(arrays, steps_per_execution=2, steps_per_epoch=3, epochs=3),
    "initial epoch": Case(arrays, initial_epoch=1, epochs=3),
    "initial epoch of steps": Case(arrays, steps_per_epoch=2, initial_epoch=1, epochs=4),
    "shuffled batches": Case(arrays, shuffle="batch", epochs=2),
    "dict": Case(named(x={"a": X, "b": Y}, y=Y), "two"),
    "list": Case(named(x=[X, Y], y=Y), "list"),
    "tuple": Case(named(x=(X, Y), y=Y), "list"),
    "two outputs": Case(named(x=EVEN, y=BOTH, sample_weight=WEIGHTS_OF_OUTPUTS), "two outputs"),
    "one weight for two": Case(named(x=EVEN, y=BOTH, sample_weight=WEIGHTS[:8]), "two outputs"),
    "no targets": Case(named(x=X), "no targets"),
    "tensors": Case(named(x=tf.constant(X), y=tf.constant(Y))),
    "pandas": Case(named(x=pandas.DataFrame(X), y=pandas.DataFrame(Y)[0])),
    "float64": Case(named(x=X.astype("float64"), y=Y.astype("float64"))),
    "integers": Case(named(x=X.astype("int64"), y=Y.astype("int32"))),
    "sample weights": Case(named(x=X, y=Y, sample_weight=WEIGHTS), epochs=2),
    "class weights": Case(named(x=X, y=CLASSES), class_weight={0: 2.0, 2: 4.0}, epochs=2),
    "split": Case(arrays, validation_split=0.3, epochs=2),
    "split with weights": Case(named(x=X, y=Y, sample_weight=WEIGHTS), validation_split=0.3),
    "every second epoch": validated(lambda: (X[:5], Y[:5]), validation_freq=2),
    "some epochs": validated(lambda: (X[:5], Y[:5]), validation_freq=[2]),
    "validated with weights": validated(lambda: (X, Y, WEIGHTS)),
    "validated in batches": validated(lambda: (X, Y), validation_batch_size=2),
    "validated for steps": validated(lambda: (X, Y), validation_steps=2),
    # Datasets.
    "dataset and batch size": Case(lambda: {**of(dataset)(), "batch_size": 2}),
    "endless": Case(lambda: {"x": dataset(X, Y).repeat()}, steps_per_epoch=2, epochs=3),
    "dataset of inputs": Case(lambda: {"x": dataset(X).map(lambda x: x)}, "no targets"),
    "dataset of dicts": Case(of(dataset, {"a": X, "b": Y}, Y), "two"),
    "validated by whole dataset": validated(lambda: dataset(X, Y)),
    "py dataset with workers": Case(of(Batches, workers=2), epochs=2),
    "py dataset and batch size": Case(lambda: {**of(Batches)(), "batch_size": 2}),
    "py dataset that shrinks": Case(of(Batches, more=-1), epochs=3),
    "py dataset that grows": Case(of(Batches, more=1), epochs=3),
    "endless py dataset": Case(of(Batches, length=None), steps_per_epoch=2, epochs=3),
    "validated by whole py dataset": validated(lambda: Batches(X, Y)),
    # Generators, and what yields batches.
    "generator": Case(of(generated)),
    "generator read again": Case(of(generated), epochs=3),
    "generator for steps": Case(of(generated, times=3), steps_per_epoch=2, epochs=3),
    "generator that ends": Case(of(generated), steps_per_epoch=2, epochs=3),
    "generator with weights": Case(of(generated, X, Y, WEIGHTS)),
    "generator of tensors": Case(of(generated, make=tf.constant)),
    "validated by generator": validated(lambda: generated(X, Y)),
    "loader": Case(of(Loader), **LOADED, epochs=2),
    "loader within a pass": Case(of(Loader), **LOADED, steps_per_epoch=2, epochs=4),
    "counted loader": Case(of(Counted), **COUNTED, epochs=2),
    "counted loader within a pass": Case(of(Counted), **COUNTED, steps_per_epoch=2, epochs=4),
    "validated by loader": validated(
        lambda: Loader(X, Y), plain=lambda: {**arrays(), "validation_data": unknown(X, Y)}
    ),
    # Ragged and sparse.
    "ragged": Case(named(x=RAGGED, y=Y), "ragged", epochs=2),
    "ragged split": Case(named(x=RAGGED, y=Y), "ragged", validation_split=0.3),
    "ragged dataset": Case(of(dataset, RAGGED, Y), "ragged traced", epochs=2),
    "ragged py dataset": Case(of(Batches, RAGGED, Y), "ragged"),
    "ragged generator": Case(of(generated, RAGGED, Y), "ragged traced"),
    "sparse": Case(named(x=SPARSE, y=Y), "sparse", epochs=2),
    "sparse split": Case(named(x=SPARSE, y=Y), "sparse traced", validation_split=0.3),
    "sparse dataset": Case(of(dataset, SPARSE, Y), "sparse traced", epochs=2),
    "scipy": Case(named(x=SCIPY, y=Y), "sparse traced"),
    "scipy generator": Case(lambda: {"x": scipy_batches()}, "sparse traced"),
}
# Those that differ from others in how steps are counted or rows are taken.
QUICK = [
    *("initial epoch of steps", "shuffled batches", "dataset and batch size"),
    *("validated by generator", "generator read again", "ragged"),
]


@pytest.mark.parametrize("name", [*QUICK, *(in_full(name) for name in CASES if name not in QUICK)])
@on_ranks(2)
def test_steps_losses_and_weights_are_those_of_keras(name):
    apart = CASES[name].fitted("plain" if rr.rank() == 0 else "alone")
    assert sum(apart["steps"]) > 0
    assert CASES[name].fitted("together") == apart
    return apart


@pytest.mark.parametrize(
    "name", ["generator", *map(in_full, ("loader", "ragged", "sparse", "scipy"))]
)
@on_ranks(2)
def test_evaluation_and_prediction_are_those_of_keras(name):
    case = CASES[name]
    plain, model = case.model("plain"), case.model("together")
    losses = rr.evaluate(model, **case.make(), verbose=0)
    assert losses == plain.evaluate(**case.plain(), verbose=0)
    options = {"batch_size": case.make().get("batch_size"), "verbose": 0}
    expected = plain.predict(case.plain()["x"], **options)
    assert len(expected) == COUNT
    assert (rr.predict(model, case.make()["x"], **options) == expected).all()
