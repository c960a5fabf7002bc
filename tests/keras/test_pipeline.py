"""Models in stages train as those of one process do, and no rank waits where something is wrong.

With two or three ranks there is one copy of the model, with four there are two of two stages. Three
stages have one in the middle, which receives and sends both ways. Plain Keras says what is right.
"""

import functools
import itertools
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ConfigError, MismatchError
from tests.programs.shared import digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SGD, Dense, Input = keras.optimizers.SGD, keras.layers.Dense, keras.Input
WIDTH = 4


def on_2_3_and_4(function):
    sizes = pytest.mark.parametrize("size", [in_full(2), 3, in_full(4)])
    return sizes(on_ranks()(function))


def stages():
    return 3 if rr.size() == 3 else 2


def dense(number, **options):
    """The layers of a stage."""
    begin = [Input((WIDTH,))] if number == 0 else []
    end = [Dense(2)] if number == stages() - 1 else []
    return [*begin, Dense(WIDTH, activation="tanh", **options), Dense(WIDTH), *end]


def functions(make=dense, **options):
    return [functools.partial(make, number, **options) for number in range(stages())]


def weights_of(pipeline):
    """Those of all stages."""
    own = [[w.tolist(), w.dtype.name] for w in pipeline.model.get_weights()]
    every = pipeline.chain.all_gather_object(own)
    return [np.array(values, dtype) for stage in every for values, dtype in stage]


def difference(some, others):
    pairs = zip(some, others, strict=True)
    return max(np.abs(np.subtract(one, other, dtype="float64")).max() for one, other in pairs)


def check(train, optimizer, make=dense, micro_batches=4, *, start=None, tolerance=1e-6, **options):
    """Train a pipeline, and plain Keras on one rank for all; return it, and what `train` returned.

    Weights must be equal in the end, and the lists of arrays or numbers that `train` returns.
    """
    keras.utils.set_random_seed(1)
    pipeline = rr.Pipeline(functions(make, **options), micro_batches)
    if start is not None:
        pipeline.model.set_weights(start)
    begin = weights_of(pipeline)

    def alone():
        layers = [function() for function in functions(make, **options)]
        model = keras.Sequential(list(itertools.chain(*layers)))
        model.set_weights(begin)
        # Its few steps take less time than tracing them.
        model.compile(optimizer(), "mse", metrics=["mae"], run_eagerly=True)
        found = [np.asarray(values).tolist() for values in train(model)]
        return found, [weight.tolist() for weight in model.get_weights()]

    found, weights = rr.init().broadcast_object(alone() if rr.rank() == 0 else None)
    pipeline.compile(optimizer(), "mse", metrics=["mae"])
    assert difference([0, *train(pipeline)], [0, *found]) <= tolerance
    ends = weights_of(pipeline)
    assert difference(ends, weights) <= tolerance
    assert all((end != first).any() for end, first in zip(ends, begin, strict=True))
    return pipeline


def data(count=96, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, WIDTH)).astype("float32")
    return x, generator.normal(size=(count, 2)).astype("float32")


@pytest.mark.parametrize(
    ("size", "micro_batches"), [(3, 8), *(in_full(s, n) for s in (2, 4) for n in (1, 2, 8))]
)
@on_ranks()
def test_a_step_is_exactly_that_of_one_process(micro_batches):
    """On small whole numbers, where no sum is rounded."""

    def make(number):
        begin = [Input((WIDTH,))] if number == 0 else []
        return [*begin, Dense(WIDTH, use_bias=False)]

    def train(model):
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        return []

    generator = np.random.default_rng(rr.rank() % stages())
    start = [generator.integers(-1, 2, (WIDTH, WIDTH)).astype("float32")]
    x, y = np.random.default_rng(7).integers(-1, 2, (2, 32, WIDTH)).astype("float32")
    optimizer = functools.partial(SGD, 0.125)
    check(train, optimizer, make, micro_batches, start=start, tolerance=0.0)


@on_2_3_and_4
def test_epochs_are_those_of_one_process():
    """With what users see of them; a last batch that is short."""
    other, seen = data(21, seed=1), []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append({**logs}))
    weights = np.arange(1, 81, dtype="float32") / 40
    options = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}

    def train(model):
        seen.clear()
        given = {"sample_weight": weights, "validation_data": other, "callbacks": [note]}
        history = model.fit(*data(80), **given, **options).history
        assert list(history) == ["loss", "mae", "val_loss", "val_mae"]
        is_plain = isinstance(model, keras.Model)
        evaluated = model.evaluate(*other, batch_size=4, **{"verbose": 0} if is_plain else {})
        predicted = model.predict(other[0], batch_size=4, **{"verbose": 0} if is_plain else {})
        return [*history.values(), evaluated, predicted]

    optimizer = functools.partial(SGD, 0.1, momentum=0.5)
    pipeline = check(train, optimizer, kernel_regularizer=keras.regularizers.L2(0.01))
    # Three batches in each of two epochs, of which the last has half as many rows.
    assert [sorted(logs) for logs in seen] == [["loss", "mae"]] * 6
    assert list(pipeline.evaluate(*other, return_dict=True)) == ["loss", "mae"]
    assert len({*pipeline.replicas.all_gather_object(digest(pipeline.model.weights))}) == 1


@on_2_3_and_4
def test_batches_of_a_dataset_train_a_table():
    """Rows are shuffled alike; ids become vectors; a stage in the middle has no weights."""

    def make(number):
        if number == 0:
            table = keras.layers.Embedding(50, 2)
            return [Input((3,), dtype="int64"), table, keras.layers.Flatten()]
        is_last = number == stages() - 1
        return [Dense(1), Dense(1)] if is_last else [keras.layers.Activation("tanh")]

    generator = np.random.default_rng(1)
    ids = generator.integers(0, 50, (24, 3))
    dataset = tf.data.Dataset.from_tensor_slices((ids, generator.normal(size=(24, 1)))).batch(8)

    def train(model):
        model.fit(dataset.shuffle(5, seed=1), epochs=2, verbose=0)
        return []

    pipeline = check(train, functools.partial(SGD, 0.05), make, 2)
    assert pipeline.predict(dataset).shape == (24, 1)


@pytest.mark.full  # Only 4 ranks have two copies.
@on_ranks(4)
def test_copies_with_unequal_shares_count_by_rows():
    """Batches of 9 and 5 rows."""

    def make(number):
        return [Dense(2)] if number else [Input((2, 2)), keras.layers.Flatten()]

    x, y = data(14)
    dataset = tf.data.Dataset.from_tensor_slices((x.reshape(-1, 2, 2), y)).batch(9)

    def train(model):
        return model.fit(dataset, epochs=2, verbose=0).history.values()

    check(train, functools.partial(SGD, 0.1), make, 1)


@on_2_3_and_4
def test_a_rank_makes_its_own_stage_and_no_other():
    called, rank, count = [], rr.rank(), stages()

    def make(number):
        called.append(number)
        return dense(number)

    pipeline = rr.Pipeline(functions(make))
    assert called == [pipeline.stage] == [rank % count]
    first = rank - rank % count
    assert list(pipeline.chain.members) == list(range(first, first + count))
    assert list(pipeline.replicas.members) == list(range(rank % count, rr.size(), count))
    begin = pipeline.chain.all_gather_object(digest(pipeline.model.layers[0].weights[:1]))
    assert len({*begin}) == count, "equal layers begin with equal weights"


@on_2_3_and_4
def test_ranks_agree_on_losses_with_random_layers_in_16_bits():
    """With several outputs of the last stage."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers = [Dense(WIDTH), keras.layers.Dropout(0.5)]
    pipeline = rr.Pipeline([lambda n=n: [Input((WIDTH,))][n:] + layers for n in range(stages())])
    keras.config.set_dtype_policy("float32")
    pipeline.compile("adam", "mse")
    x, y = data(64)
    history = pipeline.fit(x, np.concatenate([y, y], 1), batch_size=64, epochs=2, verbose=0)
    assert all(0 < loss < 100 for loss in history.history["loss"])
    return history.history["loss"]


@on_2_3_and_4
def test_callbacks_act_alike_and_save_each_stage_as_plain_keras(tmp_path):
    x, y = data()
    pipeline = rr.Pipeline(functions(), 4)
    pipeline.compile("adam", "mse")
    path, log = tmp_path / f"stage{pipeline.stage}.keras", tmp_path / "log.csv"
    files = [keras.callbacks.ModelCheckpoint(path), keras.callbacks.CSVLogger(log)]
    pipeline.fit(x[:32], y[:32], batch_size=32, epochs=2, verbose=0, callbacks=files)
    rr.init().barrier()
    loaded = keras.models.load_model(path)
    assert digest(loaded.get_weights()) == digest(pipeline.model.get_weights())
    assert type(loaded.optimizer) is keras.optimizers.Adam
    stops = [keras.callbacks.TerminateOnNaN()]
    seen = pipeline.fit(x, y * np.nan, batch_size=32, epochs=3, verbose=0, callbacks=stops)
    assert len(seen.epoch) == 1
    assert log.read_text().count("\n") == 3  # A head and two epochs, of one rank.
    names = ["log.csv", *(f"stage{number}.keras" for number in range(stages()))]
    assert sorted(os.listdir(tmp_path)) == names


def refused(text, action, *arguments, **options):
    with pytest.raises(ConfigError, match=re.escape(text)) as raised:
        action(*arguments, **options)
    assert str(raised.value).startswith(f"rank {rr.rank()} of {rr.size()} ")


@on_2_3_and_4
def test_stages_that_make_no_pipeline_are_an_error_on_all_ranks():
    """Nobody waits afterwards."""
    begin, fits = Input((WIDTH,)), functions()
    cast = keras.Model(begin, keras.ops.cast(Dense(WIDTH)(begin), "int32"))
    table = keras.layers.Embedding
    other_rows, any_rows = [Input((9,)), Dense(1)], [Input((None,)), table(9, 2)]

    def last(layers):
        return [*fits[:-1], lambda: layers]

    def first(layers):
        return [lambda: layers, *fits[1:]]

    refused("got [] as stages", rr.Pipeline, [])
    models = [keras.Sequential([begin, Dense(1)])] * stages()
    refused("as a stage, which is no function", rr.Pipeline, models)
    refused("cannot divide", rr.Pipeline, fits * 3)
    refused("got 0 micro-batches", rr.Pipeline, fits, 0)
    for text, layers in (
        ("it gives None", last(None)),
        ("it has no layers", last([])),
        (f"cannot make stage 0 of {stages()}: it has no layers", first(keras.Sequential([begin]))),
        ("it has no keras.Input, which the first stage needs", first([Dense(3)])),
        ("it takes rows of shape (9,), and gets some of shape (4,)", last(other_rows)),
        ("it gives int32, which has no gradient", first(cast)),
        ("it gives a mask", first([Input((3,)), table(9, 2, mask_zero=True)])),
        ("it gives rows of shape (None, 2), which is not fixed", first(any_rows)),
    ):
        refused(text, rr.Pipeline, layers)


@on_2_3_and_4
def test_training_that_a_pipeline_cannot_do_is_an_error_on_all_ranks():
    pipeline, (x, y) = rr.Pipeline(functions(), 4), data()
    refused("Call pipeline.compile(optimizer, loss) first", pipeline.fit, x, y)
    own_step = type("Own", (SGD,), {"apply_gradients": lambda *_: None})
    for text, optimizer in (
        ("with global_clipnorm", SGD(0.1, global_clipnorm=1.0)),
        ("with its own apply_gradients", own_step(0.1)),
        ("with a loss scale", keras.optimizers.LossScaleOptimizer(SGD(0.1))),
    ):
        refused(text, pipeline.compile, optimizer, "mse")
    if rr.size() == 4:
        whole = rr.DistributedOptimizer(SGD(0.1))
        refused("averages over all 4", pipeline.compile, whole, "mse")
        pipeline = rr.Pipeline(functions(), 4)
    pipeline.compile("sgd", "mse")
    fit = functools.partial(pipeline.fit, verbose=0)
    refused(
        "Use a batch_size, and a number of rows, that are multiples of", fit, x, y, batch_size=30
    )
    uneven = tf.data.Dataset.from_tensor_slices(data(22)).batch(22)
    refused("which cannot be divided into 4 equal micro-batches", fit, uneven)
    refused("got batch_size=16 for", fit, uneven, batch_size=16)
    for text, callback in (
        ("several stages as model.keras", keras.callbacks.ModelCheckpoint("model.keras")),
        ("got a BackupAndRestore", keras.callbacks.BackupAndRestore("backup")),
    ):
        refused(text, fit, x, y, batch_size=16, callbacks=callback)
    rows = 64 if pipeline.stage == 0 else 96
    with pytest.raises(MismatchError, match="different arrays as the data given to Pipeline"):
        fit(x[:rows], y[:rows], batch_size=16)
