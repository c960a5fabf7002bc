"""`rr.fit` with data of every form; each case prints one line of JSON.

On 2 ranks steps are eager, since tracing takes longer, but for some cases; on 1 and 3 in graphs.

What must come out is computed beside it, by plain Keras on the whole data with the same batches.
"""

import contextlib
import functools
import io
import logging.handlers
import os
import tempfile
import time
import warnings
import zipfile

import keras
import numpy as np
import tensorflow as tf
from shared import built, difference, digest, error_of, keep_graphs, say

import ringreduce
import ringreduce.keras as rr

keep_graphs()
comm = rr.init()
BATCH, EPOCHS = 16, 2
# Not on 2 ranks, to save time.
RARE = {
    "several steps",
    "eager",
    "jit",
    "shuffled py dataset",
    "own step",
    "own step and callback",
    "own eager step",
    "shares jit",
}


@functools.cache
def arrays(count):
    generator = np.random.default_rng(0)
    inputs = generator.integers(-4, 5, (count, 4)).astype("float32")
    return inputs, inputs[:, :2] ** 2


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts, **options):
        super().__init__(**options)
        self.parts = parts

    def __len__(self):
        return -(-len(self.parts[0]) // BATCH)

    def __getitem__(self, index):
        return tuple(part[index * BATCH : (index + 1) * BATCH] for part in self.parts)


def model_of(*layers, **options):
    keras.utils.set_random_seed(5)
    middle = layers or (keras.layers.Dense(6, activation="tanh"),)
    model = keras.Sequential([keras.Input((4,)), *middle, keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.01)
    if options.pop("distributed", True):
        optimizer = rr.DistributedOptimizer(optimizer)
    is_built = options.pop("is_built", True)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    return built(model, np.zeros((1, 4)), np.zeros((1, 2))) if is_built else model


def history_of(history):
    return {name: [float(value) for value in values] for name, values in history.history.items()}


def is_left_out(case):
    return comm.size == 2 and case in RARE


def fitted(case, given, alone=None, **options):
    """Fit on data of a form; and on what is said to be the same, with plain Keras."""
    if is_left_out(case):
        return
    model = model_of(**{"run_eagerly": comm.size == 2, **options})
    for variable in model.trainable_variables:
        variable.assign_add(np.full(variable.shape, comm.rank))  # Rank 0's are used.
    history = rr.fit(model, **given, epochs=EPOCHS, verbose=0)
    facts = {"digest": digest(model.get_weights()), "history": history_of(history)}
    if alone is not None and comm.rank == 0:
        # Its few steps take less time than tracing them.
        plain = model_of(distributed=False, is_built=False, run_eagerly=True)
        start = plain.get_weights()
        expected = plain.fit(**alone, shuffle=False, epochs=EPOCHS, verbose=0)
        facts["expected"] = history_of(expected)
        facts["difference"] = difference(model, plain)
        facts["moved"] = max(
            float(np.abs(end - begin).max())
            for end, begin in zip(plain.get_weights(), start, strict=True)
        )
    say(case, **facts)


def forms():
    """The last batch has fewer rows than there are ranks. programs/data.py has the other forms."""
    x, y = arrays(33)
    alone = {"x": x, "y": y, "batch_size": BATCH, "validation_data": arrays(37)}
    fitted("arrays", {**alone, "shuffle": False}, alone, is_built=False)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    fitted("samples", {"x": data, "batch_size": BATCH})


def class_weights_and_a_split():
    x = arrays(45)[0]
    classes = (x[:, :1] > 1).astype("int32")
    both = np.concatenate([classes, 1 - classes], 1).astype("float32")
    split = {"x": x, "y": both, "batch_size": BATCH, "validation_split": 0.3}
    split["class_weight"] = {0: 1.0, 1: 5.0}
    fitted("split", {**split, "shuffle": False}, split, run_eagerly=False)


def compiled():
    x, y = arrays(33)
    given = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    fitted("several steps", given, steps_per_execution=2)
    fitted("eager", given, {"x": x, "y": y, "batch_size": BATCH}, run_eagerly=True)
    fitted("jit", given, jit_compile=True)


class Own(keras.Model):
    """Its loss is in its own step, or in `compute_loss`; compile() gets none."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen, self.factor = keras.layers.Dense(2), [], None

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, data):
        factor = 1.0 if self.factor is None else self.factor + 0.0  # Which a callback has set.
        x, y = data
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_mean(tf.square(self(x, training=True) - y))
        if self.run_eagerly:
            self.seen.append(float(loss.numpy()))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class OwnLoss(Own):
    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        tf.py_function(lambda: self.seen.append(1.0), [], [])
        return tf.reduce_mean(tf.square(y_pred - y))


class SetsFactor(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.factor = tf.Variable(1.0)


def own_steps():
    """Nothing but training runs what a user has written, on nothing but the user's data."""
    x, y = arrays(33)
    for case, kind, eager, callbacks in (
        ("own step", Own, False, []),
        ("own step and callback", Own, False, [SetsFactor()]),
        ("own eager step", Own, True, []),
        ("own loss", OwnLoss, False, []),
    ):
        if is_left_out(case):
            continue
        models = []
        for wrap in rr.DistributedOptimizer, lambda optimizer: optimizer:
            keras.utils.set_random_seed(5)
            if models and comm.rank:
                continue
            model = kind()
            model.compile(wrap(keras.optimizers.SGD(0.01)), run_eagerly=eager or bool(models))
            if models:
                model(x)
                model.optimizer.build(model.trainable_variables)
            models.append(model)
        options = {"batch_size": BATCH, "shuffle": False, "epochs": EPOCHS, "verbose": 0}
        history = rr.fit(models[0], x, y, callbacks=callbacks, **options)
        facts = {"digest": digest(models[0].get_weights()), "history": history_of(history)}
        if comm.rank == 0:
            models[1].fit(x, y, callbacks=callbacks, **options)
            facts["difference"] = difference(*models)
        say(case, **facts, seen=models[0].seen)


def shuffled():
    """The order is that of one process; steps are eager, since it is made outside of them."""
    alone = ringreduce.Communicator(ringreduce.Config(rank=0, size=1))
    x, y = arrays(45)
    for name, data in {
        "shuffled arrays": {"x": x, "y": y, "batch_size": BATCH},
        "shuffled py dataset": {"x": Batches(x, y)},
    }.items():
        if is_left_out(name):
            continue
        model, other = (model_of(run_eagerly=True) for _ in range(2))
        history = rr.fit(model, **data, epochs=EPOCHS, verbose=0)
        rr.fit(other, **data, epochs=EPOCHS, verbose=0, seed=1)
        facts = {"digest": digest(model.get_weights()), "history": history_of(history)}
        if comm.rank:
            say(name, **facts)
            continue
        single = model_of(distributed=False, is_built=False)
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.01), alone)
        single.compile(optimizer, loss="mse", run_eagerly=True)
        rr.fit(single, **data, epochs=EPOCHS, verbose=0, communicator=alone)
        apart = {"difference": difference(model, single), "other": difference(model, other)}
        say(name, **facts, **apart)


def shares():
    """Ranks have 3, 1 and 2 parts of each batch; or what they measure, rank 1 being slow."""
    x, y = arrays(33)
    alone = {"x": x, "y": y, "batch_size": BATCH, "sample_weight": np.arange(33.0) % 3}
    unequal = {"shuffle": False, "batch_share": (3, 1.0, 2)[comm.rank]}
    fitted("shares", {**alone, **unequal}, alone)
    fitted("shares jit", {**alone, **unequal}, alone, jit_compile=True)
    exact_shares()
    measured_shares()


def exact_shares():
    """Each mean over 12, 4, 8 or 16 rows is a whole number, as all that follows from it."""
    x = 48 * np.random.default_rng(1).integers(1, 9, (64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.arange(4, dtype="float32")[:, None]])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0))
    model.compile(optimizer, loss=lambda _, values: values, run_eagerly=comm.size == 2)
    share = (3, 1, 1)[comm.rank]
    rr.fit(model, x, x[:, :1], BATCH, verbose=0, shuffle=False, batch_share=share)
    weights = model.get_weights()[0].ravel().tolist()
    say("exact shares", weights=weights, expected=(np.arange(4) - x.mean(0) * 4).tolist())


def measured_shares():
    x, y = arrays(160)
    lengths = []

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            until = time.monotonic() + 0.03 * comm.rank
            while time.monotonic() < until:
                pass

    class Told(keras.layers.Layer):
        def call(self, inputs, training=False):
            if training:
                tf.numpy_function(
                    lambda count: lengths.append(int(count)), [tf.shape(inputs)[0]], []
                )
            return inputs

    model = model_of(Told(), run_eagerly=True)
    printed = io.StringIO()
    given = {"x": x, "y": y, "batch_size": BATCH, "epochs": 2, "shuffle": False}
    with contextlib.redirect_stdout(printed):
        rr.fit(model, **given, verbose=2, batch_share="measured", callbacks=[Slow()])
    facts = {"lines": [line for line in printed.getvalue().splitlines() if "share" in line]}
    if comm.rank == 0:
        plain = model_of(keras.layers.Identity(), distributed=False, run_eagerly=True)
        plain.fit(**given, verbose=0)
        facts["difference"] = difference(model, plain)
    say("measured", lengths=lengths, **facts)


def saved(folder):
    """All ranks save into the same file, at once."""
    folder = comm.broadcast_object(folder)
    x, y = arrays(93)
    model = model_of(keras.layers.Dense(500), run_eagerly=True)
    rr.fit(model, x, y, verbose=0)
    path = os.path.join(folder, "model.keras")
    broken = 0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            comm.barrier()
            model.save(path)
            comm.barrier()
            try:
                keras.models.load_model(path)
            except (ValueError, OSError, zipfile.BadZipFile):
                broken += 1
    texts = [str(warning.message) for warning in found if "saves" in str(warning.message)]
    say("saved", broken=broken, files=os.listdir(folder), warnings=texts)
    comm.barrier()


def warned(case, action):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        action()
    ours = ("DataWarning", "ParityWarning")
    texts = [f"{w.category.__name__}: {w.message}" for w in found if w.category.__name__ in ours]
    say(case, warnings=texts, file=[w.filename for w in found if w.category.__name__ in ours])


class Table(keras.layers.Layer):
    """What it saves is no variable."""

    def call(self, inputs):
        return inputs

    def save_own_variables(self, store):
        store["rows"] = self.rows


def warnings_of_differences():
    x, y = arrays(16)
    norm, alike = keras.layers.BatchNormalization(name="norm"), rr.SyncBatchNormalization()
    model = model_of(norm, alike, keras.layers.Dropout(0.5, name="drop"), run_eagerly=True)
    warned("parity", lambda: [rr.fit(model, x, y, verbose=0) for _ in range(2)])
    frozen, table = keras.layers.Dense(4, name="frozen", trainable=False), Table(name="table")
    adapted = keras.layers.Normalization(name="adapted")
    adapted.adapt(x + comm.rank * np.full((1,), 3.0, "float32"))
    model = model_of(frozen, adapted, table)
    frozen.kernel.assign_add(np.full((4, 4), comm.rank, "float32"))
    table.rows = np.full(3, comm.rank)
    # In a graph: eagerly the first step has changed some of them.
    warned("apart", lambda: rr.fit(model, x, y, verbose=0))


def refusals():
    x, y = arrays(93)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    whole = model_of()

    def refused(case, *given, model=whole, **options):
        say(case, **error_of(lambda: rr.fit(model, *given, verbose=0, **options)))

    refused("numbers", [1.0, 2.0], [1.0, 2.0])
    refused("no arrays", iter([(1.0, 2.0)]))
    refused("split of a dataset", data.batch(4), validation_split=0.5)
    refused("split of everything", x, y, validation_split=0.99999)
    refused("small batch", x, y, batch_size=1)
    refused("small batches", Batches(x[:1], y[:1]))
    refused("single samples", data)
    refused("endless", data.batch(4).repeat())
    refused("other rows", x, y[:-1])
    refused("two weights", x, y, class_weight={0: 1}, sample_weight=y[:, 0])
    refused("targets beside", data.batch(4), y)
    refused("plain", x, y, model=model_of(distributed=False))
    refused("shares of own data", data.batch(4), sharded=True, batch_share=2.0)
    # Like rr.Pipeline, which takes long to make.
    refused("pipeline", x, y, model=type("Pipeline", (), {"fit": print})())
    refused("not compiled", x, y, model=keras.Sequential([keras.layers.Dense(2)]))

    class Broken(Batches):
        def __getitem__(self, index):
            if index == 2:
                raise KeyError("no such file")
            return super().__getitem__(index)

    try:
        rr.fit(model_of(run_eagerly=True), Broken(x, y), shuffle=False, verbose=0)
    except KeyError as error:
        say("broken", text=str(error))


def whole_data():
    """Nothing has been divided before it, in this process."""
    x, y = arrays(93)
    model = model_of(run_eagerly=True)
    warned("whole data", lambda: model.fit(x, y, verbose=0))
    warned("once", lambda: model_of(run_eagerly=True).fit(x, y, verbose=0))
    same, own = x[::2], x[comm.rank :: 2]
    with tempfile.TemporaryDirectory() as folder:
        cached = rr.shard(tf.data.Dataset.from_tensor_slices(x[:92]))
        cached = cached.cache(comm.broadcast_object(os.path.join(folder, "rows")))
        for rank in range(comm.size):
            if rank == comm.rank:
                cached = np.stack(list(cached))
            comm.barrier()
    for case, rows in {
        "same rows": same,
        "own rows": own,
        "rows of a cache": cached,
        "no numbers": same * np.nan,
    }.items():
        heard, together = logging.handlers.BufferingHandler(99), rr.callbacks.Together([])
        logging.getLogger("ringreduce").addHandler(heard)
        model_of(run_eagerly=True).fit(
            rows, rows[:, :2] ** 2, epochs=2, verbose=0, callbacks=[together]
        )
        logging.getLogger("ringreduce").removeHandler(heard)
        say(case, texts=[record.getMessage() for record in heard.buffer])


def different_arrays():
    x, y = arrays(93)
    # The last case: it breaks the ring.
    say(
        "different",
        **error_of(lambda: rr.fit(model_of(run_eagerly=True), x + comm.rank, y, verbose=0)),
    )


def main():
    whole_data()
    forms()
    class_weights_and_a_split()
    compiled()
    own_steps()
    shuffled()
    shares()
    with tempfile.TemporaryDirectory() as folder:
        saved(folder)
    warnings_of_differences()
    refusals()
    different_arrays()


main()
