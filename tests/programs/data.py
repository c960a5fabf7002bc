"""`rr.fit` beside `model.fit`, with every argument and every form of data; a line of JSON for each.

Three runs of each case must come to the same steps, losses and weights: plain Keras on rank 0,
`rr.fit` in a world of one on rank 1, meanwhile; then `rr.fit` on both ranks. All numbers are small
integers, and gradients are means of rows, so that sums are exact in any order and the weights tell
which rows each step has had.
"""

import functools
import sys
import warnings

import keras
import numpy as np
import pandas
import scipy.sparse
import tensorflow as tf
from shared import say

import ringreduce
import ringreduce.keras as rr

comm = rr.init()
single = ringreduce.Communicator(ringreduce.Config(rank=0, size=1))
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


TRACED = ("traced", "two", "ragged traced", "sparse traced")


def difference(targets, outputs):
    return outputs - targets


class Total(keras.layers.Layer):
    """The sums of ragged rows, times a weight."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(1, 1), name="kernel")

    def call(self, inputs):
        return tf.reduce_sum(inputs, 1, keepdims=True) * self.kernel


class Alone(keras.layers.Layer):
    """A loss of its own."""

    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs))
        return inputs


def dense():
    return keras.layers.Dense(1, use_bias=False)


@functools.cache
def model_of(kind, steps_per_execution, role):
    inputs = keras.Input((3,))
    if kind == "two":
        inputs = {"a": keras.Input((3,)), "b": keras.Input((1,))}
        outputs = dense()(inputs["a"]) + inputs["b"]
    elif kind == "list":
        inputs = [keras.Input((3,)), keras.Input((1,))]
        outputs = dense()(inputs[0]) + inputs[1]
    elif kind == "two outputs":
        outputs = {"a": dense()(inputs), "b": dense()(inputs)}
    elif kind.startswith("ragged"):
        inputs = keras.Input((None,), ragged=True)
        outputs = Total()(inputs)
    elif kind.startswith("sparse"):
        inputs = keras.Input((3,), sparse=True)
        outputs = dense()(inputs)
    elif kind == "no targets":
        outputs = Alone()(dense()(inputs))
    else:
        outputs = dense()(inputs)
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.SGD(1.0)
    if role != "plain":
        optimizer = rr.DistributedOptimizer(optimizer, single if role == "alone" else comm)
    loss = None if kind == "no targets" else difference
    model.compile(
        optimizer,
        loss={"a": difference, "b": difference} if kind == "two outputs" else loss,
        steps_per_execution=steps_per_execution,
        # Else most of the time would go into tracing.
        run_eagerly=steps_per_execution == 1 and kind not in TRACED,
    )
    return model


class Steps(keras.callbacks.Callback):
    """How many steps each epoch had."""

    def __init__(self):
        super().__init__()
        self.of_epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.of_epochs.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.of_epochs[-1] += 1


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


def csr():
    """A generator of scipy's batches."""
    for first in STARTS:
        yield SCIPY.tocsr()[first : first + BATCH], Y[first : first + BATCH]


def case(make, kind="dense", plain=None, steps_per_execution=1, **given):
    """`make` returns x and y and so on, anew for each run; `plain` does for plain Keras."""
    return make, kind, plain or make, steps_per_execution, given


def arrays():
    return {"x": X, "y": Y, "batch_size": BATCH}


def validated(make, **given):
    """Arrays to train on, and others for validation."""
    return case(lambda: {**arrays(), "validation_data": make()}, epochs=2, **given)


def of(function, *parts, **options):
    return lambda: {"x": function(*(parts or (X, Y)), **options)}


def named(**parts):
    return lambda: {"batch_size": BATCH, **parts}


CASES = {
    # Arrays.
    "arrays": case(arrays, epochs=2),
    "traced": case(arrays, "traced", epochs=2),
    "no batch size": case(named(x=X[:8], y=Y[:8], batch_size=None)),
    "steps within a pass": case(arrays, steps_per_epoch=2, epochs=4),
    "steps beyond a pass": case(arrays, steps_per_epoch=5, epochs=2),
    "steps of a pass": case(arrays, steps_per_epoch=3, epochs=2),
    "steps and no batch size": case(named(x=X, y=Y, batch_size=None), steps_per_epoch=3),
    "steps executed by two": case(arrays, steps_per_execution=2, steps_per_epoch=3, epochs=3),
    "executed by two": case(arrays, steps_per_execution=2, epochs=2),
    "initial epoch": case(arrays, initial_epoch=1, epochs=3),
    "initial epoch of steps": case(arrays, steps_per_epoch=2, initial_epoch=1, epochs=4),
    "shuffled batches": case(arrays, shuffle="batch", epochs=2),
    "dict": case(named(x={"a": X, "b": Y}, y=Y), "two"),
    "list": case(named(x=[X, Y], y=Y), "list"),
    "tuple": case(named(x=(X, Y), y=Y), "list"),
    "two outputs": case(
        named(x=EVEN, y=BOTH, sample_weight={"a": WEIGHTS[:8], "b": WEIGHTS[:8]}), "two outputs"
    ),
    "one weight for two outputs": case(
        named(x=EVEN, y=BOTH, sample_weight=WEIGHTS[:8]), "two outputs"
    ),
    "no targets": case(named(x=X), "no targets"),
    "tensors": case(named(x=tf.constant(X), y=tf.constant(Y))),
    "pandas": case(named(x=pandas.DataFrame(X), y=pandas.DataFrame(Y)[0])),
    "float64": case(named(x=X.astype("float64"), y=Y.astype("float64"))),
    "integers": case(named(x=X.astype("int64"), y=Y.astype("int32"))),
    "numbers of Python": case(named(x=X.tolist(), y=Y.tolist())),
    "sample weights": case(named(x=X, y=Y, sample_weight=WEIGHTS), epochs=2),
    "class weights": case(named(x=X, y=CLASSES), class_weight={0: 2.0, 2: 4.0}, epochs=2),
    "split": case(arrays, validation_split=0.3, epochs=2),
    "split with weights": case(named(x=X, y=Y, sample_weight=WEIGHTS), validation_split=0.3),
    "every second epoch": validated(lambda: (X[:5], Y[:5]), validation_freq=2),
    "some epochs": validated(lambda: (X[:5], Y[:5]), validation_freq=[2]),
    "validated": validated(lambda: (X[:5], Y[:5])),
    "validated with weights": validated(lambda: (X, Y, WEIGHTS)),
    "validated in batches": validated(lambda: (X, Y), validation_batch_size=2),
    "validated for steps": validated(lambda: (X, Y), validation_steps=2),
    # tf.data.
    "dataset": case(of(dataset), epochs=2),
    "dataset and batch size": case(lambda: {**of(dataset)(), "batch_size": 2}),
    "dataset within a pass": case(of(dataset), steps_per_epoch=2, epochs=4),
    "dataset beyond a pass": case(of(dataset), steps_per_epoch=5, epochs=2),
    "unknown length": case(of(unknown), epochs=2),
    "unknown within a pass": case(of(unknown), steps_per_epoch=2, epochs=4),
    "unknown beyond a pass": case(of(unknown), steps_per_epoch=5, epochs=2),
    "unknown of a pass": case(of(unknown), steps_per_epoch=3, epochs=3),
    "unknown executed by two": case(of(unknown), steps_per_execution=2, epochs=2),
    "endless": case(lambda: {"x": dataset(X, Y).repeat()}, steps_per_epoch=2, epochs=3),
    "dataset with weights": case(of(dataset, X, Y, WEIGHTS)),
    "dataset with class weights": case(of(dataset, X, CLASSES), class_weight={0: 2.0, 2: 4.0}),
    "dataset of inputs": case(
        lambda: {"x": tf.data.Dataset.from_tensor_slices(X).batch(BATCH)}, "no targets"
    ),
    "dataset of dicts": case(of(dataset, {"a": X, "b": Y}, Y), "two"),
    "validated by dataset": validated(lambda: dataset(X, Y)),
    # PyDatasets.
    "py dataset": case(of(Batches), epochs=2),
    "py dataset with workers": case(of(Batches, workers=2), epochs=2),
    "py dataset and batch size": case(lambda: {**of(Batches)(), "batch_size": 2}),
    "py dataset within a pass": case(of(Batches), steps_per_epoch=2, epochs=4),
    "py dataset beyond a pass": case(of(Batches), steps_per_epoch=5, epochs=2),
    "py dataset that shrinks": case(of(Batches, more=-1), epochs=3),
    "py dataset that grows": case(of(Batches, more=1), epochs=3),
    "endless py dataset": case(of(Batches, length=None), steps_per_epoch=2, epochs=3),
    "py dataset with weights": case(of(Batches, X, Y, WEIGHTS)),
    "py dataset with class weights": case(of(Batches, X, CLASSES), class_weight={0: 2.0}),
    # Generators.
    "generator": case(of(generated)),
    "generator read again": case(of(generated), epochs=3),
    "generator for steps": case(of(generated, times=3), steps_per_epoch=2, epochs=3),
    "generator that ends": case(of(generated), steps_per_epoch=2, epochs=3),
    "generator with weights": case(of(generated, X, Y, WEIGHTS)),
    "generator of tensors": case(of(generated, make=tf.constant)),
    "generator of lists": case(of(generated, make=np.ndarray.tolist)),
    # What yields batches.
    "loader": case(of(Loader), plain=of(unknown), epochs=2),
    "loader within a pass": case(of(Loader), plain=of(unknown), steps_per_epoch=2, epochs=4),
    "counted loader": case(of(Counted), plain=of(dataset), epochs=2),
    "counted loader within a pass": case(
        of(Counted), plain=of(dataset), steps_per_epoch=2, epochs=4
    ),
    # Ragged and sparse.
    "validated by py dataset": validated(lambda: Batches(X, Y)),
    "validated by unknown length": validated(lambda: unknown(X, Y), validation_steps=2),
    "validated by generator": validated(lambda: generated(X, Y)),
    "validated by loader": validated(
        lambda: Loader(X, Y), plain=lambda: {**arrays(), "validation_data": unknown(X, Y)}
    ),
    "ragged": case(named(x=RAGGED, y=Y), "ragged", epochs=2),
    "ragged split": case(named(x=RAGGED, y=Y), "ragged", validation_split=0.3),
    "ragged dataset": case(of(dataset, RAGGED, Y), "ragged traced", epochs=2),
    "ragged py dataset": case(of(Batches, RAGGED, Y), "ragged"),
    "ragged generator": case(of(generated, RAGGED, Y), "ragged traced"),
    "sparse": case(named(x=SPARSE, y=Y), "sparse", epochs=2),
    "sparse split": case(named(x=SPARSE, y=Y), "sparse traced", validation_split=0.3),
    "sparse dataset": case(of(dataset, SPARSE, Y), "sparse traced", epochs=2),
    "scipy": case(named(x=SCIPY, y=Y), "sparse traced"),
    "scipy generator": case(lambda: {"x": csr()}, "sparse traced"),
}


# Name: what makes the data, also for plain Keras, the kind of model, and the batch size.
EVALUATED = {
    "evaluate generator": (of(generated), of(generated), "dense"),
    "evaluate loader": (of(Loader), of(unknown), "dense"),
    "evaluate ragged": (lambda: {"x": RAGGED, "y": Y}, lambda: {"x": RAGGED, "y": Y}, "ragged", 4),
    "evaluate sparse": (lambda: {"x": SPARSE, "y": Y}, lambda: {"x": SPARSE, "y": Y}, "sparse", 4),
    "evaluate scipy": (
        lambda: {"x": SCIPY, "y": Y},
        lambda: {"x": SCIPY, "y": Y},
        "sparse traced",
        4,
    ),
}


def facts(role, make, kind, steps_per_execution, given):
    model = model_of(kind, steps_per_execution, role)
    for variable in model.trainable_variables:
        variable.assign(np.arange(1, 1 + np.prod(variable.shape)).reshape(variable.shape))
    given = {"shuffle": False, "verbose": 0, **make(), **given}
    given = {name: value for name, value in given.items() if value is not None}
    if role != "plain":
        given["communicator"] = single if role == "alone" else comm
    steps = Steps()
    fit = model.fit if role == "plain" else functools.partial(rr.fit, model)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            history = fit(**given, callbacks=[steps])
    except (ValueError, TypeError, ringreduce.RingReduceError, tf.errors.OpError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {
        "steps": steps.of_epochs,
        "history": {name: [float(v) for v in each] for name, each in history.history.items()},
        "weights": [weight.ravel().tolist() for weight in model.get_weights()],
        "ran out": any("ran out of data" in str(warning.message) for warning in found),
    }


def evaluated(role, make, kind, batch_size=None):
    model = model_of(kind, 1, role)
    for variable in model.trainable_variables:
        variable.assign(np.ones(variable.shape))
    own = {"batch_size": batch_size, "verbose": 0}
    if role == "plain":
        losses = model.evaluate(**make(), **own)
        return {"loss": losses, "outputs": model.predict(make()["x"], **own).tolist()}
    losses = rr.evaluate(model, **make(), **own)
    return {"loss": losses, "outputs": rr.predict(model, make()["x"], **own).tolist()}


def main(*wanted):
    for name in wanted or [*CASES, *EVALUATED]:
        if name in CASES:
            make, kind, plain, by, given = CASES[name]
            role, own = ("plain", plain) if comm.rank == 0 else ("alone", make)
            apart = facts(role, own, kind, by, given)
            say(name, apart=apart, together=facts("together", make, kind, by, given))
        else:
            make, plain, *rest = EVALUATED[name]
            apart = evaluated("plain", plain, *rest)
            say(name, apart=apart, together=evaluated("together", make, *rest))


main(*sys.argv[1:])
