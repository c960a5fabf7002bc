"""Models with split layers; each case prints one line of JSON. Plain Keras says what is right.

On 2 ranks both have pieces of one model; on 4 there are two such pairs, which divide the data.
Steps of a case that is asked for by name are traced; else eager, since few take less time so.
"""

import contextlib
import functools
import pathlib
import shutil
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from shared import digest, error_of, keep_graphs, say

import ringreduce.keras as rr
from ringreduce.keras.parts.attention import ParallelGroupQueryAttention
from ringreduce.keras.parts.part import part_of, parts_in
from ringreduce.tensorflow import xla

keep_graphs()
comm = rr.init()
SIZE = 2
group, data = comm.split(comm.rank // SIZE), comm.split(comm.rank % SIZE)
SGD = keras.optimizers.SGD
# Of 65 rows in batches of 64 one data rank has none in the last batch.
COUNT, BATCH, WIDTH = 65, 64, 6
USUAL = {2: ["attention", "saved", "refused"], 4: ["deep", "global", "infinite"]}
IS_EAGER = not sys.argv[1:]
# But attention is then compiled by XLA.
IS_JIT = IS_EAGER and xla.why_not() is None


def rows(count=COUNT, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype("float32")
    return x, np.sin(x).sum(1, keepdims=True)


def mlp(column, row, **options):
    """Two blocks, with biases, regularizers and a residual."""
    both = {
        "kernel_regularizer": keras.regularizers.L2(0.01),
        "bias_regularizer": keras.regularizers.L1(0.01),
        "bias_initializer": "random_normal",
        **options,
    }
    inputs = keras.Input((WIDTH,))
    x = keras.layers.Dense(8, name="start")(inputs)
    for block in range(2):
        y = column(12, activation="gelu", name=f"column{block}", **both)(x)
        x = x + row(8, name=f"row{block}", **both)(y)
    return keras.Model(inputs, keras.layers.Dense(1, name="top")(x))


def split(optimizer=None, seed=3, model_group=group, average=data):
    keras.utils.set_random_seed(seed)
    layers = rr.ColumnParallelDense, rr.RowParallelDense
    model = mlp(*layers, communicator=model_group)
    wrapped = rr.DistributedOptimizer(optimizer or SGD(0.02, momentum=0.5), average)
    model.compile(optimizer=wrapped, loss="mse", metrics=["mae"], run_eagerly=IS_EAGER)
    return model


def plain(optimizer=None, seed=3):
    keras.utils.set_random_seed(seed)
    model = mlp(keras.layers.Dense, keras.layers.Dense)
    chosen = optimizer or SGD(0.02, momentum=0.5)
    # Its few steps take less time than tracing them.
    model.compile(optimizer=chosen, loss="mse", metrics=["mae"], run_eagerly=True)
    return model


def fitted(model, epochs=1, average=data, **options):
    """Batches of its size, through rr.fit or Keras's own."""
    x, y = rows()
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": epochs, **options}
    if isinstance(model.optimizer, rr.DistributedOptimizer):
        return rr.fit(model, x, y, communicator=average, **settings)
    return model.fit(x, y, **settings)


def wholes(model):
    """The whole values of weights and the optimizer's state, on all ranks."""
    state = [*model.weights, *([] if model.optimizer is None else model.optimizer.variables)]
    found = []
    for variable in state:
        part = part_of(variable)
        if part is None or part.communicator.size == 1:
            found.append(np.asarray(variable))
            continue
        pieces = part.communicator.all_gather_object(np.asarray(variable).tolist())
        found.append(np.concatenate([np.array(p, "float32") for p in pieces], part.axis))
    return found


def once(function):
    """What plain Keras says, computed by one rank for all."""
    return comm.broadcast_object(function() if comm.rank == 0 else None)


def apart(model, other):
    """Of two models, or of a model and whole values."""
    theirs = other if isinstance(other, list) else wholes(other)
    pairs = zip(wholes(model), theirs, strict=True)
    return max(float(np.abs(np.asarray(a, "float64") - b).max()) for a, b in pairs)


def replicated(weights, optimizer):
    every = [*weights, *optimizer.variables]
    pieces = {id(v) for v in parts_in(every)}
    return digest(v for v in every if id(v) not in pieces)


def attentive(is_split):
    keras.utils.set_random_seed(5)
    both = {"kernel_regularizer": keras.regularizers.L2(0.01), "bias_initializer": "random_normal"}
    ours = {"communicator": group, **both}
    inputs = keras.Input((3, 4), batch_size=4 if IS_JIT else None)
    x = keras.layers.Dense(8)(inputs)
    if is_split:
        attention = rr.ParallelMultiHeadAttention(4, 3, value_dim=2, **ours)
        grouped = rr.ParallelMultiHeadAttention(4, 2, num_key_value_heads=2, **ours)
        wide = rr.ColumnParallelDense(4, "softmax", gather_output=True, name="wide", **ours)
    else:
        attention = keras.layers.MultiHeadAttention(4, 3, value_dim=2, **both)
        grouped = keras.layers.GroupQueryAttention(2, 4, 2, **both)
        wide = keras.layers.Dense(4, "softmax", name="wide", **both)
    x = x + attention(x, x, use_causal_mask=True)
    x = x + grouped(x, keras.layers.Dense(8)(x))
    return keras.Model(inputs, keras.layers.Flatten()(wide(x)))


def attention(folder):
    """Both kinds of attention and gathered outputs: drawn, trained and saved as the unsplit."""
    x = np.random.default_rng(1).normal(size=(8, 3, 4)).astype("float32")
    y = np.random.default_rng(2).normal(size=(8, 12)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)
    options = {"loss": "mse", "jit_compile": IS_JIT}

    def unsplit():
        twin = attentive(False)
        first = twin(x[:4]).numpy().tolist()
        twin.compile(optimizer=SGD(0.1), run_eagerly=True, **options)
        twin.fit(batches, epochs=2, verbose=0, shuffle=False)
        return first, [each.tolist() for each in wholes(twin)]

    model = attentive(True)
    first, after = once(unsplit)
    found = {"first": float(np.abs(model(x[:4]).numpy() - first).max())}
    model.compile(optimizer=rr.DistributedOptimizer(SGD(0.1), data), **options)
    rr.fit(model, batches, epochs=2, verbose=0, communicator=data)
    found["after"] = apart(model, after)
    path = folder / "attention.keras"
    rr.on_rank_zero(lambda: model.save(path))
    names = {type(layer).__name__: layer.name for layer in model.layers}
    again = {
        names["MultiHeadAttention"]: rr.ParallelMultiHeadAttention,
        names["GroupedQueryAttention"]: ParallelGroupQueryAttention,
        "wide": functools.partial(rr.ColumnParallelDense, gather_output=True),
    }
    replace = {name: functools.partial(one, communicator=group) for name, one in again.items()}
    loaded = rr.load_model(path, replace=replace, communicator=data)
    found["loaded"] = apart(model, loaded)
    found["outputs"] = float(np.abs(model(x[:4]).numpy() - loaded(x[:4]).numpy()).max())
    plain_file = keras.models.load_model(path)
    found["plain"] = float(np.abs(model(x[:4]).numpy() - plain_file(x[:4]).numpy()).max())
    say("attention", found=found, shapes=[list(v.shape) for v in loaded.weights])


def deep():
    """Steps of 64 rows and of 1, with validation; then evaluated and predicted."""
    validation = {"validation_data": rows(9, 2)}

    def unsplit():
        twin = plain(SGD(0.01))
        start = [each.tolist() for each in wholes(twin)]
        history = fitted(twin, **validation).history
        further = {"evaluated": twin.evaluate(*rows(1, 4), verbose=0)}
        for count in (9, 1):
            further[f"predicted {count}"] = twin(rows(count, 4)[0]).numpy().tolist()
        return start, [each.tolist() for each in wholes(twin)], {**history, **further}

    model = split(SGD(0.01))
    before, after, theirs = once(unsplit)
    start = apart(model, before)
    own = fitted(model, validation_batch_size=4, **validation).history
    end = apart(model, after)
    own["evaluated"] = rr.evaluate(model, *rows(1, 4), batch_size=4, communicator=data)
    for count in (9, 1):
        own[f"predicted {count}"] = rr.predict(model, rows(count, 4)[0], communicator=data)
    found = {name: float(np.abs(np.subtract(own[name], theirs[name])).max()) for name in theirs}
    shapes = [list(v.shape) for v in model.weights]
    say("deep", start=start, end=end, shapes=shapes, found=found)


class Noting(keras.callbacks.Callback):
    """After each step, digests of what all ranks have alike, and of what a pair has."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        weights = model.trainable_variables, model.variables
        self.found.append([replicated(each, model.optimizer) for each in weights])


def unseeded(case, **clipping):
    """Ranks that begin unlike and draw as they like, with a table over the data ranks."""
    keras.utils.set_random_seed(100 + comm.rank)
    ours = {"communicator": group}
    ids, inputs = keras.Input((2,), dtype="int64"), keras.Input((3, 4))
    table = rr.ShardedEmbedding(10, 4, communicator=data)
    x = keras.layers.Dropout(0.3)(keras.layers.Dense(4)(inputs))
    x = x + rr.ParallelMultiHeadAttention(2, 2, dropout=0.3, **ours)(x, x)
    x = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)([x, table(ids)]))
    x = rr.RowParallelDense(4, **ours)(rr.ColumnParallelDense(8, "relu", **ours)(x))
    frozen = keras.layers.Dense(4, trainable=False)
    x = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(frozen(x)))
    model = keras.Model([inputs, ids], keras.layers.Dense(1)(x))
    optimizer = rr.DistributedOptimizer(SGD(0.5, **clipping), data)
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=IS_EAGER)
    generator = np.random.default_rng(0)
    x = [generator.normal(size=(16, 3, 4)).astype("float32"), generator.integers(0, 10, (16, 2))]
    y = 100 * generator.normal(size=(16, 1)).astype("float32")
    noting = Noting()
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "communicator": data}
    rr.fit(model, x, y, callbacks=[noting], **options)
    end = wholes_of(model)
    rr.fit(model, [x[0][:8], x[1][:8]], y[:8], callbacks=[noting], **options)
    moved = [np.linalg.norm(b - a) for a, b in zip(end, wholes_of(model), strict=True)]
    masks = [layer for layer in model.layers if isinstance(layer, keras.layers.MultiHeadAttention)]
    drawn = np.asarray(masks[0]._dropout_layer(tf.ones((64,)), training=True)).tolist()
    say(
        case,
        steps=noting.found,
        table=digest([table.weights[0]]),
        moved=[float(each) for each in moved],
        drawn=drawn,
    )


def wholes_of(model):
    """Of what is trained; tables in no order."""
    found = []
    for variable in model.trainable_variables:
        part = part_of(variable)
        value = np.asarray(variable)
        if part is not None:
            pieces = part.communicator.all_gather_object(value.tolist())
            value = np.concatenate([np.array(p, "float32") for p in pieces], part.axis)
        found.append(value)
    return found


def infinite():
    """An infinity in the piece of one rank: all skip the step, and halve the scale."""
    inner = keras.optimizers.LossScaleOptimizer(SGD(1.0, global_clipnorm=1.0), initial_scale=8.0)
    model = split(inner)
    model.optimizer.build(model.trainable_variables)
    start, found = wholes(model), []
    for place in (3, None, 1):
        gradients = [tf.ones(v.shape) for v in model.trainable_variables]
        index = [v.path for v in model.trainable_variables].index("column1/kernel")
        if comm.rank == place:
            gradients[index] *= np.inf
        model.optimizer.apply(gradients, model.trainable_variables)
        found.append([float(inner.dynamic_scale), int(inner.inner_optimizer.iterations)])
    trained = len(model.trainable_variables)
    moved = [
        np.square(b - a).sum()
        for a, b in zip(start[:trained], wholes(model)[:trained], strict=True)
    ]
    say(
        "infinite",
        found=found,
        norm=float(np.sqrt(sum(moved))),
        shared=replicated(model.weights, inner),
    )


def layers_to_split(model_group):
    pair = [("column", rr.ColumnParallelDense), ("row", rr.RowParallelDense)]
    return {
        f"{name}{block}": functools.partial(layer, communicator=model_group)
        for name, layer in pair
        for block in range(2)
    }


def saved(folder):
    """From all ranks in mid-training; it goes on from the file in one, two and four pieces."""
    path = folder / "model.keras"
    model = split(keras.optimizers.Adam(0.01))
    point = keras.callbacks.ModelCheckpoint(str(folder / "point.keras"), verbose=1)
    fitted(model, callbacks=[point])
    rr.on_rank_zero(lambda: model.save(path))
    outside = error_of(lambda: model.save(folder / f"own{comm.rank}.keras"))
    alone = keras.models.load_model(path)
    pointed = keras.models.load_model(folder / "point.keras")
    found = {"at save": apart(model, alone), "pointed": apart(pointed, alone)}
    single, four = comm.split(comm.rank), comm.split(0)
    again = {"pairs": (group, data), "two": (group, single), "four": (four, single)}
    if comm.size == SIZE:
        del again["four"], again["two"]
    fitted(model)
    alone.run_eagerly = True
    fitted(alone)
    found["alone"] = apart(model, alone)
    for name, (model_group, average) in again.items():
        loaded = rr.load_model(path, communicator=average, replace=layers_to_split(model_group))
        fitted(loaded, average=average)
        found[name] = apart(model, loaded)
    layer = type(alone.get_layer("column0")).__module__
    say("saved", found=found, layer=layer, outside=outside)


def backed_up(folder):
    """A job that ended after one of two epochs, and is started again with other weights."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    whole_run, first = split(), split()
    fitted(whole_run, 2)
    backup = str(folder / "backup")
    with contextlib.suppress(KeyboardInterrupt):
        fitted(first, 2, backup_dir=backup, callbacks=[Stop()])
    comm.barrier()
    second = split(seed=50 + comm.rank)
    fitted(second, 2, backup_dir=backup)
    say("backed up", apart=apart(whole_run, second), steps=int(second.optimizer.iterations))


def stopped():
    """What one rank decides, or sets, holds on all."""

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.25
            self.model.stop_training = True

    model = split()
    history = fitted(model, 3, callbacks=[rr.callbacks.OnRankZero(Own(), data)])
    say("stopped", epochs=len(history.epoch), rate=float(model.optimizer.learning_rate))


def refused():
    """Each on a group that breaks alone."""
    column, row = rr.ColumnParallelDense, rr.RowParallelDense
    ours = {"communicator": group}
    x = np.ones((2, 3), "float32")
    heads = np.ones((2, 3, 4), "float32")
    cases = {
        "units": lambda: column(7, **ours)(x),
        "heads": lambda: rr.ParallelMultiHeadAttention(3, 2, **ours)(heads, heads),
        "key heads": lambda: rr.ParallelMultiHeadAttention(2, 2, num_key_value_heads=1, **ours)(
            heads, heads
        ),
        "scores": lambda: rr.ParallelMultiHeadAttention(2, 2, **ours)(
            heads, heads, return_attention_scores=True
        ),
        "softmax": lambda: column(4, "softmax", **ours),
        "constraint": lambda: row(4, kernel_constraint="non_neg", **ours),
        "activity": lambda: column(4, activity_regularizer="l2", **ours),
        "regularizer": lambda: column(
            4, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(), **ours
        )(x),
        "all ranks": lambda: fitted(split(average=comm), average=comm),
        "lamb": lambda: fitted(split(keras.optimizers.Lamb(0.1))),
        "measured": lambda: fitted(split(), batch_share="measured"),
        "jit": lambda: jitted(),
    }
    for name, action in cases.items():
        say(name, **error_of(action))
    if comm.size > SIZE:
        other = comm.split(0).split(comm.rank % SIZE)
        mixed = split(average=other)
        say("other parent", **error_of(lambda: fitted(mixed, average=other)))
    job = comm.split(0)
    model_group, average = job.split(comm.rank // SIZE), job.split(comm.rank % SIZE)
    layers = [keras.Input((WIDTH,)), keras.layers.Dense(4), column(4, communicator=model_group)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])  # which gets half of the units
    model.compile(rr.DistributedOptimizer(SGD(0.1), average), "mse", run_eagerly=True)
    x, y = rows(8)
    run = functools.partial(rr.fit, model, x, y, verbose=0, communicator=average)
    say("half", **error_of(run))
    job = comm.split(0)
    model_group, average = job.split(comm.rank // SIZE), job.split(comm.rank % SIZE)
    model = split(model_group=model_group, average=average)
    x, y = rows(8, comm.rank % SIZE)
    run = functools.partial(rr.fit, model, x, y, verbose=0, communicator=average)
    say("other rows", **error_of(run))


def jitted():
    model = split()
    model.jit_compile, model.run_eagerly = True, False
    fitted(model)


CASES = {
    "deep": deep,
    "global": functools.partial(unseeded, "global", global_clipnorm=0.5),
    "each": functools.partial(unseeded, "each", clipnorm=0.25),
    "infinite": infinite,
    "stopped": stopped,
    "refused": refused,
}
WITH_FILES = {"attention": attention, "saved": saved, "backed up": backed_up}

for name in sys.argv[1:] or USUAL[comm.size]:
    if name in CASES:
        CASES[name]()
    else:
        place = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
        WITH_FILES[name](pathlib.Path(place))
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(place)
