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
import pandas
import tensorflow as tf
from shared import built, difference, digest, error_of, keep_graphs, say

import ringreduce
import ringreduce.keras as rr

keep_graphs()
comm = rr.init()
BATCH, EPOCHS = 16, 2
# Not on 2 ranks, to save time.
RARE = {
    "uneven pandas",
    "uneven validated by py dataset",
    "uneven validated by generator",
    "uneven samples",
    "uneven workers",
    "several steps",
    "class weights",
    "class weights of a dataset",
    "short epochs of arrays",
    "eager",
    "jit",
    "shuffled py dataset",
    "own step and callback",
    "own eager step",
    "shares of batches",
    "shares of a generator",
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


def endless(*parts):
    while True:
        yield from (Batches(*parts)[index] for index in range(len(Batches(*parts))))


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
    if alone is not None:
        # Its few steps take less time than tracing them.
        plain = model_of(distributed=False, is_built=False, run_eagerly=True)
        untrained = model_of(distributed=False, is_built=False)
        expected = plain.fit(**alone, shuffle=False, epochs=EPOCHS, verbose=0)
        facts["expected"] = history_of(expected)
        facts["difference"] = difference(model, plain)
        facts["moved"] = difference(plain, untrained)
    say(case, **facts)


def forms(prefix, count):
    """`count` rows: the last batch may have fewer rows than there are ranks.

    Only the first form is compared with Keras: all must reach the same bits.
    """
    x, y = arrays(count)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    alone = {"x": x, "y": y, "batch_size": BATCH}
    frames = {"x": pandas.DataFrame(x), "y": pandas.DataFrame(y)}
    held_out = arrays(37)
    checked = {**alone, "validation_data": held_out}
    fitted(f"{prefix}arrays", {**checked, "shuffle": False}, checked, is_built=False)
    for name, given in {
        "pandas": {**frames, "batch_size": BATCH, "shuffle": False},
        "batches": {"x": data.filter(lambda *_: True).batch(BATCH)},
        "samples": {"x": data, "batch_size": BATCH},
        "py dataset": {"x": Batches(x, y), "shuffle": False},
        "workers": {"x": Batches(x, y, workers=2), "shuffle": False},
        "generator": {"x": endless(x, y), "steps_per_epoch": -(-count // BATCH)},
    }.items():
        fitted(f"{prefix}{name}", given)
    data = tf.data.Dataset.from_tensor_slices(held_out).batch(BATCH)
    for name, other in {
        "dataset": {"validation_data": data},
        "py dataset": {"validation_data": Batches(*held_out)},
        "generator": {"validation_data": endless(*held_out), "validation_steps": 3},
    }.items():
        fitted(f"{prefix}validated by {name}", {**alone, "shuffle": False, **other})


def weights_and_splits():
    x, y = arrays(45)
    classes = (x[:, :1] > 1).astype("int32")
    both = np.concatenate([classes, 1 - classes], 1).astype("float32")
    base = {"x": x, "batch_size": BATCH}
    weights = (np.arange(45) % 3).astype("float32")
    split = {**base, "y": both, "class_weight": {0: 1.0, 1: 5.0}, "validation_split": 0.3}
    fitted("split", {**split, "shuffle": False}, split, run_eagerly=False)
    for name, given in {
        "sample weights": {**base, "y": y, "sample_weight": weights},
        "class weights": {**base, "y": both, "class_weight": {0: 1.0, 1: 5.0}},
    }.items():
        fitted(name, {**given, "shuffle": False}, given)
    data = tf.data.Dataset.from_tensor_slices((x, both)).batch(BATCH)
    fitted("class weights of a dataset", {"x": data, "class_weight": {0: 1.0, 1: 5.0}})
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    fitted("short epochs", {"x": whole, "steps_per_epoch": 2}, {"x": whole, "steps_per_epoch": 2})
    given = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, "steps_per_epoch": 2}
    fitted("short epochs of arrays", given)


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
            model = kind()
            model.compile(wrap(keras.optimizers.SGD(0.01)), run_eagerly=eager or bool(models))
            if models:
                model(x)
                model.optimizer.build(model.trainable_variables)
            models.append(model)
        options = {"batch_size": BATCH, "shuffle": False, "epochs": EPOCHS, "verbose": 0}
        history = rr.fit(models[0], x, y, callbacks=callbacks, **options)
        models[1].fit(x, y, callbacks=callbacks, **options)
        say(
            case,
            digest=digest(models[0].get_weights()),
            history=history_of(history),
            difference=difference(*models),
            seen=models[0].seen,
        )


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
        model, single, other = (model_of(run_eagerly=True) for _ in range(3))
        history = rr.fit(model, **data, epochs=EPOCHS, verbose=0)
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.01), alone)
        single.compile(optimizer, loss="mse", run_eagerly=True)
        rr.fit(single, **data, epochs=EPOCHS, verbose=0, communicator=alone)
        rr.fit(other, **data, epochs=EPOCHS, verbose=0, seed=1)
        say(
            name,
            digest=digest(model.get_weights()),
            history=history_of(history),
            difference=difference(model, single),
            other=difference(model, other),
        )


def shares():
    """Ranks have 3, 1 and 2 parts of each batch; or what they measure, rank 1 being slow."""
    x, y = arrays(33)
    alone = {"x": x, "y": y, "batch_size": BATCH, "sample_weight": np.arange(33.0) % 3}
    unequal = {"shuffle": False, "batch_share": (3, 1.0, 2)[comm.rank]}
    fitted("shares", {**alone, **unequal}, alone)
    data = tf.data.Dataset.from_tensor_slices((x, y, alone["sample_weight"])).batch(BATCH)
    fitted("shares of batches", {"x": data, **unequal})
    batches = endless(x, y, alone["sample_weight"])
    fitted("shares of a generator", {"x": batches, "steps_per_epoch": 3, **unequal})
    fitted("shares jit", {**alone, **unequal}, alone, jit_compile=True)
    exact_shares()
    measured_shares()


def exact_shares():
    """Each mean over 12, 4, 8 or 16 rows is a whole number, as all that follows from it."""
    x = 48 * np.random.default_rng(1).integers(1, 9, (64, 4)).astype("float32")
    found = []
    for is_alone, share in ((False, (3, 1, 1)[comm.rank]), (False, "equal"), (True, None)):
        optimizer = keras.optimizers.SGD(1.0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.arange(4, dtype="float32")[:, None]])
        optimizer = optimizer if is_alone else rr.DistributedOptimizer(optimizer)
        model.compile(optimizer, loss=lambda _, values: values, run_eagerly=comm.size == 2)
        if is_alone:
            model.fit(x, x[:, :1], BATCH, verbose=0, shuffle=False)
        else:
            rr.fit(model, x, x[:, :1], BATCH, verbose=0, shuffle=False, batch_share=share)
        found.append(model.get_weights()[0].ravel().tolist())
    say("exact shares", weights=found, expected=(np.arange(4) - x.mean(0) * 4).tolist())


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
    plain = model_of(keras.layers.Identity(), distributed=False, run_eagerly=True)
    printed = io.StringIO()
    given = {"x": x, "y": y, "batch_size": BATCH, "epochs": 2, "shuffle": False}
    with contextlib.redirect_stdout(printed):
        rr.fit(model, **given, verbose=2, batch_share="measured", callbacks=[Slow()])
    plain.fit(**given, verbose=0)
    lines = [line for line in printed.getvalue().splitlines() if "share" in line]
    say("measured", lengths=lengths, lines=lines, difference=difference(model, plain))


def callbacks(folder):
    """They see the same everywhere, and a backup is continued from on all ranks."""
    x, y = arrays(93)
    logs = []
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=1e9)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, log: logs.append(dict(log)))
    model = model_of(run_eagerly=True)
    history = rr.fit(model, x, y, epochs=9, verbose=0, callbacks=[stop, note], validation_split=0.2)
    say("callbacks", logs=logs, history=history_of(history))

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("fails here")

    whole, first, again = (model_of(run_eagerly=True) for _ in range(3))
    given = {"x": x[:32], "y": y[:32], "batch_size": BATCH, "epochs": 4, "verbose": 0}
    rr.fit(whole, **given)
    try:
        rr.fit(first, **given, callbacks=Fails(), backup_dir=folder)
    except RuntimeError:
        history = rr.fit(again, **given, backup_dir=folder)
    say(
        "backup",
        epochs=history.epoch,
        digest=digest(again.get_weights()),
        undisturbed=digest(whole.get_weights()),
    )


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
        for _ in range(5):
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
    ours = ("DataWarning", "WeightsWarning", "ParityWarning")
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
    layers = keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5, name="drop")
    model = model_of(*layers, run_eagerly=True)
    warned("parity", lambda: [rr.fit(model, x, y, verbose=0) for _ in range(2)])
    model = model_of(rr.SyncBatchNormalization(), run_eagerly=True)
    warned("no parity", lambda: rr.fit(model, x, y, verbose=0))
    frozen = keras.layers.Dense(4, name="frozen", trainable=False)
    model = model_of(frozen)
    frozen.kernel.assign_add(np.full((4, 4), comm.rank, "float32"))
    warned("frozen", lambda: rr.fit(model, x, y, verbose=0))
    one = np.full((1,), 3.0, "float32")
    adapted = keras.layers.Normalization(name="adapted")
    adapted.adapt(x + comm.rank * one)
    warned("adapted", lambda: rr.fit(model_of(adapted), x, y, verbose=0))
    table = Table(name="table")
    table.rows = np.full(3, comm.rank)
    warned("table", lambda: rr.fit(model_of(table), x, y, verbose=0))


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
    refused("wrong share", x, y, batch_share="mesured")
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
    forms("uneven ", 33)
    if comm.size != 2:
        forms("", 45)
    weights_and_splits()
    compiled()
    own_steps()
    shuffled()
    shares()
    with tempfile.TemporaryDirectory() as folder:
        callbacks(folder)
    with tempfile.TemporaryDirectory() as folder:
        saved(folder)
    warnings_of_differences()
    refusals()
    different_arrays()


main()
