"""Models with split layers train, are evaluated, saved and loaded as those of one process are.

Plain Keras says what is right. On 2 ranks both have pieces of one model; on 4 there are two such
pairs, which divide the data. Few steps take less time eagerly; `make test-full` traces some.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ConfigError, MismatchError
from ringreduce.keras.layers.attention import ParallelGroupQueryAttention
from ringreduce.keras.layers.part import part_of, parts_in
from ringreduce.tensorflow import xla
from tests.programs.shared import digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SGD, Dense, Input = keras.optimizers.SGD, keras.layers.Dense, keras.Input
Column, Row, Attention = rr.ColumnParallelDense, rr.RowParallelDense, rr.ParallelMultiHeadAttention
# Of 65 rows in batches of 64 one data rank has none in the last batch.
COUNT, BATCH, WIDTH = 65, 64, 6
EAGERLY = {"run_eagerly": True}


def groups(parent=None):
    """The pair that has one model, and the ranks that have the same pieces."""
    comm = parent or rr.init()
    return comm.split(comm.rank // 2), comm.split(comm.rank % 2)


def rows(count=COUNT, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype("float32")
    return x, np.sin(x).sum(1, keepdims=True)


def mlp(column, row, seed=3, **options):
    """Two blocks, with biases, regularizers and a residual."""
    keras.utils.set_random_seed(seed)
    both = {
        "kernel_regularizer": keras.regularizers.L2(0.01),
        "bias_regularizer": keras.regularizers.L1(0.01),
        "bias_initializer": "random_normal",
        **options,
    }
    inputs = Input((WIDTH,))
    x = Dense(8, name="start")(inputs)
    for block in range(2):
        y = column(12, activation="gelu", name=f"column{block}", **both)(x)
        x = x + row(8, name=f"row{block}", **both)(y)
    return keras.Model(inputs, Dense(1, name="top")(x))


def split(pair, data, inner=None, seed=3, **options):
    model = mlp(Column, Row, seed, communicator=pair)
    optimizer = rr.DistributedOptimizer(inner or SGD(0.02, momentum=0.5), data)
    model.compile(optimizer, "mse", metrics=["mae"], **{**EAGERLY, **options})
    return model


def fit(model, data, epochs=1, arrays=None, **options):
    """Train through rr.fit, or Keras's own where there is no communicator of the data."""
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": epochs, **options}
    x, y = rows() if arrays is None else arrays
    return rr.fit(model, x, y, communicator=data, **options) if data else model.fit(x, y, **options)


def whole(variable):
    """The whole value of a variable, on all ranks."""
    part, value = part_of(variable), np.asarray(variable)
    if part is None or part.communicator.size == 1:
        return value
    pieces = part.communicator.all_gather_object(value.tolist())
    return np.concatenate([np.array(p, "float32") for p in pieces], part.axis)


def state(model):
    """Whole weights, and the optimizer's state."""
    states = model.optimizer.variables if model.optimizer else []
    return [whole(variable) for variable in (*model.weights, *states)]


def once(function):
    """What plain Keras says, computed by one rank for all."""
    return rr.init().broadcast_object(function() if rr.rank() == 0 else None)


def listed(model):
    return [values.tolist() for values in state(model)]


def apart(some, others):
    """The largest difference of whole values, or of what two models have."""
    some, others = (state(one) if isinstance(one, keras.Model) else one for one in (some, others))
    return max(np.abs(np.subtract(a, b)).max() for a, b in zip(some, others, strict=True))


def replicated(weights, optimizer):
    every = [*weights, *optimizer.variables]
    pieces = {id(variable) for variable in parts_in(every)}
    return digest(variable for variable in every if id(variable) not in pieces)


def attentive(pair, batch):
    """Both kinds of attention and gathered outputs; of plain Keras where there is no pair."""
    keras.utils.set_random_seed(5)
    both = {"kernel_regularizer": keras.regularizers.L2(0.01), "bias_initializer": "random_normal"}
    inputs = Input((3, 4), batch_size=batch)
    x = Dense(8)(inputs)
    if pair:
        both["communicator"] = pair
        attention = Attention(4, 3, value_dim=2, **both)
        grouped = Attention(4, 2, num_key_value_heads=2, **both)
        wide = Column(4, "softmax", gather_output=True, name="wide", **both)
    else:
        attention = keras.layers.MultiHeadAttention(4, 3, value_dim=2, **both)
        grouped = keras.layers.GroupQueryAttention(2, 4, 2, **both)
        wide = Dense(4, "softmax", name="wide", **both)
    x = x + attention(x, x, use_causal_mask=True)
    x = x + grouped(x, Dense(8)(x))
    return keras.Model(inputs, keras.layers.Flatten()(wide(x)))


@pytest.mark.parametrize("is_jit", [xla.why_not() is None, in_full(False)], ids=["jit", "graph"])
@on_ranks(2)
def test_attention_is_drawn_trained_gathered_and_saved_as_the_unsplit_one(tmp_path, is_jit):
    pair, data = groups()
    x = np.random.default_rng(1).normal(size=(8, 3, 4)).astype("float32")
    y = np.random.default_rng(2).normal(size=(8, 12)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)
    model = attentive(pair, 4 if is_jit else None)

    def unsplit():
        plain = attentive(None, 4)
        first = plain(x[:4]).numpy().tolist()
        plain.compile(SGD(0.1), "mse", run_eagerly=True)
        plain.fit(batches, epochs=2, verbose=0, shuffle=False)
        return first, listed(plain)

    first, after = once(unsplit)
    assert np.abs(model(x[:4]) - first).max() < 1e-6
    optimizer = rr.DistributedOptimizer(SGD(0.1), data)
    model.compile(optimizer, "mse", jit_compile=is_jit)
    rr.fit(model, batches, epochs=2, verbose=0, communicator=data)
    assert apart(model, after) < 1e-6
    path = str(tmp_path / "attention.keras")
    rr.on_rank_zero(lambda: model.save(path))
    # Of rank 0, whose file it is: it has made more layers, which Keras numbers.
    names = rr.init().broadcast_object({type(layer).__name__: layer.name for layer in model.layers})
    replace = {
        names["MultiHeadAttention"]: Attention,
        names["GroupedQueryAttention"]: ParallelGroupQueryAttention,
        "wide": functools.partial(Column, gather_output=True),
    }
    replace = {n: functools.partial(layer, communicator=pair) for n, layer in replace.items()}
    loaded = rr.load_model(path, replace=replace, communicator=data)
    outputs = model(x[:4]).numpy()
    assert apart(model, loaded) == 0.0
    assert (outputs == loaded(x[:4]).numpy()).all()
    assert np.abs(outputs - keras.models.load_model(path)(x[:4])).max() < 1e-6
    shapes = [tuple(variable.shape) for variable in loaded.weights]
    assert (8, 2, 3) in shapes  # two of four heads
    assert (8, 1, 2) in shapes  # one of two heads of keys


@pytest.mark.parametrize("options", [EAGERLY, in_full({})])
@on_ranks(4)
def test_two_blocks_over_two_pairs_train_as_one_process_does(options):
    """Steps of 64 rows and of 1, with validation; then evaluated and predicted."""
    validation, pair, data = {"validation_data": rows(9, 2)}, *groups()

    def unsplit():
        plain = mlp(Dense, Dense)
        plain.compile(SGD(0.01), "mse", metrics=["mae"], run_eagerly=True)
        start, history = listed(plain), fit(plain, None, **validation).history
        evaluated = plain.evaluate(*rows(1, 4), verbose=0)
        predicted = [plain(rows(count, 4)[0]).numpy().tolist() for count in (9, 1)]
        return start, listed(plain), history, [evaluated, *predicted]

    model = split(pair, data, SGD(0.01), **options)
    start, end, expected, further = once(unsplit)
    assert apart(model, start) == 0.0
    history = fit(model, data, validation_batch_size=4, **validation).history
    assert apart(model, end) < 1e-5
    evaluated = rr.evaluate(model, *rows(1, 4), batch_size=4, communicator=data)
    predicted = [rr.predict(model, rows(count, 4)[0], communicator=data) for count in (9, 1)]
    assert len(expected) == 4
    assert apart([history[name] for name in expected], expected.values()) < 1e-5
    assert apart([evaluated, *predicted], further) < 1e-5
    shapes = [list(variable.shape) for variable in model.weights]
    assert shapes == [[6, 8], [8], *2 * [[8, 6], [6], [6, 8], [8]], [8, 1], [1]]


def unseeded(clipping):
    """Train ranks that begin unlike and draw as they like, with a table over the data ranks.

    Return, after each step, digests of what all ranks have alike, and of what a pair has; how far
    each variable moved in the last; a mask of dropout, and a digest of the table.
    """
    keras.utils.set_random_seed(100 + rr.rank())
    pair, data = groups()
    ours = {"communicator": pair}
    ids, inputs = Input((2,), dtype="int64"), Input((3, 4))
    table = rr.ShardedEmbedding(10, 4, communicator=data)
    attention = Attention(2, 2, dropout=0.3, **ours)
    x = keras.layers.Dropout(0.3)(Dense(4)(inputs))
    x = x + attention(x, x)
    x = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)([x, table(ids)]))
    x = Row(4, **ours)(Column(8, "relu", **ours)(x))
    frozen = Dense(4, trainable=False)
    x = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(frozen(x)))
    model = keras.Model([inputs, ids], Dense(1)(x))
    is_eager = "global_clipnorm" in clipping
    model.compile(rr.DistributedOptimizer(SGD(0.5, **clipping), data), "mse", run_eagerly=is_eager)
    generator, steps = np.random.default_rng(0), []

    def note(batch, logs):
        weights = model.trainable_variables, model.variables
        steps.append([replicated(some, model.optimizer) for some in weights])

    x = [generator.normal(size=(16, 3, 4)).astype("float32"), generator.integers(0, 10, (16, 2))]
    y = 100 * generator.normal(size=(16, 1)).astype("float32")
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "communicator": data}
    options["callbacks"] = [keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    rr.fit(model, x, y, **options)
    before = [*map(whole, model.trainable_variables)]
    rr.fit(model, [x[0][:8], x[1][:8]], y[:8], **options)
    pairs = zip(before, map(whole, model.trainable_variables), strict=True)
    moved = [float(np.linalg.norm(b - a)) for a, b in pairs]
    drawn = np.asarray(attention._dropout_layer(tf.ones((64,)), training=True)).tolist()
    return steps, moved, str(drawn), digest([table.weights[0]])


@pytest.mark.parametrize("clipping", [{"global_clipnorm": 0.5}, in_full({"clipnorm": 0.25})])
def test_what_is_replicated_stays_equal_though_nothing_is_seeded(ranks, clipping):
    steps, norms, drawn, tables = zip(*ranks(4, unseeded, clipping), strict=True)
    for found in zip(*steps, strict=True):
        of_all, pairs = zip(*found, strict=True)
        assert len({*of_all}) == 1
        # With moving averages, frozen weights and states of random generators.
        assert pairs[0] == pairs[1] != pairs[2] == pairs[3]
    # Heads of other ranks, and rows, get masks of their own; the table is over the data ranks.
    assert len({*drawn}) == 4
    assert tables[0] == tables[1] != tables[2] == tables[3]
    for moved in norms:
        if "global_clipnorm" in clipping:
            assert sum(norm**2 for norm in moved) ** 0.5 == pytest.approx(0.25, rel=1e-3)
        else:  # Each at most the rate times the limit, and most have reached it.
            assert max(moved) == pytest.approx(0.125, rel=1e-3)
            assert sorted(moved)[4] == pytest.approx(0.125, rel=1e-3)


@on_ranks(4)
def test_an_infinity_in_one_piece_is_skipped_by_all():
    """All skip the step, and halve the scale."""
    inner = keras.optimizers.LossScaleOptimizer(SGD(1.0, global_clipnorm=1.0), initial_scale=8.0)
    model = split(*groups(), inner)
    variables = model.trainable_variables
    model.optimizer.build(variables)
    start, index = [*map(whole, variables)], [v.path for v in variables].index("column1/kernel")
    for rank, expected in ((3, (4.0, 0)), (None, (4.0, 1)), (1, (2.0, 1))):
        gradients = [tf.ones(variable.shape) for variable in variables]
        if rr.rank() == rank:
            gradients[index] *= np.inf
        model.optimizer.apply(gradients, variables)
        assert (float(inner.dynamic_scale), int(inner.inner_optimizer.iterations)) == expected
    moved = [np.square(b - a).sum() for a, b in zip(start, map(whole, variables), strict=True)]
    assert np.sqrt(sum(moved)) == pytest.approx(1.0, rel=1e-5)
    return replicated(model.weights, inner)


@pytest.mark.full
@pytest.mark.parametrize(("size", "count"), [(2, 1), (4, 3)])
@on_ranks()
def test_it_is_saved_whole_and_goes_on_from_the_file(tmp_path, count):
    """From all ranks in mid-training; it goes on in two, one and four pieces."""
    pair, data = groups()
    path, point = str(tmp_path / "model.keras"), str(tmp_path / "point.keras")
    model = split(pair, data, keras.optimizers.Adam(0.01))
    fit(model, data, callbacks=[keras.callbacks.ModelCheckpoint(point, verbose=1)])
    rr.on_rank_zero(lambda: model.save(path))
    with pytest.raises(ConfigError, match=r"rr\.on_rank_zero\(lambda: model\.save\(path\)\)"):
        model.save(tmp_path / f"own{rr.rank()}.keras")
    alone = keras.models.load_model(path)
    assert type(alone.get_layer("column0")).__module__ == "keras.src.layers.core.dense"
    assert apart(model, alone) == apart(keras.models.load_model(point), alone) == 0.0
    fit(model, data)
    alone.run_eagerly = True
    fit(alone, None)
    assert apart(model, alone) < 1e-6
    single, every = rr.init().split(rr.rank()), rr.init().split(0)
    for number, ours in enumerate([(pair, data), (pair, single), (every, single)][:count]):
        kinds = {"column": Column, "row": Row}
        replace = {
            f"{name}{block}": functools.partial(layer, communicator=ours[0])
            for name, layer in kinds.items()
            for block in range(2)
        }
        loaded = rr.load_model(path, communicator=ours[1], replace=replace)
        fit(loaded, ours[1])
        assert apart(model, loaded) <= (1e-6 if number else 0.0)


@pytest.mark.full
@on_ranks(4)
def test_a_job_that_is_started_again_ends_as_one_that_was_not_disturbed(tmp_path):
    """It ended after one of two epochs, and begins with other weights."""

    def stop(epoch, logs):
        if epoch == 1:
            raise KeyboardInterrupt

    pair, data = groups()
    undisturbed, first = split(pair, data), split(pair, data)
    second = split(pair, data, seed=50 + rr.rank())
    fit(undisturbed, data, 2)
    stops = keras.callbacks.LambdaCallback(on_epoch_begin=stop)
    backup = {"backup_dir": str(tmp_path / "backup")}
    with contextlib.suppress(KeyboardInterrupt):
        fit(first, data, 2, callbacks=[stops], **backup)
    rr.init().barrier()
    fit(second, data, 2, **backup)
    assert apart(undisturbed, second) == 0.0
    assert int(second.optimizer.iterations) == 4


class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.25
        self.model.stop_training = True


@pytest.mark.full
@on_ranks(4)
def test_all_ranks_do_what_a_callback_of_the_first_decides():
    pair, data = groups()
    model = split(pair, data)
    history = fit(model, data, 3, callbacks=[rr.callbacks.OnRankZero(Stops(), data)])
    assert (len(history.epoch), float(model.optimizer.learning_rate)) == (1, 0.25)


def refused(text, action, *arguments, **options):
    with pytest.raises(ConfigError, match=text):
        action(*arguments, **options)


@on_ranks(2)
def test_what_cannot_be_split_is_refused():
    (pair, data), comm, heads = groups(), rr.init(), np.ones((2, 3, 4), "float32")
    ours = {"communicator": pair}
    refused("cannot divide dimension 1 of the kernel", Column(7, **ours), heads[0])
    refused("cannot divide the 3 heads", Attention(3, 2, **ours), heads, heads)
    attention = Attention(2, 2, num_key_value_heads=1, **ours)
    refused("cannot divide the 1 key and value heads", attention, heads, heads)
    scores = {"return_attention_scores": True}
    refused("got return_attention_scores", Attention(2, 2, **ours), heads, heads, **scores)
    refused("got activation='softmax'", Column, 4, "softmax", **ours)
    refused("got kernel_constraint", Row, 4, kernel_constraint="non_neg", **ours)
    refused("got activity_regularizer", Column, 4, activity_regularizer="l2", **ours)
    layer = Column(4, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(), **ours)
    refused("got the regularizer OrthogonalRegularizer", layer, heads[0])
    refused("Split both from one", fit, split(pair, comm), comm)
    refused("looks at whole variables", fit, split(pair, data, keras.optimizers.Lamb(0.1)), data)
    compiled = split(pair, data, jit_compile=True, run_eagerly=False)
    refused("fixes all shapes", fit, compiled, data)


@pytest.mark.full
@on_ranks(4)
def test_groups_that_do_not_fit_and_shares_that_would_differ_are_refused():
    (pair, data), (_, other), comm = groups(), groups(rr.init().split(0)), rr.init()
    refused("same rows", fit, split(pair, data), data, batch_share="measured")
    refused("Split both from one", fit, split(pair, other), other)
    text = r"averages over ranks \[0, 1, 2, 3\]"
    refused(text, fit, split(pair, comm), comm)


def half():
    """A layer gets only this rank's units."""
    pair, data = groups(rr.init().split(0))
    layers = [Dense(4), Column(4, communicator=pair), Dense(1)]
    model = keras.Sequential([Input((WIDTH,)), *layers])
    model.compile(rr.DistributedOptimizer(SGD(0.1), data), "mse", run_eagerly=True)
    fit(model, data, arrays=rows(8))


def other_rows():
    pair, data = groups(rr.init().split(0))
    fit(split(pair, data), data, arrays=rows(8, rr.rank() % 2))


def built_late(pair, data):
    """It learns the shape of its input from the data."""
    keras.utils.set_random_seed(rr.rank())  # The first rank's weights count.
    layers = [Dense(4), Column(4, communicator=pair), Row(1, communicator=pair)]
    model = keras.Sequential(layers)
    model.compile(rr.DistributedOptimizer(SGD(0.1), data), "mse", run_eagerly=True)
    return model


def other_rows_late():
    pair, data = groups(rr.init().split(0))
    fit(built_late(pair, data), data, arrays=rows(8, rr.rank() % 2))


def other_batches_late():
    pair, data = groups(rr.init().split(0))
    x, y = rows(8, rr.rank() % 2)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    rr.fit(built_late(pair, data), batches, verbose=0, communicator=data)


@pytest.mark.parametrize("size", [2, in_full(4)])
@on_ranks()
def test_a_model_that_is_built_late_trains_as_one_that_was_built():
    pair, data = groups()
    model, late = built_late(pair, data), built_late(pair, data)
    model.build((None, WIDTH))
    losses = [fit(each, data, arrays=rows(8), epochs=2).history["loss"] for each in (model, late)]
    assert losses[0] == losses[1]
    assert apart(model, late) == 0.0
    return losses


class Inner(keras.layers.Layer):
    """Makes a split layer only when it is built."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def build(self, shape):
        self.column = Column(4, gather_output=True, communicator=self.group)
        self.column.build(shape)

    def call(self, inputs):
        return self.column(inputs)


def with_inner(pair, data):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([Inner(pair), Dense(1)])
    model.compile(rr.DistributedOptimizer(SGD(0.1), data), "mse", run_eagerly=True)
    return model


@on_ranks(2)
def test_who_trains_is_known_where_split_layers_are_made_when_the_model_is_built():
    pair, data = groups()
    model = with_inner(pair, data)
    model.build((None, WIDTH))
    late = with_inner(pair, data)
    losses = [fit(each, data, arrays=rows(8), epochs=2).history["loss"] for each in (model, late)]
    assert losses[0] == losses[1]
    assert apart(model, late) == 0.0
    return losses


def other_rows_within():
    pair, data = groups(rr.init().split(0))
    fit(with_inner(pair, data), data, arrays=rows(8, rr.rank() % 2))


@pytest.mark.parametrize(
    ("size", "train", "text"),
    [
        (2, half, "verify_replicas"),
        (2, other_rows, "different arrays"),
        in_full(4, other_rows, ""),
        (2, other_rows_late, "different arrays"),
        (2, other_rows_within, "different arrays"),
        in_full(2, other_batches_late, "read different data"),
    ],
)
@on_ranks()
def test_pieces_that_cannot_match_are_told(train, text):
    with pytest.raises(MismatchError, match=text):
        train()
