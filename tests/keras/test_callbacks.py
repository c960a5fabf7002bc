"""Callbacks in training on rings of processes; test_callback_parts.py needs no training.

Numbers are small fractions with a power of two below, so that sums are exact and the results of
one process can be compared with ``==``.
"""

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce import ConfigError
from ringreduce.keras.callbacks.together import StopTogether
from tests.programs.shared import built, digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SGD = keras.optimizers.SGD
LambdaCallback, Together = keras.callbacks.LambdaCallback, rr.callbacks.Together
several_ranks = pytest.mark.parametrize("size", [2, in_full(3)])


def on_2_and_3(function):
    return several_ranks(on_ranks()(function))


def line_model(rate, kernel=0.0, *, distributed=True, metrics=(), run_eagerly=True):
    """Prediction = kernel * input; eager, since tracing takes longer than its few steps."""
    start = keras.initializers.Constant(kernel)
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer=start)
    model = keras.Sequential([keras.Input((1,)), layer])
    optimizer = rr.DistributedOptimizer(SGD(rate)) if distributed else SGD(rate)
    model.compile(optimizer, "mse", metrics=list(metrics), run_eagerly=run_eagerly)
    return model if metrics else built(model)


def fit(model, x, y=None, *callbacks, **options):
    """Train on columns of numbers."""
    x, y = column(*x), column(*(x if y is None else y))
    return model.fit(x, y, verbose=0, callbacks=list(callbacks), **options)


def column(*values):
    return np.array(values, "float32").reshape(-1, 1)


def scores(rank):
    """Predictions 0, 1/4, ... 1 and labels 0 or 1 of one rank; other ranks have more or fewer."""
    rng = np.random.default_rng(rank)
    count = 4 << rank
    return rng.integers(0, 5, (count, 1)).astype("float32") / 4, rng.integers(0, 2, (count, 1))


def measures():
    return ["mae", keras.metrics.AUC(num_thresholds=8, name="auc")]


@on_2_and_3
def test_logs_are_those_of_one_process_on_all_data():
    """Rank r trains on two batches of 2 << r rows; rank 0 has nothing to validate."""
    every, ours = [scores(rank) for rank in range(rr.size())], scores(rr.rank())
    held = [[part[:0] for part in every[0]], *(scores(2 + rank) for rank in range(1, rr.size()))]
    model, last = line_model(0.0, 1.0, metrics=measures()), {}
    callbacks = Together([LambdaCallback(on_train_end=lambda logs: last.update(logs))])
    options = {"epochs": 2, "verbose": 0, "validation_data": tuple(held[rr.rank()])}
    history = model.fit(*ours, 2 << rr.rank(), callbacks=callbacks, **options).history
    alone = line_model(0.0, 1.0, distributed=False, metrics=measures())

    def evaluated(*parts):
        data = map(np.concatenate, zip(*parts, strict=True))
        return alone.evaluate(*data, batch_size=8, verbose=0, return_dict=True)

    expected = evaluated(*every)
    expected.update({f"val_{name}": value for name, value in evaluated(*held).items()})
    assert len(expected) == 6
    assert history == {name: [value] * 2 for name, value in expected.items()}
    assert last == expected
    # The state that the metrics of this rank are left with is that of its own last data.
    if rr.rank():
        evaluated(held[rr.rank()])
        assert digest(model.metrics_variables) == digest(alone.metrics_variables)


@on_2_and_3
def test_early_stopping_and_plateaus_are_those_of_one_process_on_all_data():
    """By its own val_loss rank 0 would stop at once and the last rank never."""
    targets = [8 * rank / (rr.size() - 1) for rank in range(rr.size())]

    def trained(model, held, wrap):
        early = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
        callbacks = [early, keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)]
        data = column(*[1] * len(held)), column(*held)
        history = fit(model, (1, 1), (8, 8), *wrap(callbacks), validation_data=data, epochs=40)
        return history.epoch, history.history, model.get_weights()[0].tolist()

    model = line_model(0.0625)
    epochs, history, weights = trained(model, [targets[rr.rank()]], lambda own: [Together(own)])
    alone = line_model(0.0625, distributed=False)
    expected_epochs, expected, expected_weights = trained(alone, targets, list)
    assert (epochs, weights) == (expected_epochs, expected_weights)
    assert history["learning_rate"] == expected["learning_rate"]
    assert 4 < len(epochs) < 40
    assert float(model.optimizer.learning_rate) < history["learning_rate"][0]
    return history["val_loss"]


class Record(keras.callbacks.Callback):
    """Remembers batches, losses and with what the first epoch begins."""

    def __init__(self):
        super().__init__()
        self.batches, self.losses, self.start = [], [], None

    def on_epoch_begin(self, epoch, logs=None):
        self.start = self.start or (epoch, state_of(self.model))

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.losses.append(logs["loss"])


def state_of(model):
    return [v.numpy().tolist() for v in (*model.weights, *model.optimizer.variables)]


@on_2_and_3
def test_a_loss_that_is_nan_on_one_rank_stops_all_after_that_batch():
    is_last = rr.rank() == rr.size() - 1
    targets = [1.0, 1.0, np.nan if is_last else 1.0, *[1.0] * 5]
    record, stop = Record(), Together(keras.callbacks.TerminateOnNaN())
    options = {"batch_size": 1, "epochs": 3, "shuffle": False}
    history = fit(line_model(0.125), [1.0] * 8, targets, record, stop, **options)
    assert record.batches == [0, 1, 2]
    assert history.epoch == [0]
    assert np.isnan(history.history["loss"]).all()
    assert np.isfinite(record.losses).all() != is_last


def stopping(model, hook, at):
    """A callback that stops training on rank 1, in one hook."""

    def stop(number, logs=None):
        model.stop_training |= rr.rank() == 1 and number == at

    return LambdaCallback(**{hook: stop})


@on_2_and_3
def test_a_rank_that_stops_takes_all_with_it():
    """`StopTogether` alone; the callback of one rank stops training in its second batch."""
    model, record = line_model(0.125), Record()
    callbacks = stopping(model, "on_train_batch_end", 1), StopTogether(), record
    fit(model, range(5), None, *callbacks, batch_size=1)
    assert record.batches == [0, 1]


@on_2_and_3
def test_ranks_stop_and_call_alike_whoever_looks_at_batches():
    """`rr.fit`, with callbacks of one rank that look at each batch, or at epochs alone."""
    model = line_model(0.125, run_eagerly=False)
    ones = column(*[1] * 8 * rr.size())
    data = tf.data.Dataset.from_tensor_slices((ones, ones)).batch(rr.size())

    def steps(*callbacks):
        before = int(model.optimizer.iterations.numpy())
        rr.fit(model, data, epochs=3, verbose=0, callbacks=list(callbacks))
        return int(model.optimizer.iterations.numpy()) - before

    def calls(data):
        before = rr.init().statistics().collectives
        rr.fit(model, data, verbose=0)
        return rr.init().statistics().collectives - before

    looks = Record()
    assert steps(*[rr.callbacks.OnRankZero(looks)] * (rr.rank() == 0)) == 24
    assert looks.batches == (list(range(8)) * 3 if rr.rank() == 0 else [])
    # As in one process: after the first batch, the epoch, the third batch.
    stops = ("on_epoch_begin", 1), ("on_epoch_end", 1), ("on_train_batch_end", 2)
    assert [steps(stopping(model, *when)) for when in stops] == [9, 16, 3]
    # Sixteen steps more, each with one bucket of gradients and nothing else.
    assert -calls(data) + calls(data.repeat(3)) == 16


def deep_model(seed):
    keras.utils.set_random_seed(seed)
    middle = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    layers = [keras.layers.Dense(3), *middle, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(rr.DistributedOptimizer(SGD(0.0625, momentum=0.5)), "mse", run_eagerly=True)
    return model


class Interruption(Exception):
    """Ends training on all ranks."""


def restored(folder):
    """Interrupt after two epochs, and restore as in new processes, with each rank's own weights."""
    folder /= f"rank{rr.rank()}"
    rng = np.random.default_rng(rr.rank())
    data = rng.normal(size=(8, 2)), rng.normal(size=(8, 1))
    options = {"batch_size": 4, "epochs": 3, "verbose": 0}

    def interrupt(epoch, logs):
        if epoch == 2:
            raise Interruption

    first, second, record = deep_model(rr.rank()), deep_model(100 + rr.rank()), Record()
    backup, stop = keras.callbacks.BackupAndRestore(folder), LambdaCallback(interrupt)
    with contextlib.suppress(Interruption):
        first.fit(*data, callbacks=[Together([backup, stop])], **options)
    assert folder.exists() == (rr.rank() == 0)
    seeds = [v.numpy().tolist() for v in second.variables if "seed" in v.path]
    backup = keras.callbacks.BackupAndRestore(folder)
    history = second.fit(*data, callbacks=[Together([backup]), record], **options)
    rr.verify_replicas([*second.trainable_variables, *second.optimizer.variables])
    assert history.epoch == [0, 1, 2]  # Those before are known by the backup.
    assert not folder.exists()  # Deleted at the end, as Keras does it.
    return state_of(first), record.start, str(seeds)


@several_ranks
def test_a_backup_on_rank_0_is_restored_on_all(ranks, size, tmp_path):
    left, starts, seeds = zip(*ranks(size, restored, tmp_path), strict=True)
    assert starts == ((2, left[0]),) * size
    # Normalization had seen other data there, so this was copied and not merely equal.
    assert left[1] != left[0]
    # What random generators draw must stay each rank's own.
    assert len(set(seeds)) == size


@on_2_and_3
def test_a_backup_for_a_model_that_is_not_built_is_an_error_on_all(tmp_path):
    """The other ranks have left out what acts on rank 0 only."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer=rr.DistributedOptimizer(SGD(0.1)), loss="mse")
    own = [keras.callbacks.BackupAndRestore(tmp_path / "backup")] if rr.rank() == 0 else []
    with pytest.raises(ConfigError, match=r"the model is built on 0 ranks[^@]*keras\.Input"):
        fit(model, [1], None, Together(own))


@on_2_and_3
def test_only_rank_0_writes_files(tmp_path):
    folder = tmp_path / f"rank{rr.rank()}"
    folder.mkdir()
    own = LambdaCallback(on_epoch_end=lambda *_: (folder / "own.txt").write_text("written"))
    writers = [
        keras.callbacks.ModelCheckpoint(folder / "model.keras"),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        rr.callbacks.OnRankZero(own),
    ]
    fit(line_model(0.125), [1], [rr.rank()], Together(writers), epochs=2)
    files = sorted(path.name for path in folder.iterdir())
    assert files == (["log.csv", "model.keras", "own.txt"] if rr.rank() == 0 else [])
    if rr.rank() == 0:
        # The mean over ranks of targets 0, 1, ... squared: averaged before it was written.
        loss = float((folder / "log.csv").read_text().splitlines()[1].split(",")[1])
        assert loss == np.float32(np.mean(np.arange(rr.size()) ** 2))


@on_2_and_3
def test_learning_rates_that_differ_become_rank_0s():
    model, rate = line_model(0.125), 2.0 ** -rr.rank()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.25)
    own = LambdaCallback(on_epoch_end=lambda *_: model.optimizer.learning_rate.assign(rate))
    fit(model, [1], None, Together([schedule, own]))
    assert float(model.optimizer.learning_rate) == 1.0


@on_2_and_3
def test_the_learning_rate_is_warmed_up():
    """From half the rate of one rank, 0.5, to `size` times it, over 4 batches of 2 epochs."""
    size = rr.size()
    model, rates = line_model(0.5), []
    record = LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.5 * size, warmup_epochs=2, verbose=1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        fit(model, [1, 1], None, Together([warmup, record]), batch_size=1, epochs=3)
    expected = [0.5 * (1 + done / 4 * (size - 1)) for done in (1, 2, 3, 4, 4, 4)]
    assert rates == [pytest.approx(rate, rel=1e-6) for rate in expected]
    assert rates[-1] == 0.5 * size
    text = f"Epoch 2: learning rate warmed up to {0.5 * size:g}."
    assert printed.getvalue().splitlines().count(text) == (rr.rank() == 0)


@on_2_and_3
def test_all_begin_with_the_roots_weights():
    root, record, model = rr.size() - 1, Record(), deep_model(200 + rr.rank())
    model.layers[1].moving_mean.assign([float(rr.rank())] * 3)
    mine = [weight.tolist() for weight in model.get_weights()[:2]]
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root), record]
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=callbacks)
    _, state = record.start
    assert (state[:2] == mine) == (rr.rank() == root)
    assert state[4] == [float(root)] * 3
    return state


@on_2_and_3
def test_weights_that_come_with_the_first_batch_are_copied_after_it():
    keras.utils.set_random_seed(300 + rr.rank())
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(rr.DistributedOptimizer(SGD(0.0)), "mse", run_eagerly=True)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    inputs = np.full((2, 3), rr.rank() + 1.0)
    model.fit(inputs, np.ones((2, 1)), verbose=0, callbacks=callbacks)
    return digest(model.get_weights())


@on_2_and_3
def test_a_model_is_evaluated_with_the_moving_averages_of_rank_0():
    """And keeps its own."""
    keras.utils.set_random_seed(3)
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    rows = np.arange(21, dtype="float32").reshape(7, 3)
    norm.moving_mean.assign(np.zeros(3))
    loss, outputs = model.evaluate(rows, rows[:, :1], verbose=0), model.predict(rows, verbose=0)
    norm.moving_mean.assign(np.full(3, rr.rank()))
    assert rr.evaluate(model, rows, rows[:, :1]) == pytest.approx(loss, rel=1e-6)
    assert np.abs(rr.predict(model, rows) - outputs).max() < 1e-6
    assert norm.moving_mean.numpy().tolist() == [rr.rank()] * 3
