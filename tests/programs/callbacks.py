"""Callbacks and distributed evaluation in real training; each case prints one line of JSON.

The argument is a folder, the same on all ranks. Numbers are small fractions with a power of
two below, so that sums are exact and the results of one process can be compared with ``==``.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from shared import built, keep_graphs, say

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce import RingReduceError
from ringreduce.keras.callbacks.together import StopTogether

keep_graphs()
comm = rr.init()
FOLDER = Path(sys.argv[1]) / f"rank{comm.rank}"


def line_model(rate, kernel=0.0, *, distributed=True, metrics=(), run_eagerly=True):
    """Prediction = kernel * input; eager, since tracing takes longer than its few steps."""
    start = keras.initializers.Constant(kernel)
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=start)]
    )
    optimizer = keras.optimizers.SGD(rate)
    optimizer = rr.DistributedOptimizer(optimizer) if distributed else optimizer
    model.compile(optimizer, "mse", metrics=list(metrics), run_eagerly=run_eagerly)
    return model if metrics else built(model)


def column(*values):
    return np.array(values, "float32").reshape(-1, 1)


def scores(rank):
    """Predictions 0, 1/4, ... 1 and labels 0 or 1 of one rank; other ranks have more or fewer."""
    rng = np.random.default_rng(rank)
    count = 4 << rank
    return rng.integers(0, 5, (count, 1)).astype("float32") / 4, rng.integers(0, 2, (count, 1))


def measures():
    return ["mae", keras.metrics.AUC(num_thresholds=8, name="auc")]


def averaged_logs():
    """Rank r trains on two batches of 2 << r rows; rank 0 has nothing to validate."""
    ours = scores(comm.rank)
    held = [scores(2 + rank) if rank else (ours[0][:0], ours[1][:0]) for rank in range(comm.size)]
    model = line_model(0.0, 1.0, metrics=measures())
    last = {}
    end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: last.update(logs))
    history = model.fit(
        *ours,
        batch_size=2 << comm.rank,
        validation_data=held[comm.rank],
        epochs=2,
        verbose=0,
        callbacks=[rr.callbacks.Together([end])],
    )
    own = [v.numpy().tolist() for metric in model.metrics for v in metric.variables]
    alone = line_model(0.0, 1.0, distributed=False, metrics=measures())
    options = {"batch_size": 8, "verbose": 0, "return_dict": True}
    every = [scores(rank) for rank in range(comm.size)]
    expected = alone.evaluate(*map(np.concatenate, zip(*every, strict=True)), **options)
    validated = alone.evaluate(*map(np.concatenate, zip(*held, strict=True)), **options)
    expected.update({f"val_{name}": value for name, value in validated.items()})
    # The state that the metrics of this rank are left with is that of its own last data.
    if comm.rank:
        alone.evaluate(*held[comm.rank], **options)
    kept = [v.numpy().tolist() for metric in alone.metrics for v in metric.variables]
    say(
        "averaged logs",
        logged=history.history,
        expected=expected,
        last=last,
        keeps=own == kept or not comm.rank,
    )


def stopping_and_reducing():
    """By its own val_loss rank 0 would stop at once and the last rank never."""
    model = line_model(0.0625)
    target = 8 * comm.rank / (comm.size - 1)
    callbacks = [
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5),
    ]
    options = {"epochs": 40, "verbose": 0}
    train = column(1, 1), column(8, 8)
    history = model.fit(
        *train,
        validation_data=(column(1), column(target)),
        callbacks=[rr.callbacks.Together(callbacks)],
        **options,
    )
    targets = [8 * rank / (comm.size - 1) for rank in range(comm.size)]
    plain = [
        keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5),
    ]

    def alone():
        model = line_model(0.0625, distributed=False)
        held = column(*[1] * comm.size), column(*targets)
        expected = model.fit(*train, validation_data=held, callbacks=plain, **options)
        rates = expected.history["learning_rate"]
        return expected.epoch, rates, model.get_weights()[0].tolist()

    alone_epochs, alone_rates, alone_weights = rr.on_rank_zero(alone)
    say(
        "stopping",
        epochs=history.epoch,
        rates=history.history["learning_rate"],
        rate=float(model.optimizer.learning_rate),
        losses=history.history["val_loss"],
        weights=model.get_weights()[0].tolist(),
        alone_epochs=alone_epochs,
        alone_rates=alone_rates,
        alone_weights=alone_weights,
    )


class Record(keras.callbacks.Callback):
    """Remembers batches, losses and with what each epoch begins."""

    def __init__(self):
        super().__init__()
        self.batches, self.losses, self.starts = [], [], []

    def on_epoch_begin(self, epoch, logs=None):
        state = [*self.model.weights, *self.model.optimizer.variables]
        self.starts.append((epoch, [np.asarray(v.numpy()).tolist() for v in state]))

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.losses.append(logs["loss"])


def nan_on_one_rank():
    model = line_model(0.125)
    targets = column(*[1.0] * 8)
    if comm.rank == comm.size - 1:
        targets[2] = np.nan
    record = Record()
    history = model.fit(
        column(*[1.0] * 8),
        targets,
        batch_size=1,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[record, rr.callbacks.Together(keras.callbacks.TerminateOnNaN())],
    )
    finite = bool(np.isfinite(record.losses).all())
    logged_nan = bool(np.isnan(history.history["loss"]).all())
    say("nan", batches=record.batches, epochs=history.epoch, finite=finite, logged_nan=logged_nan)


def one_rank_stops():
    """`StopTogether` alone; the callback of one rank stops training in its second batch."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if comm.rank == 1 and batch == 1:
                self.model.stop_training = True

    model, record = line_model(0.125), Record()
    model.fit(
        column(*range(5)),
        column(*range(5)),
        batch_size=1,
        verbose=0,
        callbacks=[Stop(), StopTogether(), record],
    )
    say("one rank stops", batches=record.batches)


def several_steps_in_a_call():
    """`rr.fit` with callbacks of one rank that look at each batch, or at epochs alone."""

    class Looks(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batches = []

        def on_train_batch_end(self, batch, logs=None):
            self.batches.append(batch)

    def stops(hook, at):
        def stop(number, logs=None):
            model.stop_training |= comm.rank == 1 and number == at

        callback = keras.callbacks.Callback()
        setattr(callback, hook, stop)
        return callback

    model = line_model(0.125, run_eagerly=False)
    rows = 8 * comm.size
    ones = column(*[1] * rows)
    data = tf.data.Dataset.from_tensor_slices((ones, ones)).batch(comm.size)

    def fit(*callbacks, epochs=3):
        before = int(model.optimizer.iterations.numpy())
        rr.fit(model, data, epochs=epochs, verbose=0, callbacks=list(callbacks))
        return int(model.optimizer.iterations.numpy()) - before

    def calls(epochs):
        before = comm.statistics().collectives
        fit(epochs=epochs)
        return comm.statistics().collectives - before

    looks = Looks()
    on_rank_0 = [rr.callbacks.OnRankZero(looks)] if comm.rank == 0 else []
    found = {"looked": fit(*on_rank_0), "batches": looks.batches}
    for hook, at in (("on_epoch_begin", 1), ("on_epoch_end", 1), ("on_train_batch_end", 2)):
        found[hook] = fit(stops(hook, at))
    one = calls(1)
    data = data.repeat(3)
    found["asked"] = calls(1) - one
    say("several", **found)


def state_of(model):
    return [v.numpy().tolist() for v in (*model.weights, *model.optimizer.variables)]


def deep_model(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.0625, momentum=0.5))
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


class Interruption(Exception):
    """Ends training on all ranks."""


def interrupted_and_restored():
    """Only rank 0 has a backup; normalization layers had seen other data on each rank."""
    rng = np.random.default_rng(comm.rank)
    data = rng.normal(size=(8, 2)), rng.normal(size=(8, 1))
    options = {"batch_size": 4, "epochs": 3, "verbose": 0}

    def interrupt(epoch, logs):
        if epoch == 2:
            raise Interruption

    first = deep_model(comm.rank)
    backup = keras.callbacks.BackupAndRestore(FOLDER / "backup")
    stop = keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)
    try:
        first.fit(*data, callbacks=[rr.callbacks.Together([backup, stop])], **options)
    except Interruption:
        left = state_of(first)
    had_backup = (FOLDER / "backup").exists()
    # As in new processes: nothing is built, and weights are each rank's own.
    second, record = deep_model(100 + comm.rank), Record()
    seeds = [v.numpy().tolist() for v in second.variables if "seed" in v.path]
    backup = keras.callbacks.BackupAndRestore(FOLDER / "backup")
    history = second.fit(*data, callbacks=[rr.callbacks.Together([backup]), record], **options)
    rr.verify_replicas([*second.trainable_variables, *second.optimizer.variables])
    say(
        "restored",
        had_backup=had_backup,
        left=left,
        epochs=history.epoch,
        start=record.starts[0],
        seeds=seeds,
        has_backup=(FOLDER / "backup").exists(),
    )


def unbuilt_with_backup():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    # The other ranks have left out what acts on rank 0 only.
    own = [keras.callbacks.BackupAndRestore(FOLDER / "unbuilt")] if comm.rank == 0 else []
    try:
        model.fit(column(1), column(1), verbose=0, callbacks=[rr.callbacks.Together(own)])
    except RingReduceError as error:
        say("unbuilt", error=type(error).__name__, text=str(error))


class Write(keras.callbacks.Callback):
    """A user's own callback that writes."""

    def on_epoch_end(self, epoch, logs=None):
        (FOLDER / "own.txt").write_text(str(epoch))


def files_of_rank_zero():
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = line_model(0.125)
    writers = [
        keras.callbacks.ModelCheckpoint(FOLDER / "model.keras"),
        keras.callbacks.CSVLogger(FOLDER / "log.csv"),
        rr.callbacks.OnRankZero(Write()),
    ]
    model.fit(
        column(1),
        column(comm.rank),
        epochs=2,
        verbose=0,
        callbacks=[rr.callbacks.Together(writers)],
    )
    log = FOLDER / "log.csv"
    say(
        "files",
        files=sorted(path.name for path in FOLDER.iterdir()),
        log=log.read_text() if log.exists() else "",
    )


def rates_that_differ():
    """Each rank sets its own; rank 0's is kept."""
    model = line_model(0.125)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.25)
    own = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model.optimizer, "learning_rate", 2.0**-comm.rank)
    )
    model.fit(column(1), column(1), verbose=0, callbacks=[rr.callbacks.Together([schedule, own])])
    say("rates", rate=float(model.optimizer.learning_rate))


def warming_up():
    model, rates = line_model(0.5), []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    rate = 0.5 * rr.size()
    warmup = hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2, verbose=1)
    model.fit(
        column(1, 1),
        column(1, 1),
        batch_size=1,
        epochs=3,
        verbose=0,
        callbacks=[rr.callbacks.Together([warmup, record])],
    )
    say("warm-up", rates=rates)


def broadcast_from_the_last_rank():
    root = comm.size - 1
    model, record = deep_model(200 + comm.rank), Record()
    model.layers[1].moving_mean.assign([float(comm.rank)] * 3)
    mine = [w.tolist() for w in model.get_weights()[:2]]
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root), record]
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=callbacks)
    _, start = record.starts[0]
    say("broadcast", mine=mine, start=start, means=start[4])


def broadcast_of_an_unbuilt_model():
    keras.utils.set_random_seed(300 + comm.rank)
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", run_eagerly=True)
    inputs = np.full((2, 3), comm.rank + 1.0)
    model.fit(
        inputs,
        np.ones((2, 1)),
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    say("broadcast unbuilt", weights=[w.tolist() for w in model.get_weights()])


def scored(model, *data, **options):
    """Evaluation by all ranks, and by rank 0 alone."""
    ours = rr.evaluate(model, *data, **options)
    own = {name: options[name] for name in ("steps", "return_dict") if name in options}
    return ours, rr.on_rank_zero(lambda: model.evaluate(*data, batch_size=4, verbose=0, **own))


def evaluation():
    """More and fewer rows than ranks, arrays and datasets, an unbuilt model."""
    pairs = {}
    # Not compiled for metrics that are built: a rank without data has never called them.
    model = line_model(0.0, 1.0, metrics=measures())
    x, y = scores(4)
    pairs["one row"] = scored(model, x[:1], y[:1])
    weights = np.arange(23) % 4
    pairs["weighted, uneven"] = (
        rr.evaluate(model, x[:23], y[:23], weights, batch_size=4),
        rr.on_rank_zero(
            lambda: model.evaluate(x[:23], y[:23], sample_weight=weights, batch_size=4, verbose=0)
        ),
    )
    pairs["steps"] = scored(model, x, y, batch_size=4, steps=2, return_dict=True)
    few, whole = (
        tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(4) for rows in (4, 23)
    )
    pairs["dataset of one batch"] = scored(model, few)
    pairs["unknown dataset"] = scored(model, whole.filter(lambda *_: True))
    say("evaluate", pairs=pairs)


def prediction():
    inputs = keras.Input((3,))
    outputs = {
        "double": keras.layers.Rescaling(2.0)(inputs),
        "parts": [keras.layers.Rescaling(1.0)(inputs), keras.ops.argmax(inputs, axis=-1)],
    }
    model = keras.Model(inputs, outputs)
    model.compile(run_eagerly=True)
    x = np.arange(69, dtype="float32").reshape(23, 3) % 16

    def alike(ours, theirs):
        keras.tree.assert_same_structure(ours, theirs)
        pairs = zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True)
        return all(
            type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and (a == b).all()
            for a, b in pairs
        )

    whole = tf.data.Dataset.from_tensor_slices(x).batch(4)
    one = tf.data.Dataset.from_tensor_slices((x[:3], x[:3])).batch(4)
    alone = model.predict(x, verbose=0)
    same = {
        "one row": alike(rr.predict(model, x[:1]), model.predict(x[:1], verbose=0)),
        "uneven": alike(rr.predict(model, x, batch_size=2), alone),
        "steps": alike(
            rr.predict(model, x, batch_size=5, steps=3),
            model.predict(x, batch_size=5, steps=3, verbose=0),
        ),
        "unknown dataset": alike(rr.predict(model, whole.filter(lambda _: True)), alone),
        "one batch": alike(rr.predict(model, one), model.predict(x[:3], verbose=0)),
    }
    say("predict", same=same)


def averages_that_differ():
    """A model is evaluated with rank 0's moving averages, and keeps its own."""
    keras.utils.set_random_seed(3)
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    rows = np.arange(21, dtype="float32").reshape(7, 3)
    norm.moving_mean.assign(np.zeros(3))
    expected = model.evaluate(rows, rows[:, :1], verbose=0), model.predict(rows, verbose=0)
    norm.moving_mean.assign(np.full(3, comm.rank))
    loss = rr.evaluate(model, rows, rows[:, :1])
    outputs = rr.predict(model, rows)
    say(
        "averages",
        loss=[loss, expected[0]],
        outputs=float(np.abs(outputs - expected[1]).max()),
        kept=norm.moving_mean.numpy().tolist(),
    )


def logs_that_differ():
    """Must come last: it breaks the ring."""
    model = line_model(0.0)
    held = (column(1), column(1)) if comm.rank == 0 else None
    error = ""
    try:
        model.fit(
            column(1),
            column(1),
            validation_data=held,
            verbose=0,
            callbacks=[hvd.callbacks.MetricAverageCallback()],
        )
    except RingReduceError as raised:
        error = type(raised).__name__
        say("names", error=error, text=str(raised))


averaged_logs()
stopping_and_reducing()
nan_on_one_rank()
one_rank_stops()
several_steps_in_a_call()
interrupted_and_restored()
unbuilt_with_backup()
files_of_rank_zero()
rates_that_differ()
warming_up()
broadcast_from_the_last_rank()
broadcast_of_an_unbuilt_model()
evaluation()
prediction()
averages_that_differ()
logs_that_differ()
