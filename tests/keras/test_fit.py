"""`rr.fit` on data of every form: what it trains to, on how many ranks, and what it refuses.

Steps are eager on 2 ranks, since tracing takes longer, but for some; on 3 they are graphs. What
must come out is computed beside it, by plain Keras on the whole data with the same batches.
"""

import contextlib
import functools
import io
import logging.handlers
import os
import re
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
from ringreduce import ConfigError, MismatchError
from tests.models import model_of_ranks
from tests.programs.shared import built, difference, digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

BATCH, EPOCHS = 16, 2
SGD, Dense = keras.optimizers.SGD, keras.layers.Dense


@functools.cache
def arrays(count):
    inputs = np.random.default_rng(0).integers(-4, 5, (count, 4)).astype("float32")
    return inputs, inputs[:, :2] ** 2


# The last batch has fewer rows than there are ranks.
X, Y = arrays(33)
ARRAYS = {"x": X, "y": Y, "batch_size": BATCH}


class Batches(keras.utils.PyDataset):
    def __init__(self, *parts, **options):
        super().__init__(**options)
        self.parts = parts

    def __len__(self):
        return -(-len(self.parts[0]) // BATCH)

    def __getitem__(self, index):
        return tuple(part[index * BATCH : (index + 1) * BATCH] for part in self.parts)


def make_model(*layers, optimizer=None, **options):
    keras.utils.set_random_seed(5)
    layers = layers or (Dense(6, activation="tanh"),)
    optimizer = optimizer or rr.DistributedOptimizer(SGD(0.01))
    return model_of_ranks(optimizer, *layers, **options)


def make_plain(*layers, optimizer=None):
    """The same of plain Keras; its few steps take less time than tracing them."""
    optimizer = optimizer or SGD(0.01)
    return make_model(*layers, optimizer=optimizer, is_built=False, run_eagerly=True)


def fit(model, **options):
    """Train from rank 0's weights; return the history."""
    for variable in model.trainable_variables:
        variable.assign_add(np.full(variable.shape, rr.rank()))
    return rr.fit(model, **options, epochs=EPOCHS, verbose=0).history


def weighted_classes():
    x = arrays(45)[0]
    classes = (x[:, :1] > 1).astype("int32")
    y = np.concatenate([classes, 1 - classes], 1).astype("float32")
    return {"x": x, "y": y, "validation_split": 0.3, "class_weight": {0: 1.0, 1: 5.0}}


VALIDATED = {"validation_data": arrays(37)}
WEIGHTED = {"sample_weight": np.arange(33.0) % 3}
SHARES = 3, 1.0, 2  # Of each batch, by rank.


@pytest.mark.parametrize(
    ("size", "data", "shares", "options"),
    [
        (2, VALIDATED, None, {"is_built": False}),
        (2, weighted_classes(), None, {"run_eagerly": False}),
        (2, WEIGHTED, SHARES, {}),
        in_full(3, VALIDATED, None, {"is_built": False}),
        in_full(3, weighted_classes(), None, {}),
        in_full(3, WEIGHTED, SHARES, {}),
        in_full(3, WEIGHTED, SHARES, {"jit_compile": True}),
        in_full(3, {}, None, {"run_eagerly": True}),
        in_full(3, {}, None, {"jit_compile": True}),
    ],
)
@on_ranks()
def test_it_trains_as_one_process_does(data, shares, options):
    data = {**ARRAYS, **data}
    model, plain = make_model(**options), make_plain()
    start = plain.get_weights()
    share = {} if shares is None else {"batch_share": shares[rr.rank()]}
    history = fit(model, **data, **share, shuffle=False)
    if rr.rank() == 0:
        expected = plain.fit(**data, shuffle=False, epochs=EPOCHS, verbose=0).history
        assert difference(model, plain) < 2e-6
        pairs = zip(plain.get_weights(), start, strict=True)
        assert max(np.abs(end - begin).max() for end, begin in pairs) > 0.1
        assert history.keys() == expected.keys()
        for name, values in expected.items():
            assert history[name] == pytest.approx(values, rel=1e-5)
    return digest(model.get_weights()), history


@pytest.mark.parametrize(
    ("size", "options"), [(2, {}), in_full(3, {}), in_full(3, {"steps_per_execution": 2})]
)
@on_ranks()
def test_single_samples_and_several_steps_give_the_same_bits(options):
    samples = {"x": tf.data.Dataset.from_tensor_slices((X, Y)), "batch_size": BATCH}
    data = {**ARRAYS, "shuffle": False} if options else samples
    one, other = make_model(), make_model(**options)
    expected, history = fit(one, **ARRAYS, shuffle=False), fit(other, **data)
    assert digest(one.get_weights()) == digest(other.get_weights())
    for name, values in history.items():
        assert values == pytest.approx(expected[name], rel=1e-5)
    return digest(other.get_weights()), history


# Ranks of their own, since it cannot be turned off.
@pytest.mark.full
@on_ranks(2, DETERMINISTIC="1")
def test_nothing_of_ours_is_refused_where_tensorflow_is_to_be_deterministic():
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(5)
    options = {"epochs": 2, "verbose": 0, "shuffle": False}

    def compiled(**how):
        return make_model(optimizer=rr.DistributedOptimizer(SGD(0.01), **how), run_eagerly=False)

    model = compiled(shard_state=True)
    rr.fit(model, **ARRAYS, validation_data=(X, Y), **options)
    assert int(model.optimizer.iterations) == 6
    own = tf.data.Dataset.from_tensor_slices((X, Y)).shard(2, rr.rank()).batch(8)
    rr.fit(compiled(), own.filter(lambda *_: True), per_rank_data=True, **options)
    rr.evaluate(model, X, Y)
    rr.predict(model, X)
    optimizer = rr.DistributedOptimizer(SGD(0.01))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    for x, y in rr.shard(tf.data.Dataset.from_tensor_slices((X, Y))).batch(8):
        step(x, y)
    return digest(model.get_weights())


class Own(keras.Model):
    """Its loss is in its own step, or in `compute_loss`; compile() gets none."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen, self.factor = Dense(2), [], None

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


@pytest.mark.parametrize(
    ("size", "kind", "is_eager", "callbacks", "calls"),
    [
        (2, OwnLoss, False, [], 6),
        in_full(3, OwnLoss, False, [], 6),
        in_full(3, Own, False, [], 0),
        in_full(3, Own, False, [SetsFactor], 0),
        in_full(3, Own, True, [], 6),
    ],
)
@on_ranks()
def test_what_a_user_has_written_runs_in_training_alone(kind, is_eager, callbacks, calls):
    """A model that is built by a step with made-up data is called more often than for 6 steps."""
    options = {**ARRAYS, "shuffle": False, "epochs": EPOCHS, "verbose": 0}
    keras.utils.set_random_seed(5)
    model = kind()
    model.compile(rr.DistributedOptimizer(SGD(0.01)), run_eagerly=is_eager)
    history = rr.fit(model, **options, callbacks=[make() for make in callbacks]).history
    assert [type(value) for value in model.seen] == [float] * calls
    if rr.rank() == 0:
        keras.utils.set_random_seed(5)
        plain = kind()
        plain.compile(SGD(0.01), run_eagerly=True)
        plain(X)
        built(plain).fit(**options, callbacks=[make() for make in callbacks])
        assert difference(model, plain) < 2e-6
    return digest(model.get_weights()), history


@pytest.mark.parametrize(("size", "is_array"), [(2, True), in_full(3, True), in_full(3, False)])
@on_ranks()
def test_shuffling_is_that_of_one_process_and_follows_from_the_seed(is_array):
    """Steps are eager, since the order is made outside of them."""
    x, y = arrays(45)
    data = {"x": x, "y": y, "batch_size": BATCH} if is_array else {"x": Batches(x, y)}
    options = {**data, "epochs": EPOCHS, "verbose": 0}
    model, other = (make_model(run_eagerly=True) for _ in range(2))
    history = rr.fit(model, **options).history
    rr.fit(other, **options, seed=1)
    assert difference(model, other) > 1e-3
    if rr.rank() == 0:
        with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as alone:
            single = make_plain(optimizer=rr.DistributedOptimizer(SGD(0.01), alone))
            rr.fit(single, **options, communicator=alone)
            assert difference(model, single) < 2e-6
    return digest(model.get_weights()), history


@pytest.mark.parametrize("size", [2, in_full(3)])
@on_ranks()
def test_unequal_shares_train_exactly_as_one_process_does():
    """Each mean over 12, 4, 8 or 16 rows is a whole number, as all that follows from it."""
    x = 48 * np.random.default_rng(1).integers(1, 9, (64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), Dense(1, use_bias=False)])
    model.set_weights([np.arange(4, dtype="float32")[:, None]])
    optimizer = rr.DistributedOptimizer(SGD(1.0))
    model.compile(optimizer, loss=lambda _, values: values, run_eagerly=rr.size() == 2)
    share = (3, 1, 1)[rr.rank()]
    rr.fit(model, x, x[:, :1], BATCH, verbose=0, shuffle=False, batch_share=share)
    assert (model.get_weights()[0].ravel() == np.arange(4) - x.mean(0) * 4).all()


class Lengths(keras.layers.Layer):
    """Keeps the lengths of the batches that it is trained with."""

    def build(self, shape):
        self.seen = []

    def call(self, inputs, training=False):
        if training:
            self.seen.append(len(inputs))
        return inputs


def measured_shares():
    """Return the lengths of this rank's batches, and the lines that say its shares."""

    def work(batch, logs):
        until = time.monotonic() + 0.06 * rr.rank()
        while time.monotonic() < until:
            pass

    slow = keras.callbacks.LambdaCallback(on_train_batch_begin=work)
    (x, y), lengths = arrays(160), Lengths()
    model = make_model(lengths, run_eagerly=True)
    options = {"x": x, "y": y, "batch_size": BATCH, "epochs": 2, "shuffle": False}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        rr.fit(model, **options, verbose=2, batch_share="measured", callbacks=[slow])
    if rr.rank() == 0:
        plain = make_plain(keras.layers.Identity())
        plain.fit(**options, verbose=0)
        assert difference(model, plain) < 2e-6
    return [*lengths.seen], [line for line in printed.getvalue().splitlines() if "share" in line]


def test_a_slow_rank_gets_less_of_each_batch_once_that_is_measured(ranks):
    (fast, lines), (slow, others) = ranks(2, measured_shares)
    assert [sum(rows) for rows in zip(fast, slow, strict=True)] == [16] * 20
    assert fast[:10] == [8] * 10
    assert fast[-1] > 8
    shares = f"rank 0 {fast[-1]}, rank 1 {slow[-1]} of 16"
    assert (lines, others) == ([f"batch shares measured over 8 steps: {shares}"], [])


@on_ranks(2)
def test_a_file_that_all_ranks_save_is_whole_and_ranks_other_than_0_are_told(tmp_path):
    model = make_model(Dense(500))
    rr.fit(model, *arrays(93), verbose=0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            rr.init().barrier()
            model.save(tmp_path / "model.keras")
            rr.init().barrier()
            keras.models.load_model(tmp_path / "model.keras")  # Raises where it is broken.
    texts = [str(warning.message) for warning in found if "saves" in str(warning.message)]
    assert len(texts) == rr.rank()
    assert all("rr.on_rank_zero(lambda: model.save(...))" in text for text in texts)
    assert os.listdir(tmp_path) == ["model.keras"]


def check_warning(action, *texts):
    """Check that rank 0, and no other, has one warning, at a line of this file."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        action()
    ours = [w for w in found if w.category.__name__ in ("DataWarning", "ParityWarning")]
    assert len(ours) == (rr.rank() == 0 and bool(texts)), [w.message for w in ours]
    for warning in ours:
        assert all(text in str(warning.message) for text in texts), warning.message
        assert warning.filename == __file__
        return str(warning.message)


class Table(keras.layers.Layer):
    """Saves something that is no variable."""

    def call(self, inputs):
        return inputs

    def save_own_variables(self, store):
        store["rows"] = self.rows


@on_ranks(2)
def test_what_is_likely_a_mistake_gets_one_warning_at_the_users_line():
    x, y = arrays(16)
    norm, alike = keras.layers.BatchNormalization(name="norm"), rr.SyncBatchNormalization()
    model = make_model(norm, alike, keras.layers.Dropout(0.5, name="drop"))
    text = check_warning(
        lambda: [rr.fit(model, x, y, verbose=0) for _ in range(2)],
        *("norm: each rank normalizes", "drop: each rank draws"),
    )
    assert "sync_batch" not in (text or "")
    frozen, table = Dense(4, name="frozen", trainable=False), Table(name="table")
    adapted = keras.layers.Normalization(name="adapted")
    adapted.adapt(x + rr.rank() * np.full((1,), 3.0, "float32"))
    # In a graph: eagerly the first step has changed some of them.
    model = make_model(frozen, adapted, table, run_eagerly=False)
    frozen.kernel.assign_add(np.full((4, 4), rr.rank(), "float32"))
    table.rows = np.full(3, rr.rank())
    check_warning(
        lambda: rr.fit(model, x, y, verbose=0),
        *("/frozen/kernel, ", "adapted/mean, what table saves, ", "goes on with its own"),
        *("rr.broadcast_variables(model.variables)", "Normalization.adapt"),
    )


# On ranks of its own, in which nothing has been divided before.
@on_ranks(2, RINGREDUCE_TEST_RING="data that are not divided")
def test_data_that_nothing_has_divided_are_told_once():
    x, y = arrays(93)
    told = "nothing has divided the data", "rr.fit(model, ...)", "rr.shard(data)"
    check_warning(lambda: make_model().fit(x, y, verbose=0), *told)
    check_warning(lambda: make_model().fit(x, y, verbose=0))


def log_of_training(rows):
    """Train on this rank's rows; return the texts that are logged."""
    heard, logger = logging.handlers.BufferingHandler(99), logging.getLogger("ringreduce")
    logger.addHandler(heard)
    options = {"epochs": 2, "verbose": 0, "callbacks": [rr.callbacks.Together([])]}
    make_model().fit(rows, rows[:, :2] ** 2, **options)
    logger.removeHandler(heard)
    return [record.getMessage() for record in heard.buffer]


@pytest.mark.full
@on_ranks(2)
def test_ranks_that_train_on_the_same_rows_are_told_so(tmp_path):
    x = arrays(93)[0]
    data = rr.shard(tf.data.Dataset.from_tensor_slices(x[:92])).cache(str(tmp_path / "rows"))
    for rank in range(rr.size()):  # One fills the file, of which the other reads.
        if rank == rr.rank():
            cached = np.stack(list(data))
        rr.init().barrier()
    for rows in (x[::2], cached):
        texts = log_of_training(rows)
        assert len(texts) == (rr.rank() == 0)
        assert all("ranks 0, 1 have trained on the same rows" in text for text in texts)
        assert all('.cache(f"name-{rr.rank()}")' in text for text in texts)
    assert not log_of_training(x[rr.rank() :: 2])
    assert not log_of_training(x[::2] * np.nan)


@on_ranks(2)
def test_what_cannot_be_divided_is_refused_on_all_ranks():
    whole, data = make_model(), tf.data.Dataset.from_tensor_slices((X, Y))
    pipeline = type("Pipeline", (), {"fit": print})()  # The real one takes long to make.

    def refused(text, *given, model=whole, **options):
        with pytest.raises(ConfigError, match=re.escape(text)):
            rr.fit(model, *given, verbose=0, **options)

    refused("cannot share out list among ranks. Pass arrays", [1.0, 2.0], [1.0, 2.0])
    refused("got no data. Pass arrays with a row for each sample")
    refused("got a batch that begins with array(1.). Yield arrays.", iter([(1.0, 2.0)]))
    split = {"validation_split": 0.99999}
    refused("cannot take a validation_split of _BatchDataset", data.batch(4), **split)
    refused("cannot split 33 samples", X, Y, **split)
    refused("global batch of 1 samples, fewer than", X, Y, batch_size=1)
    refused("global batch of 1 samples, fewer than", Batches(X[:1], Y[:1]))
    refused("dataset of single samples", data)
    refused("endless tf.data.Dataset", data.batch(4).repeat())
    refused("arrays of [32, 33] rows", X, Y[:-1])
    refused("class_weight and sample_weight", X, Y, class_weight={0: 1}, sample_weight=Y[:, 0])
    refused("got y or sample_weight beside", data.batch(4), Y)
    text = "got batch_share with per_rank_data=True. Pass a tf.data.Dataset"
    refused(text, data.batch(4), per_rank_data=True, batch_share=2.0)
    refused("DistributedOptimizer(keras.optimizers.SGD(...))", X, Y, model=make_plain())
    refused("no compiled model", X, Y, model=keras.Sequential([Dense(2)]))
    refused("Call its own fit: pipeline.fit(...).", X, Y, model=pipeline)


class Broken(Batches):
    def __getitem__(self, index):
        if index == 2:
            raise KeyError("no such file")
        return super().__getitem__(index)


@on_ranks(2)
def test_an_error_in_the_users_data_is_raised_as_it_was():
    with pytest.raises(KeyError, match="'no such file'"):
        rr.fit(make_model(), Broken(*arrays(93)), shuffle=False, verbose=0)


@on_ranks(2)
def test_different_arrays_end_the_job():
    with pytest.raises(MismatchError, match="rank 1 has other values than rank 0"):
        rr.fit(make_model(), X + rr.rank(), Y, verbose=0)


@on_ranks(2)
def test_different_arrays_are_told_also_where_the_model_cannot_take_those_of_one_rank():
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.layers.Reshape(X.shape[1:]), Dense(1)])
    model.compile(rr.DistributedOptimizer(SGD(0.01)), "mse")
    x = np.concatenate([X, X], 1) if rr.rank() else X
    with pytest.raises(MismatchError, match=r"rank 0 has float32 .*, rank 1 float32 \("):
        rr.fit(model, x, Y[:, :1], verbose=0)


@on_ranks(2)
def test_different_arguments_are_told_also_where_they_do_not_go_with_the_data_of_one_rank():
    samples = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(MismatchError, match="batch_size"):
        rr.fit(make_model(), samples, batch_size=BATCH if rr.rank() else None, verbose=0)


class Growing(keras.utils.PyDataset):
    """Batches of sequences, each longer than the one before."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.ones((8, 3 + index, 2), "float32"), np.ones((8, 1), "float32")


@on_ranks(2)
def test_a_model_is_built_for_batches_of_several_shapes():
    model = keras.Sequential([keras.layers.GlobalAveragePooling1D(), Dense(1)])
    model.compile(rr.DistributedOptimizer(SGD(0.01)), "mse")
    rr.fit(model, Growing(), verbose=0)
    assert model.input_shape == (None, None, 2)
