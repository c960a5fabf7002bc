"""Models with parts train, are evaluated, saved and loaded as those of one process are.

Plain Keras says what is right. On 2 ranks few steps are traced, since they take less time eagerly.
"""

import contextlib
import functools
import itertools
import os
import re
import signal
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ArrayError, ConfigError
from tests.programs.shared import built, digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SGD, Dense, Input, Table = (
    keras.optimizers.SGD,
    keras.layers.Dense,
    keras.Input,
    rr.ShardedEmbedding,
)
ROWS, WIDTH = 1003, 4
# The last batch has one row: all shares but one are empty.
COUNT, BATCH = 65, 64


def on_2_and_3(function):
    return pytest.mark.parametrize("size", [2, in_full(3)])(on_ranks()(function))


def data(count=COUNT, seed=0):
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, ROWS, (count, 3))
    ids[::2, 0] = 5  # on all ranks, and repeated
    return ids, generator.normal(size=(count, 1)).astype("float32")


def whole(variable):
    """The value of a table whose rows are dealt out, or of a variable that is no table."""
    own, comm = np.asarray(variable), rr.init()
    pieces = comm.all_gather(np.ascontiguousarray(own))
    counts = comm.all_gather_object(len(own))
    found = np.empty((sum(counts), *own.shape[1:]), own.dtype)
    for rank, piece in enumerate(np.split(pieces, np.cumsum(counts)[:-1])):
        found[rank :: comm.size] = piece
    return found


def make_model(kind, **options):
    keras.utils.set_random_seed(3)
    table, inputs = kind(ROWS, WIDTH, name="table", **options), Input((3,), dtype="int64")
    hidden = keras.layers.Flatten()(table(inputs))
    return keras.Model(inputs, Dense(1, name="top")(Dense(3, name="middle")(hidden)))


def sharded(inner=None, *, run_eagerly=None, **options):
    model = make_model(Table)
    optimizer = rr.DistributedOptimizer(inner or SGD(0.5, momentum=0.5), **options)
    is_eager = rr.size() == 2 if run_eagerly is None else run_eagerly
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=is_eager)
    return built(model, np.zeros((1, 3), "int64"), np.zeros((1, 1)))


def twin_of(model, optimizer=None):
    """The same in plain Keras, with its initial values; its few steps are not worth tracing."""
    twin = make_model(keras.layers.Embedding)
    twin.set_weights([whole(v) if "table" in v.path else v.numpy() for v in model.weights])
    chosen = optimizer or SGD(0.5, momentum=0.5)
    twin.compile(chosen, "mse", metrics=["mae"], run_eagerly=True)
    return twin


def state(model):
    return [*model.weights, *model.optimizer.variables]


def apart(model, other):
    """The largest difference of weights and optimizers' states; of a whole model too."""
    pairs = zip(state(model), state(other), strict=True)
    values = ((one if one.shape == two.shape else whole(one), two) for one, two in pairs)
    return max(np.abs(np.asarray(one) - np.asarray(two)).max() for one, two in values)


def fit(model, ids, targets, epochs=2, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": epochs, **options}
    train = rr.fit if isinstance(model.optimizer, rr.DistributedOptimizer) else keras.Model.fit
    return train(model, ids, targets, **options)


def fit_joined(model, ids, targets):
    """Each global batch divided by hand, all of the last one on the last rank."""
    size, rank = rr.size(), rr.rank()

    def own():
        for first, end in itertools.pairwise([0, BATCH, COUNT]):
            start, stop = (first + (end - first) * r // size for r in (rank, rank + 1))
            if stop > start:
                yield ids[start:stop], targets[start:stop]

    spec = (tf.TensorSpec((None, 3), tf.int64), tf.TensorSpec((None, 1), tf.float32))
    dataset = tf.data.Dataset.from_generator(own, output_signature=spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(list(own()))))
    rr.fit(model, dataset, per_rank_data=True, epochs=2, verbose=0)


CLIPPED = functools.partial(SGD, 0.5, global_clipnorm=0.01)


@pytest.mark.parametrize(
    ("size", "make", "train"),
    [
        (2, None, fit),
        (2, CLIPPED, fit),
        in_full(3, None, fit),
        in_full(3, None, fit_joined),
        in_full(3, CLIPPED, fit),
        in_full(3, functools.partial(SGD, 0.5, clipnorm=0.01), fit),
        in_full(3, functools.partial(keras.optimizers.Adagrad, 0.5), fit),
    ],
)
@on_ranks()
def test_a_table_in_parts_trains_as_a_whole_one(make, train):
    model = sharded(make and make(), run_eagerly=rr.size() == 2 and make is not None)
    # Plain Keras squares the gradients of a repeated id one by one.
    alone = make and rr.DistributedOptimizer(make(), rr.init().split(rr.rank()))
    twin, before = twin_of(model, alone), whole(model.weights[0])
    ids, targets = data()
    train(model, ids, targets)
    twin.fit(ids, targets, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert apart(model, twin) < 5e-6
    moved = np.nonzero((before != whole(model.weights[0])).any(1))[0]
    assert moved.tolist() == np.unique(ids).tolist()
    assert model.weights[0].shape[0] == -(-(ROWS - rr.rank()) // rr.size())
    return digest(model.weights[1:])


@pytest.mark.full
@on_ranks(3)
def test_accumulated_steps_count_alike_as_in_keras():
    """Of 64 rows and of one: in a step of them all, that one row weighs as much as the 64."""
    model = sharded(SGD(0.5), gradient_accumulation_steps=2)
    twin = twin_of(model, SGD(0.5))
    fit(model, *data(), epochs=1)
    weights = np.full(COUNT, COUNT / 2 / BATCH)
    weights[BATCH:] = COUNT / 2 / (COUNT - BATCH)
    fit(twin, *data(), epochs=1, batch_size=COUNT, sample_weight=weights)
    assert apart(model, twin) < 2e-6


class Experts(rr.parts.PartLayer):
    """One expert for each rank; a row goes to that of its first feature."""

    run = staticmethod(rr.parts.in_parts)

    def build(self, shape):
        self.expert = self.add_part((rr.size(), shape[-1]), "ones")

    def call(self, rows):
        chosen = tf.cast(rows[:, 0], tf.int32) % rr.size()
        order = tf.argsort(chosen, stable=True)
        counts = tf.math.bincount(chosen, minlength=rr.size())

        def ask(rows):
            sent, received = rr.all_to_all(tf.gather(rows, order), counts)
            back, _ = rr.all_to_all(sent * self.expert[0], received)
            return tf.gather(back, tf.argsort(order))

        return tf.ensure_shape(self.run(ask, rows), rows.shape)


class LocalExperts(Experts):
    """The same by hand, with local variables."""

    run = staticmethod(lambda ask, rows: ask(rows))

    def build(self, shape):
        self.expert = self.add_weight(shape=(1, shape[-1]), initializer="ones")


class PlainExperts(keras.layers.Layer):
    """All experts in one process."""

    def build(self, shape):
        self.expert = self.add_weight(shape=(rr.size(), shape[-1]), initializer="ones")

    def call(self, rows):
        return rows * tf.gather(self.expert, tf.cast(rows[:, 0], tf.int32) % rr.size())


def with_experts(layer, wrap=rr.DistributedOptimizer, run_eagerly=True):
    start = Dense(2, use_bias=False, kernel_initializer="identity")
    model = keras.Sequential([Input((2,)), start, layer])
    model.compile(wrap(SGD(0.125)), "mse", run_eagerly=run_eagerly)
    return model


@pytest.mark.parametrize(
    ("size", "count", "batch"), [(2, 5, 4), in_full(3, 5, 4), in_full(3, 33, 33)]
)
@on_ranks()
def test_experts_learn_from_all_rows_whatever_the_shares(count, batch):
    """Rows are powers of two, so that all sums are exact."""
    rows = np.array([[i % rr.size(), 2.0 ** (i % 3)] for i in range(count)], "float32")
    model = with_experts(Experts(), run_eagerly=rr.size() == 2)
    alone = with_experts(PlainExperts(), lambda optimizer: optimizer)
    options = {"x": rows, "y": rows * 0, "batch_size": batch, "shuffle": False, "verbose": 0}
    rr.fit(model, **options)
    alone.fit(**options)
    (start, own), (start_alone, experts) = model.get_weights(), alone.get_weights()
    moved = np.abs(experts[rr.rank()] - 1).max()
    assert moved > 0
    assert np.abs(own[0] - experts[rr.rank()]).max() < 1e-6 * max(1.0, moved)
    assert np.abs(start - start_alone).max() < 1e-6 * max(1.0, moved)


@on_ranks(2)
def test_local_weights_that_other_ranks_use_are_refused_in_uneven_steps():
    model = with_experts(layer := LocalExperts())
    model.optimizer.register_local_var(layer.expert)
    rows = np.ones((5, 2), "float32")
    with pytest.raises(ConfigError, match=r"rr\.parts\.PartLayer\.add_part"):
        rr.fit(model, rows, rows, verbose=0)


@on_ranks(2)
def test_local_weights_are_not_backed_up_for_one_rank_alone_and_not_warned_of():
    """Training without a backup warns of none."""
    model = keras.Sequential([Input((2,)), Dense(1, use_bias=False)])
    optimizer = rr.DistributedOptimizer(SGD(0.5), local_variables=model.trainable_variables)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.layers[0].set_weights([np.full((2, 1), float(rr.rank()))])
    rows = np.ones((8, 2), "float32")
    train = functools.partial(rr.fit, model, rows, rows[:, :1], batch_size=2, verbose=0)
    with pytest.raises(ConfigError, match=r"rr\.parts\.PartLayer\.add_part"):
        train(backup_dir="never written")
    with warnings.catch_warnings():
        warnings.simplefilter("error", rr.ParityWarning)
        train()


@on_2_and_3
def test_local_gradients_may_be_those_of_the_mean():
    """As Horovod's are, with scale_local_gradients."""
    for divisor in (1, rr.size()):
        variable = keras.Variable([0.0], name="own")
        scales = {"scale_local_gradients": divisor > 1}
        optimizer = rr.DistributedOptimizer(SGD(1.0), local_variables=[variable], **scales)
        optimizer.apply([tf.constant([6.0 * (rr.rank() + 1)])], [variable])
        assert float(variable[0]) == pytest.approx(-6.0 * (rr.rank() + 1) / divisor)


def table_of(rows, width=2, **options):
    """A table whose vectors are all four times their id."""
    table = Table(rows, width, **options)
    table.build()
    part = table.weights[0]
    ids = np.arange(part.shape[0]) * rr.size() + rr.rank()
    part.assign(np.repeat(ids[:, None], width, 1) * 4.0)
    return table


@on_2_and_3
def test_a_table_is_the_same_whatever_the_number_of_ranks():
    tables = []
    for group in (rr.init(), rr.init().split(rr.rank())):
        seeded = keras.initializers.RandomUniform(seed=7)
        tables.append(Table(2050, 2, embeddings_initializer=seeded, communicator=group))
        tables[-1].build()
    assert (whole(tables[0].weights[0]) == np.asarray(tables[1].weights[0])).all()


@on_ranks(2)
def test_an_infinity_in_one_piece_is_one_on_all_ranks():
    """All skip that step, and halve their loss scales."""
    table = Table(2, 2, embeddings_initializer="zeros")
    table.build()
    shared = keras.Variable([0.0], name="shared")
    scaled = keras.optimizers.LossScaleOptimizer(SGD(1.0, global_clipnorm=5.0), initial_scale=8.0)
    optimizer = rr.DistributedOptimizer(scaled)
    variables = [table.weights[0], shared]
    # Without the scale, 4 after the first step, 1 + 2 * 2 elements are 8: clipped to a norm of 5.
    once = 8.0 * 5 / (8 * 5**0.5)
    for piece, moved in ((np.inf if rr.rank() == 1 else 8.0, 0.0), (8.0 * 4, -once)):
        optimizer.apply([tf.fill((1, 2), piece), tf.constant([8.0 * 4])], variables)
        values = [float(shared[0]), float(table.weights[0][0, 0]), float(scaled.dynamic_scale)]
        assert values == pytest.approx([moved, moved, 4.0])


@pytest.mark.parametrize(("bad", "wrap"), [(-1, lambda call: call), (ROWS, tf.function)])
@on_ranks(2)
def test_an_id_out_of_range_is_an_error_on_all_ranks(bad, wrap):
    group = rr.init().split(0)  # which breaks alone
    table = Table(ROWS, WIDTH, name="table", communicator=group)
    table.build()
    text = f"rank 1 asks for id {bad} of table, whose ids are 0 to 1002"
    with pytest.raises(ArrayError, match=text):
        wrap(table)(tf.constant([[0, bad if rr.rank() == 1 else 1]]))


@on_ranks(2)
def test_what_cannot_be_had_in_parts_is_refused():
    table, one = Table(ROWS, 2), tf.constant([1])
    with rr.DistributedGradientTape() as tape:
        total = tf.reduce_sum(table(one))
    limited = Table(ROWS, 2, embeddings_constraint=keras.constraints.MaxNorm())
    compiled = tf.function(Table(ROWS, 2), jit_compile=True)
    for text, action, *arguments in (
        ("cannot divide the 1 rows", Table(1, 2).build),
        ("Use DistributedOptimizer with a plain tape", tape.gradient, total, table.weights),
        ("jit_compile=False", compiled, one),
        ("got a constraint", limited.build),
        ("Adafactor", sharded, keras.optimizers.Adafactor(0.1)),
    ):
        with pytest.raises(ConfigError, match=text):
            action(*arguments)


@pytest.mark.full
@on_ranks(4)
def test_a_table_of_another_group_than_the_optimizers_is_refused():
    model = make_model(Table, communicator=rr.init().split(rr.rank() % 2))
    model.compile(rr.DistributedOptimizer(SGD(0.5)), "mse")
    with pytest.raises(ConfigError, match="Pass the layer and the optimizer one communicator"):
        fit(model, *data(8))


@on_ranks(2)
def test_tables_of_unlike_widths_are_looked_up_in_one_exchange():
    """With gradients, no ids of a rank, and all ids of one rank."""
    first, second = table_of(10), table_of(7, 3)
    ids = [[1, 1], [9, 3]], [6] if rr.rank() else []
    with tf.GradientTape() as tape:
        found = rr.parts.look_up(
            {first: tf.constant(ids[0]), second: tf.constant(ids[1], tf.int64)}
        )
        loss = sum(tf.reduce_sum(rows * 6.0) for rows in found.values())
    slices = tape.gradient(loss, [first.weights[0].value, second.weights[0].value])
    assert [np.asarray(rows).tolist() for rows in found.values()] == [
        [[[4.0] * 2] * 2, [[36.0] * 2, [12.0] * 2]],
        [[24.0] * 3] * rr.rank(),
    ]
    # Of 6 times the sum of all elements, the mean over both ranks; rows 0, 2, ... and 1, 3, ...
    totals = [[[0.0] * 5, [0.0, 0.0, 0.0, 9.0]], [[24.0, 12.0, 0.0, 0.0, 12.0], [0.0] * 3]]
    sums = [np.asarray(tf.convert_to_tensor(gradient)).sum(1).tolist() for gradient in slices]
    assert sums == totals[rr.rank()]


@on_2_and_3
def test_vectors_of_several_ids_are_combined():
    ids = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    weights = tf.ragged.constant([[1.0, 3.0], [], [2.0]])
    for combiner, plain, weighted in (
        ("sum", [12, 0, 12], [28, 0, 24]),
        ("mean", [6, 0, 12], [7, 0, 12]),
        ("sqrtn", [12 / 2**0.5, 0, 12], [28 / 10**0.5, 0, 12]),
    ):
        table = table_of(5, 1, combiner=combiner)
        assert table(ids).numpy()[:, 0] == pytest.approx(plain)
        assert table(ids, weights).numpy()[:, 0] == pytest.approx(weighted)


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.table, self.top = Table(5, 1, combiner="sum"), Dense(1)

    def call(self, inputs):
        numbers, ids = inputs
        return self.top(tf.concat([numbers, self.table(ids)], 1))


@on_2_and_3
def test_a_table_masks_zero_and_is_built_in_a_trace():
    """Keras learns its shapes by a trace without variables, and warns where that fails."""
    masked = Table(5, 1, combiner="sum", mask_zero=True, embeddings_initializer="ones")
    assert masked(tf.constant([[0, 2, 0], [1, 2, 3]])).numpy().tolist() == [[1.0], [3.0]]
    ids = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tf.function(Unbuilt())([tf.ones((3, 1)), ids])


@on_2_and_3
def test_ranks_without_a_batch_answer_in_evaluation():
    """Shares are of unlike lengths, or empty; ranks that are done answer the others."""
    model = sharded()
    twin = twin_of(model)
    many, few = data(17, 1), data(1, 1)
    many_batches, few_batches = (
        tf.data.Dataset.from_tensor_slices(arrays).batch(8) for arrays in (many[0], few)
    )
    for (ids, targets), evaluated, predicted in (
        (many, rr.evaluate(model, *many, batch_size=4), rr.predict(model, many_batches)),
        (few, rr.evaluate(model, few_batches), rr.predict(model, few[0])),
    ):
        expected = twin.evaluate(ids, targets, batch_size=4, verbose=0)
        assert np.abs(np.subtract(evaluated, expected)).max() < 1e-5
        assert np.abs(predicted - twin(ids)).max() < 1e-5
    options = {"validation_data": data(9, 2), "validation_batch_size": 4, "epochs": 1}
    own, expected = (fit(one, *data(8), **options).history["val_loss"] for one in (model, twin))
    assert own == pytest.approx(expected, abs=1e-5)


@on_2_and_3
def test_it_is_saved_whole_and_goes_on_from_the_file(tmp_path):
    """In mid-training, by three ways; it goes on as if it had not been interrupted."""
    path, point = str(tmp_path / "model.keras"), str(tmp_path / "point.keras")
    model = sharded(keras.optimizers.Adam(0.01))
    fit(model, *data(), epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(point)])
    rr.on_rank_zero(lambda: model.save(path))
    with pytest.raises(ConfigError, match=r"rr\.on_rank_zero\(lambda: model\.save\(path\)\)"):
        model.save(tmp_path / f"own{rr.rank()}.keras")
    with pytest.raises(ConfigError):
        tf.train.Checkpoint(model=model).write(str(tmp_path / f"checkpoint{rr.rank()}"))
    rr.init().barrier()
    # Alone it trains as plain Keras, but adds up the gradients of a repeated id first.
    alone = rr.load_model(path, communicator=rr.init().split(rr.rank()))
    assert apart(model, alone) == 0.0
    of_file, of_point = (keras.models.load_model(name) for name in (path, point))
    assert type(of_file.get_layer("table")).__module__ == "keras.src.layers.core.embedding"
    assert apart(of_point, of_file) == 0.0
    again = rr.load_model(path, replace={"table": Table})
    assert again.weights[0].shape[0] == -(-(ROWS - rr.rank()) // rr.size())
    with pytest.raises(ConfigError):
        rr.load_model(path, replace={"tabel": Table})
    for one in (model, again):
        fit(one, *data(), epochs=1)
    alone.run_eagerly = True
    alone.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)
    assert apart(model, alone) < 2e-6
    assert apart(again, model) == 0.0


@pytest.mark.full
@on_2_and_3
def test_a_job_that_is_started_again_ends_as_one_that_was_not_disturbed(tmp_path):
    """It ended after one of two epochs."""

    def stop(epoch, logs):
        if epoch == 1:
            raise KeyboardInterrupt

    undisturbed, first, second = (sharded() for _ in range(3))
    backup = {"backup_dir": str(tmp_path / "backup")}
    stops = keras.callbacks.LambdaCallback(on_epoch_begin=stop)
    fit(undisturbed, *data())
    with contextlib.suppress(KeyboardInterrupt):
        fit(first, *data(), callbacks=[stops], **backup)
    rr.init().barrier()
    fit(second, *data(), **backup)
    assert apart(undisturbed, second) == 0.0
    assert int(second.optimizer.iterations) == 4


class Dies(keras.layers.Layer):
    """Kills rank 1 in the sixth of its passes."""

    passes = 0

    def call(self, inputs):
        def count(values):
            self.passes += 1
            if self.passes == 6 and rr.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return values

        outputs = tf.numpy_function(count, [inputs], inputs.dtype)
        return inputs + 0 * tf.stop_gradient(tf.ensure_shape(outputs, inputs.shape))


def lose_rank_1(kind):
    """In a step of a model in parts."""
    comm = data = rr.init()
    begin, options = [Input((2,))], {"batch_size": 16, "verbose": 0}
    x, y = np.ones((128, 2), "float32"), np.ones((128, 1), "float32")
    if kind == "pipeline":
        stages = [[*begin, Dense(2)], [Dense(2), Dies(), Dense(1)]]
        if comm.size == 3:  # The second is in the middle.
            stages.append([Dense(1)])
        pipeline = rr.Pipeline([lambda layers=layers: layers for layers in stages], 4)
        pipeline.compile("sgd", "mse")
        pipeline.fit(x, y, **options)
        return
    if kind == "split":
        data, pair = comm.split(comm.rank), {"communicator": comm}
        layers = [*begin, rr.ColumnParallelDense(2, **pair), rr.RowParallelDense(2, **pair)]
    elif kind == "table":
        layers = [Input((2,), dtype="int64"), Table(16, 2), keras.layers.Flatten()]
    else:
        layers = [*begin, Experts()]
    model = keras.Sequential([*layers, Dies(), Dense(1)])
    model.compile(rr.DistributedOptimizer(SGD(0.1), data), "mse")
    rr.fit(model, x, y, communicator=data, **options)


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (2, "split"),
        in_full(3, "pipeline"),
        in_full(2, "table"),
        in_full(2, "experts"),
        in_full(4, "pipeline"),
    ],
)
def test_a_rank_that_dies_in_a_step_is_named_by_all_others(ranks, size, kind):
    with pytest.raises(AssertionError) as raised:
        ranks(size, lose_rank_1, kind)
    _, *texts = str(raised.value).split("---- rank ")
    for rank in {*range(size)} - {1}:
        assert re.search(f"(?s)PeerLostError: rank {rank} of {size} .*rank 1", texts[rank])
