"""Models with parts; each case prints one line of JSON. Plain Keras says what is right.

On 2 ranks few are traced: some steps take less time eagerly.
"""

import contextlib
import functools
import itertools
import pathlib
import shutil
import sys
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf
from shared import built, digest, error_of, keep_graphs, say

import ringreduce.keras as rr

keep_graphs()
comm = rr.init()
ROWS, WIDTH = 1003, 4
# The last batch has one row: all shares but one are empty.
COUNT, BATCH = 65, 64


def data(count=COUNT, seed=0):
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, ROWS, (count, 3))
    ids[::2, 0] = 5  # on all ranks, and repeated
    return ids, generator.normal(size=(count, 1)).astype("float32")


def whole(variable):
    """The value of a table whose rows are dealt out, or of a variable that is no table."""
    own = np.asarray(variable)
    pieces = comm.all_gather(np.ascontiguousarray(own))
    counts = comm.all_gather_object(len(own))
    found = np.empty((sum(counts), *own.shape[1:]), own.dtype)
    for rank, piece in enumerate(np.split(pieces, np.cumsum(counts)[:-1])):
        found[rank :: comm.size] = piece
    return found


def make_model(table, **options):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,), dtype="int64")
    hidden = keras.layers.Flatten()(table(inputs))
    outputs = keras.layers.Dense(1, name="top")(keras.layers.Dense(3, name="middle")(hidden))
    return keras.Model(inputs, outputs)


def sharded(optimizer=None, **options):
    keras.utils.set_random_seed(3)
    model = make_model(rr.ShardedEmbedding(ROWS, WIDTH, name="table", **options))
    wrapped = rr.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.5, momentum=0.5))
    model.compile(optimizer=wrapped, loss="mse", metrics=["mae"], run_eagerly=comm.size == 2)
    return built(model, np.zeros((1, 3), "int64"), np.zeros((1, 1)))


def twin_of(model, optimizer=None, make=keras.layers.Embedding):
    """The same in plain Keras, with its initial values."""
    twin = make_model(make(ROWS, WIDTH, name="table"))
    twin.get_layer("table").set_weights([whole(model.get_layer("table").weights[0])])
    for name in ("middle", "top"):
        twin.get_layer(name).set_weights(model.get_layer(name).get_weights())
    chosen = optimizer or keras.optimizers.SGD(0.5, momentum=0.5)
    # Its few steps take less time than tracing them.
    twin.compile(optimizer=chosen, loss="mse", metrics=["mae"], run_eagerly=True)
    return twin


def apart(model, twin):
    """The largest difference between the weights, and between the optimizers' states."""
    pairs = [(whole(model.get_layer("table").weights[0]), twin.get_layer("table").weights[0])]
    for name in ("middle", "top"):
        pairs += zip(model.get_layer(name).weights, twin.get_layer(name).weights, strict=True)
    states = zip(model.optimizer.variables, twin.optimizer.variables, strict=True)
    for own, theirs in states:
        is_piece = tuple(own.shape) != tuple(theirs.shape)
        pairs.append((whole(own) if is_piece else own, theirs))
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def trained(case, *, optimizer=None, fit=None, **options):
    model = sharded(None if optimizer is None else optimizer(), **options)
    chosen = None if optimizer is None else optimizer()
    if chosen is not None:
        # Plain Keras squares the gradients of a repeated id one by one.
        chosen = rr.DistributedOptimizer(chosen, comm.split(comm.rank))
    twin = twin_of(model, chosen)
    model.run_eagerly = comm.size == 2 and case != "table"
    before = whole(model.get_layer("table").weights[0])
    ids, targets = data()
    (fit or fitted)(model, ids, targets)
    twin.fit(ids, targets, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    after = whole(model.get_layer("table").weights[0])
    say(
        case,
        apart=apart(model, twin),
        moved=sorted({int(row) for row in np.nonzero((before != after).any(1))[0]})
        == np.unique(ids).tolist(),
        shared=digest(model.get_layer("top").weights + model.get_layer("middle").weights),
        rows=model.get_layer("table").weights[0].shape[0],
    )


def fitted(model, ids, targets, **options):
    rr.fit(model, ids, targets, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **options)


def joined(model, ids, targets):
    """Each global batch divided by hand, all of the last one on the last rank."""
    bounds = [0, BATCH, COUNT]

    def own():
        for first, end in itertools.pairwise(bounds):
            share = [first + (end - first) * r // comm.size for r in range(comm.size + 1)]
            start, stop = share[comm.rank], share[comm.rank + 1]
            if stop > start:
                yield ids[start:stop], targets[start:stop]

    spec = (tf.TensorSpec((None, 3), tf.int64), tf.TensorSpec((None, 1), tf.float32))
    dataset = tf.data.Dataset.from_generator(own, output_signature=spec)
    steps = len(list(own()))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    rr.fit(model, dataset, sharded=True, epochs=2, verbose=0)


def accumulated():
    """Two steps of one global batch each, applied together: as one step on the mean of all rows."""
    model = make_model(rr.ShardedEmbedding(ROWS, WIDTH, name="table"))
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5), accumulate_steps=2)
    model.compile(optimizer=optimizer, loss="mse")
    twin = twin_of(model, keras.optimizers.SGD(0.5))
    ids, targets = data()
    rr.fit(model, ids, targets, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    twin.fit(ids, targets, batch_size=COUNT, epochs=1, shuffle=False, verbose=0)
    say("accumulated", apart=apart(model, twin))


class Experts(rr.parts.PartLayer):
    """One expert for each rank; a row goes to that of its first feature."""

    def build(self, shape):
        self.expert = self.add_part((comm.size, shape[-1]), "ones")

    def call(self, rows):
        chosen = tf.cast(rows[:, 0], tf.int32) % comm.size
        order = tf.argsort(chosen, stable=True)
        counts = tf.math.bincount(chosen, minlength=comm.size)

        def ask(rows):
            sent, received = rr.all_to_all(tf.gather(rows, order), counts)
            back, _ = rr.all_to_all(sent * self.expert[0], received)
            return tf.gather(back, tf.argsort(order))

        return tf.ensure_shape(rr.parts.in_parts(ask, rows), rows.shape)


class Plain(keras.layers.Layer):
    """All experts in one process."""

    def build(self, shape):
        self.expert = self.add_weight(shape=(comm.size, shape[-1]), initializer="ones")

    def call(self, rows):
        return rows * tf.gather(self.expert, tf.cast(rows[:, 0], tf.int32) % comm.size)


def with_experts(layer, wrap, run_eagerly=False):
    start = keras.layers.Dense(2, use_bias=False, kernel_initializer="identity")
    model = keras.Sequential([keras.Input((2,)), start, layer])
    optimizer = wrap(keras.optimizers.SGD(0.125))
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=run_eagerly)
    return model


def experts(case, count, batch):
    """Rows whose first feature says which expert: powers of two, so that all sums are exact."""
    rows = np.array([[i % comm.size, 2.0 ** (i % 3)] for i in range(count)], "float32")
    targets = np.zeros((count, 2), "float32")
    keras.utils.set_random_seed(1)
    is_eager = comm.size == 2
    model = with_experts(layer := Experts(), rr.DistributedOptimizer, run_eagerly=is_eager)
    alone = with_experts(plain := Plain(), lambda optimizer: optimizer, run_eagerly=True)
    rr.fit(model, rows, targets, batch_size=batch, shuffle=False, verbose=0)
    alone.fit(rows, targets, batch_size=batch, shuffle=False, verbose=0)
    own = np.asarray(plain.expert)[comm.rank]
    say(
        case,
        expert=float(np.abs(np.asarray(layer.expert)[0] - own).max()),
        shared=float(
            np.abs(model.layers[0].get_weights()[0] - alone.layers[0].get_weights()[0]).max()
        ),
        moved=float(np.abs(own - 1).max()),
    )


def local_experts():
    """The same by hand, with local variables, in batches that divide unevenly: refused."""

    class ByHand(Experts):
        def build(self, shape):
            self.expert = self.add_weight(shape=(1, shape[-1]), initializer="ones")

        def call(self, rows):
            chosen = tf.cast(rows[:, 0], tf.int32) % comm.size
            order = tf.argsort(chosen, stable=True)
            counts = tf.math.bincount(chosen, minlength=comm.size)
            sent, received = rr.all_to_all(tf.gather(rows, order), counts)
            back, _ = rr.all_to_all(sent * self.expert[0], received)
            return tf.ensure_shape(tf.gather(back, tf.argsort(order)), rows.shape)

    model = with_experts(layer := ByHand(), rr.DistributedOptimizer, run_eagerly=True)
    model.optimizer.register_local_var(layer.expert)
    rows = np.ones((2 * comm.size + 1, 2), "float32")
    say("local experts", **error_of(lambda: rr.fit(model, rows, rows, verbose=0)))


def scaled():
    """With scale_local_gradients they are those of the mean over all ranks, as Horovod's."""
    found = []
    for scale in (False, True):
        variable = keras.Variable([0.0], name="own")
        optimizer = rr.DistributedOptimizer(
            keras.optimizers.SGD(1.0), local_variables=[variable], scale_local_gradients=scale
        )
        optimizer.build([variable])
        optimizer.apply([tf.constant([6.0 * (comm.rank + 1)])], [variable])
        found.append(float(variable[0]))
    say("scaled", found=found)


def local_backup():
    """Rank 0 would keep its own local variables alone; training without a backup warns of none."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = rr.DistributedOptimizer(SGD(0.5), local_variables=model.trainable_variables)
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
    model.layers[0].set_weights([np.full((2, 1), float(comm.rank))])
    rows = np.ones((4 * comm.size, 2), "float32")
    fit = functools.partial(rr.fit, model, rows, rows[:, :1], batch_size=comm.size, verbose=0)
    backed_up = error_of(lambda: fit(backup_dir="never written"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", rr.ParityWarning)
        fit()
    weights = [one for one in told if issubclass(one.category, rr.ParityWarning)]
    say("local backup", **backed_up, warned=len(weights))


def drawn():
    """The same seed draws the same table on one rank and on several."""
    tables = []
    for group in (comm, comm.split(comm.rank)):
        seeded = keras.initializers.RandomUniform(seed=7)
        layer = rr.ShardedEmbedding(2050, 2, embeddings_initializer=seeded, communicator=group)
        layer.build()
        tables.append(layer.weights[0])
    say("drawn", equal=bool((whole(tables[0]) == np.asarray(tables[1])).all()))


def halves():
    """An infinity in one rank's piece: all ranks skip that step, and halve their loss scales."""
    table = rr.ShardedEmbedding(comm.size, 2, embeddings_initializer="zeros")
    table.build()
    shared = keras.Variable([0.0], name="shared")
    scaled = keras.optimizers.LossScaleOptimizer(SGD(1.0, global_clipnorm=5.0), initial_scale=8.0)
    optimizer = rr.DistributedOptimizer(scaled)
    variables = [table.weights[0], shared]
    found = []
    for piece in (np.inf if comm.rank == 1 else 8.0, 8.0 * 4):
        optimizer.apply([tf.fill((1, 2), piece), tf.constant([8.0 * 4])], variables)
        found.append([float(shared[0]), float(table.weights[0][0, 0]), float(scaled.dynamic_scale)])
    say("halves", found=found)


def refused():
    """Ids out of range on one rank only, and what cannot be had in parts."""
    for name, bad, wrap in (("negative", -1, lambda call: call), ("too large", ROWS, tf.function)):
        ids = np.array([[0, bad if comm.rank == comm.size - 1 else 1]])
        group = comm.split(0)  # which breaks alone
        table = rr.ShardedEmbedding(ROWS, WIDTH, name="table", communicator=group)
        table.build()
        call = wrap(table)
        say(name, **error_of(lambda call=call, ids=ids: call(tf.constant(ids))))
    model = sharded()
    with rr.DistributedGradientTape() as tape:
        total = tf.reduce_sum(model.get_layer("table")(tf.constant([1])))
    say("tape", **error_of(lambda: tape.gradient(total, model.trainable_variables)))
    compiled = tf.function(rr.ShardedEmbedding(ROWS, 2), jit_compile=True)
    say("compiled", **error_of(lambda: compiled(tf.constant([1]))))
    say("small", **error_of(lambda: rr.ShardedEmbedding(comm.size - 1, 2).build()))
    constraint = keras.constraints.MaxNorm()
    limited = rr.ShardedEmbedding(ROWS, 2, embeddings_constraint=constraint)
    say("constraint", **error_of(limited.build))
    adafactor = keras.optimizers.Adafactor(0.1)
    say("adafactor", **error_of(lambda: rr.fit(sharded(adafactor), *data(8), verbose=0)))
    half = comm.split(comm.rank % 2) if comm.size == 4 else None
    if half is not None:
        other = functools.partial(sharded, communicator=half)
        say("other group", **error_of(lambda: rr.fit(other(), *data(8), verbose=0)))


def looked_up():
    """Several tables of unlike widths in one exchange, with gradients, none and all ids of one."""
    first = rr.ShardedEmbedding(10, 2, embeddings_initializer="ones")
    second = rr.ShardedEmbedding(7, 3, embeddings_initializer="ones")
    for layer in (first, second):
        layer.build()
        part = layer.weights[0]
        ids = np.arange(part.shape[0]) * comm.size + comm.rank
        part.assign(np.repeat(ids[:, None], part.shape[1], 1) * 4.0)
    one, two = [[1, 1], [9, 3]], [] if comm.rank == 0 else [6]
    with tf.GradientTape() as tape:
        found = rr.parts.look_up({first: tf.constant(one), second: tf.constant(two, tf.int64)})
        loss = sum(tf.reduce_sum(rows * 6.0) for rows in found.values())
    slices = tape.gradient(loss, [first.weights[0].value, second.weights[0].value])
    totals = [np.asarray(tf.convert_to_tensor(each)).sum(1).tolist() for each in slices]
    own = [np.asarray(rows).tolist() for rows in found.values()]
    say("looked up", found=own, totals=totals)
    ragged = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    combined = {}
    for combiner in ("sum", "mean", "sqrtn"):
        layer = rr.ShardedEmbedding(5, 1, combiner=combiner, embeddings_initializer="ones")
        layer.build()
        part = layer.weights[0]
        part.assign((np.arange(part.shape[0]) * comm.size + comm.rank)[:, None] * 1.0)
        weights = tf.ragged.constant([[1.0, 3.0], [], [2.0]])
        combined[combiner] = [
            np.asarray(layer(ragged))[:, 0].tolist(),
            np.asarray(layer(ragged, weights))[:, 0].tolist(),
        ]
    masked = rr.ShardedEmbedding(
        5, 1, combiner="sum", mask_zero=True, embeddings_initializer="ones"
    )
    combined["masked"] = np.asarray(masked(tf.constant([[0, 2, 0], [1, 2, 3]])))[:, 0].tolist()

    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = rr.ShardedEmbedding(5, 1, combiner="sum")
            self.top = keras.layers.Dense(1)

        def call(self, inputs):
            numbers, ids = inputs
            return self.top(tf.concat([numbers, self.table(ids)], 1))

    # Keras learns its shapes by a trace without variables, and warns where that fails.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tf.function(Unbuilt())([tf.ones((3, 1)), ragged])
    say("combined", **combined, warned=[str(each.message) for each in warned])


def evaluated():
    """Shares of unlike lengths and without any; ranks that are done answer the others."""
    model = sharded()
    twin = twin_of(model)
    found = {}
    for name, count in (("many", 17), ("few", 1)):
        ids, targets = data(count, 1)
        batches = tf.data.Dataset.from_tensor_slices((ids, targets)).batch(8)
        if name == "many":
            own = rr.evaluate(model, ids, targets, batch_size=4)
            outputs = rr.predict(model, batches.map(lambda x, y: x))
        else:
            own, outputs = rr.evaluate(model, batches), rr.predict(model, ids)
        theirs = twin.evaluate(ids, targets, batch_size=4, verbose=0)
        found[name] = float(np.abs(np.array(own) - theirs).max())
        found[f"{name} predicted"] = float(np.abs(outputs - twin(ids)).max())
    ids, targets = data(8)
    given = {"x": ids, "y": targets, "verbose": 0, "validation_data": data(9, 2)}
    history = rr.fit(model, **given, validation_batch_size=4).history
    alone = twin.fit(**given).history
    found["validated"] = abs(history["val_loss"][0] - alone["val_loss"][0])
    say("evaluated", **found)


def saved(folder):
    """In mid-training, by three ways; it goes on as if it had not been interrupted."""
    ids, targets = data()
    path = folder / "model.keras"
    model = sharded(keras.optimizers.Adam(0.01))
    steps = functools.partial(rr.fit, batch_size=BATCH, shuffle=False, verbose=0, x=ids, y=targets)
    steps(model, callbacks=[keras.callbacks.ModelCheckpoint(str(folder / "point.keras"))])
    rr.on_rank_zero(lambda: model.save(path))
    outside = error_of(lambda: model.save(folder / f"own{comm.rank}.keras"))
    checkpoint = tf.train.Checkpoint(model=model)
    in_checkpoint = error_of(lambda: checkpoint.write(str(folder / f"checkpoint{comm.rank}")))
    comm.barrier()
    # Alone it trains as plain Keras, but adds up the gradients of a repeated id first.
    plain = rr.load_model(path, communicator=comm.split(comm.rank))
    at_save = apart(model, plain)
    whole_file = keras.models.load_model(path)
    pointed = keras.models.load_model(folder / "point.keras")
    again = rr.load_model(path, replace={"table": rr.ShardedEmbedding})
    rows = again.get_layer("table").weights[0].shape[0]
    missing = error_of(lambda: rr.load_model(path, replace={"tabel": rr.ShardedEmbedding}))
    steps(model)
    steps(again)
    plain.run_eagerly = True
    plain.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    say(
        "saved",
        layer=type(whole_file.get_layer("table")).__module__,
        at_save=at_save,
        pointed=max(
            float(np.abs(np.asarray(a) - b).max())
            for a, b in zip(pointed.weights, whole_file.weights, strict=True)
        ),
        plain=apart(model, plain),
        again=max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max())
            for a, b in zip(
                [*again.weights, *again.optimizer.variables],
                [*model.weights, *model.optimizer.variables],
                strict=True,
            )
        ),
        rows=rows,
        outside=outside,
        in_checkpoint=in_checkpoint,
        missing=missing,
    )


def backed_up(folder):
    """A job that ended after one of two epochs, and is started again."""
    ids, targets = data()

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": 2}
    whole_run = sharded()
    rr.fit(whole_run, ids, targets, **options)
    first = sharded()
    backup = str(folder / "backup")
    with contextlib.suppress(KeyboardInterrupt):
        rr.fit(first, ids, targets, backup_dir=backup, callbacks=[Stop()], **options)
    comm.barrier()
    second = sharded()
    rr.fit(second, ids, targets, backup_dir=backup, **options)
    pairs = zip(
        [*whole_run.weights, *whole_run.optimizer.variables],
        [*second.weights, *second.optimizer.variables],
        strict=True,
    )
    say(
        "backed up",
        apart=max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs),
        steps=int(second.optimizer.iterations),
    )


SGD, partial = keras.optimizers.SGD, functools.partial

CASES = {
    "table": lambda: trained("table"),
    "joined": lambda: trained("joined", fit=joined),
    "adagrad": lambda: trained("adagrad", optimizer=lambda: keras.optimizers.Adagrad(0.5)),
    "accumulated": accumulated,
    "experts 5": lambda: experts("experts 5", 5, 4),
    "experts 33": lambda: experts("experts 33", 33, 33),
    "local experts": local_experts,
    "scaled": scaled,
    "refused": refused,
    "local backup": local_backup,
    "drawn": drawn,
    "halves": halves,
    "looked up": looked_up,
    "evaluated": evaluated,
    "clipnorm": lambda: trained("clipnorm", optimizer=partial(SGD, 0.5, clipnorm=0.01)),
    "global clipnorm": lambda: trained(
        "global clipnorm", optimizer=partial(SGD, 0.5, global_clipnorm=0.01)
    ),
}
WITH_FILES = {"saved": saved, "backed up": backed_up}

# Not on 2 ranks, to save time.
RARE = ["joined", "adagrad", "accumulated", "clipnorm", "experts 33"]

usual = [name for name in (*CASES, *WITH_FILES) if comm.size > 2 or name not in RARE]
chosen = sys.argv[1:] or usual
for name in chosen:
    if name in CASES:
        CASES[name]()
    else:
        place = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
        WITH_FILES[name](pathlib.Path(place))
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(place)
