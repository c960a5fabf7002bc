"""`update_rows="touched"`: rows beside variables of their own, and rings beside one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers
from keras.optimizers import SGD, Adam, schedules

import ringreduce
import ringreduce.keras as rr
from ringreduce import ConfigError, MismatchError
from ringreduce.keras.optimizers_in import state_for
from tests.models import EAGERLY
from tests.programs.shared import difference, digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

ROWS, WIDTH = 8, 2
RATE, BETA, RHO, EPSILON = 0.5, 0.5, 0.75, 2.0**-10
# Row 0 never; 6 in most steps, and repeated; no row at all; rows whose gradients cancel out.
STEPS = [
    ([1, 6, 1], [1.0, 2.0, 4.0]),
    ([], []),
    ([6], [-3.0]),
    ([6, 2, 2, 1, 1], [1.0, 2.0, -1.0, 5.0, -5.0]),
    ([2, 3, 4, 5, 6, 7], [1.0, -1.0, 2.0, -2.0, 4.0, -4.0]),
    ([1], [8.0]),
]


def touched(inner, **options):
    return rr.DistributedOptimizer(inner, update_rows="touched", **options)


def slices(ids, values):
    """A sparse gradient; each row has its value and that plus one, or zeros for a 0."""
    values = np.array(values, "float64").reshape(-1, 1)
    rows = np.concatenate([values, values + np.sign(np.abs(values))], 1)
    return sparse(tf.constant(rows), tf.constant(np.array(ids, "int64")))


def sparse(values, indices):
    return tf.IndexedSlices(values, indices, tf.constant([ROWS, WIDTH], tf.int64))


def rows_of(gradient):
    """By row with a gradient, that."""
    found = {}
    for index, values in zip(gradient.indices.numpy(), gradient.values.numpy(), strict=True):
        found[int(index)] = found.get(int(index), 0.0) + values
    return {index: row for index, row in found.items() if row.any()}


OF_ADAM = {"beta_1": BETA, "beta_2": RHO, "epsilon": EPSILON}
OPTIMIZERS = {
    "SGD": lambda: SGD(RATE),
    "momentum": lambda: SGD(RATE, BETA),
    "nesterov": lambda: SGD(RATE, BETA, nesterov=True),
    "Adam": lambda: Adam(RATE, **OF_ADAM),
    "AMSGrad": lambda: Adam(RATE, amsgrad=True, **OF_ADAM),
    "AdamW": lambda: optimizers.AdamW(RATE, weight_decay=0.25, **OF_ADAM),
    "Adagrad": lambda: optimizers.Adagrad(RATE, 0.25, EPSILON),
    "Adadelta": lambda: optimizers.Adadelta(RATE, RHO, EPSILON),
    "RMSprop": lambda: optimizers.RMSprop(RATE, RHO, epsilon=EPSILON),
    "centered": lambda: optimizers.RMSprop(RATE, RHO, BETA, EPSILON, True),
    "Adamax": lambda: optimizers.Adamax(RATE, **OF_ADAM),
    "Nadam": lambda: optimizers.Nadam(RATE, **OF_ADAM),
    "Lion": lambda: optimizers.Lion(RATE, BETA, RHO),
    "Ftrl": lambda: optimizers.Ftrl(RATE, -0.5, 0.25, 0.25),
    "loss scale": lambda: loss_scale(Adam(RATE, **OF_ADAM), 1.0),
}


def loss_scale(inner, initial_scale):
    return optimizers.LossScaleOptimizer(inner, initial_scale=initial_scale)


def table_and_bias():
    start = np.arange(1.0, ROWS * WIDTH + 1).reshape(ROWS, WIDTH)
    return (
        keras.Variable(start, name="table", dtype="float64"),
        keras.Variable(np.ones(3), name="bias", dtype="float64"),
    )


def moved_rows(table, start):
    return np.nonzero((table.numpy() != start).any(1))[0].tolist()


def assert_equal(variables, others):
    for variable, other in zip(variables, others, strict=True):
        assert (variable.numpy() == other.numpy()).all(), variable.name


def stepping(optimizer, variables, is_graph):
    """The function that applies a sparse and a dense gradient; a graph takes any number of rows."""
    optimizer.build(variables)
    parts = [tf.TensorSpec([None, WIDTH], tf.float64), tf.TensorSpec([None], tf.int64)]

    def step(values, indices, dense):
        optimizer.apply([sparse(values, indices), dense], variables)

    if is_graph:
        step = tf.function(step, input_signature=[*parts, tf.TensorSpec([3], tf.float64)])
    return lambda gradient, dense: step(gradient.values, gradient.indices, dense)


@pytest.mark.parametrize(
    ("name", "is_graph"),
    [
        *((name, False) for name in OPTIMIZERS),
        *((name, True) for name in ("momentum", "loss scale")),
        *(in_full(name, True) for name in ("AdamW", "centered", "Nadam", "Ftrl")),
    ],
)
def test_each_row_is_updated_as_if_it_were_alone(world_of_one, name, is_graph):
    """As a variable of its own, which plain Keras updates in the steps in which it has a gradient.

    The values of the others do not change.
    """
    (table, bias), (_, plain_bias) = table_and_bias(), table_and_bias()
    rows = [keras.Variable(row, name="row", dtype="float64") for row in table.numpy()]
    optimizer, plain = touched(OPTIMIZERS[name]()), OPTIMIZERS[name]()
    run = stepping(optimizer, [table, bias], is_graph)
    plain.build([plain_bias, *rows])
    values = [table, *state_for(optimizer.inner_optimizer, table)]
    by_row = [[row, *state_for(plain, row)] for row in rows]
    for number, (ids, factors) in enumerate(STEPS, 1):
        gradient, dense = slices(ids, factors), tf.constant([1.0, 0.0, -number], tf.float64)
        before = [value.numpy() for value in values]
        run(gradient, dense)
        gradients = rows_of(gradient)
        moving = [rows[index] for index in gradients]
        plain.apply([dense, *map(tf.constant, gradients.values())], [plain_bias, *moving])
        others = [index for index in range(ROWS) if index not in gradients]
        for value, old, alone in zip(values, before, zip(*by_row, strict=True), strict=True):
            np.testing.assert_allclose(value.numpy(), np.stack(alone), 1e-12, 1e-12)
            assert (value.numpy()[others] == old[others]).all()
    assert int(optimizer.iterations) == len(STEPS)
    # TensorFlow simplifies graphs.
    np.testing.assert_allclose(bias.numpy(), plain_bias.numpy(), 1e-14 if is_graph else 0)


def test_no_step_passes_over_the_whole_table(world_of_one):
    """Else its time would depend on the number of rows."""
    table = keras.Variable(tf.zeros((ROWS, WIDTH)), name="table")
    optimizer = touched(optimizers.AdamW(RATE, amsgrad=True, global_clipnorm=1.0))
    optimizer.build([table])

    @tf.function
    def step(values, indices):
        gradient = values + tf.gather(table.value, indices)  # as a model does
        optimizer.apply([sparse(gradient, indices)], [table])

    graph = step.get_concrete_function(tf.ones((3, WIDTH)), tf.constant([1, 5, 1])).graph
    operations = graph.get_operations()
    shapes = {tuple(out.shape) for op in operations for out in op.outputs if out.shape.rank}
    assert (3, WIDTH) in shapes
    assert (ROWS, WIDTH) not in shapes
    # Keras's embedding reads the table whole, which would copy it.
    assert "DisableCopyOnRead" in {op.type for op in operations}


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_without_momentum_it_is_the_dense_update_exactly(world_of_one, name):
    make = OPTIMIZERS[name]
    (table, _), (other, _) = table_and_bias(), table_and_bias()
    optimizer, dense = touched(make()), rr.DistributedOptimizer(make())
    for ids, values in STEPS:
        optimizer.apply([slices(ids, values)], [table])
        dense.apply([slices(ids, values)], [other])
    assert_equal([table, *optimizer.variables], [other, *dense.variables])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adam(RATE, clipnorm=0.5),
        lambda: SGD(RATE, global_clipnorm=0.5),
        lambda: SGD(RATE, clipvalue=0.5),
        lambda: SGD(schedules.ExponentialDecay(0.5, 1, 0.5), 0.5, weight_decay=0.25),
        lambda: loss_scale(SGD(RATE, global_clipnorm=0.5), 4.0),
        lambda: SGD(RATE, loss_scale_factor=4.0),
    ],
)
def test_rows_of_a_first_step_move_as_in_the_dense_update(world_of_one, make):
    """Norms, decay, rates and scales are Keras's own."""
    (table, bias), (other, other_bias) = table_and_bias(), table_and_bias()
    start, (ids, values) = table.numpy(), STEPS[0]
    gradients = [slices(ids, values), tf.ones(3, tf.float64)]
    touched(make()).apply(gradients, [table, bias])
    dense = [tf.convert_to_tensor(gradients[0]), gradients[1]]
    make().apply(dense, [other, other_bias])
    np.testing.assert_allclose(table.numpy()[[1, 6]], other.numpy()[[1, 6]], 1e-7)
    np.testing.assert_allclose(bias.numpy(), other_bias.numpy(), 1e-7)
    rest = [0, 2, 3, 4, 5, 7]
    assert (table.numpy()[rest] == start[rest]).all()


in_both_ways = pytest.mark.parametrize("is_graph", [False, True])


@in_both_ways
def test_an_infinity_skips_the_step_under_a_loss_scale(world_of_one, is_graph):
    table, bias = table_and_bias()
    inner = loss_scale(Adam(RATE), 4.0)
    optimizer = touched(inner)
    run = stepping(optimizer, [table, bias], is_graph)
    start = table.numpy()
    run(slices([3], [np.inf]), tf.zeros(3, tf.float64))
    assert (table.numpy() == start).all()
    assert (float(inner.dynamic_scale), int(optimizer.iterations)) == (2.0, 0)
    run(slices([3], [2.0]), tf.zeros(3, tf.float64))
    assert moved_rows(table, start) == [3]
    assert int(optimizer.iterations) == 1


def test_a_nan_is_not_taken_for_no_gradient(world_of_one):
    table, _ = table_and_bias()
    touched(SGD(RATE)).apply([slices([3], [np.nan])], [table])
    assert np.isnan(table.numpy()).any(1).tolist() == [index == 3 for index in range(ROWS)]


@in_both_ways
def test_accumulated_steps_touch_the_rows_of_any_of_them(world_of_one, is_graph):
    (table, bias), (other, other_bias) = table_and_bias(), table_and_bias()
    optimizer = touched(SGD(RATE, BETA), gradient_accumulation_steps=2)
    reference = touched(SGD(RATE, BETA))
    reference.build([other, other_bias])
    run = stepping(optimizer, [table, bias], is_graph)
    dense = tf.ones(3, tf.float64)
    for first, second in zip(STEPS[::2], STEPS[1::2], strict=True):
        run(slices(*first), dense)
        run(slices(*second), dense)
        both = slices(first[0] + second[0], first[1] + second[1])
        mean = tf.IndexedSlices(both.values / 2, both.indices, both.dense_shape)
        reference.apply([mean, dense], [other, other_bias])
        assert (table.numpy() == other.numpy()).all()
    assert_equal(optimizer.variables, reference.variables)


def recommender(optimizer, table=None, columns=2, **options):
    """A model of a table and a dense layer."""
    keras.utils.set_random_seed(3)
    layers = [table or keras.layers.Embedding(50, 4), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((columns,), dtype="int64"), *layers])
    model.add(keras.layers.Dense(1))
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def train(model):
    """Return the rows of the table that have changed."""
    table = model.layers[0].weights[0]
    start = table.numpy()
    ids = np.array([[3, 3], [9, 12], [3, 40], [12, 12], [9, 9], [3, 12]])
    targets = np.arange(6.0, dtype="float32").reshape(6, 1)
    model.fit(ids, targets, batch_size=2, epochs=2, shuffle=False, verbose=0)
    return moved_rows(table, start)


def test_fit_updates_the_rows_of_its_data_in_every_way(world_of_one):
    models = []
    for options in (EAGERLY, {"steps_per_execution": 3, "jit_compile": False}):
        models.append(recommender(touched(Adam(RATE)), **options))
        assert train(models[-1]) == [3, 9, 12, 40]
        assert int(models[-1].optimizer.iterations) == 6
    for eager, traced in zip(*(model.weights for model in models), strict=True):
        np.testing.assert_allclose(eager.numpy(), traced.numpy(), 1e-5)


def test_it_works_in_half_precision(world_of_one):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = recommender(touched(Adam(2.0**-6)), **EAGERLY)
    finally:
        keras.config.set_dtype_policy("float32")
    moved = train(model)
    assert set(moved) <= {3, 9, 12, 40}
    assert len(moved) > 1
    assert type(model.optimizer.inner_optimizer).__name__ == "Adam"


def overriding(name):
    """An optimizer whose class has a method of this name, which does what its base does."""
    kept = getattr(SGD, name)
    return type("Own", (SGD,), {name: lambda *inputs, **options: kept(*inputs, **options)})(0.1)


def constrained_table():
    return keras.layers.Embedding(50, 4, embeddings_constraint="non_neg")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *(
            (lambda name=name: touched(overriding(name)), "Own.*or is not known")
            for name in ("update_step", "apply_gradients", "apply")
        ),
        (lambda: touched(optimizers.Muon(0.1)), "Muon.*Use SGD, Adam"),
        (lambda: touched(loss_scale(optimizers.Lamb(0.1), 1.0)), "Lamb"),
        (lambda: touched(SGD(0.1, use_ema=True)), "use_ema"),
        (lambda: touched(SGD(), sparse_as_dense=True), "sparse_as_dense"),
        (
            lambda: rr.DistributedOptimizer(SGD(), update_rows="some"),
            "'some'; accepted: 'all', 'touched'",
        ),
        (
            lambda: train(recommender(touched(SGD(0.1)), constrained_table())),
            "embeddings with a constraint",
        ),
        (lambda: train(recommender(touched(SGD(0.1)), jit_compile=True)), "jit_compile=False"),
    ],
)
def test_what_cannot_be_had_is_refused(world_of_one, call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_gradients_without_rows_are_warned_of_once(world_of_one):
    table = keras.layers.Embedding(50, 4, embeddings_regularizer="l2")
    model = recommender(touched(SGD(2.0**-6)), table)
    with pytest.warns(rr.ParityWarning, match="no gradient of this step has rows") as found:
        model.fit(np.zeros((6, 2)), np.zeros((6, 1)), verbose=0)
    assert [each.filename for each in found] == [__file__]
    model.fit(np.zeros((5, 2)), np.zeros((5, 1)), batch_size=5, verbose=0)


# On rings. One process is an optimizer of a ring of this rank alone.


def alone():
    return ringreduce.Communicator(ringreduce.Config(rank=0, size=1))


@pytest.mark.parametrize(
    ("steps", "moved"),
    [
        (1, [[6, 7], [1, 2], [0, 1, 2, 3, 4, 5], [3]]),
        (2, [[], [1, 2, 6, 7], [], [0, 1, 2, 3, 4, 5]]),
    ],
)
@on_ranks(2)
def test_rows_of_all_ranks_are_touched_as_by_one_process(steps, moved):
    """With integers, exact with momentum 0.5.

    Rows 6 and 7 have momentum after the first step. In the last but one each rank has so many rows
    that the whole table travels; in the last, rank 1 has none.
    """
    table, expected = (keras.Variable(tf.zeros((ROWS, 4)), name="table") for _ in range(2))
    optimizer, reference = (
        touched(SGD(0.5, 0.5), communicator=ring, gradient_accumulation_steps=steps)
        for ring in (rr.init(), alone())
    )
    table_ids = [0, 1, 2, 3, 4, 5]
    seen = []
    for ids in (([6, 6, 7], [7]), ([1, 2], [1]), (table_ids, [*table_ids, 5]), ([3], [])):
        before = table.numpy()
        for applied, variable, factor, rows in (
            (optimizer, table, rr.size(), ids[rr.rank()]),
            (reference, expected, 1, [*ids[0], *ids[1]]),
        ):
            # Whole multiples of the number of ranks, other ones in each row.
            indices = np.array(rows, "int64")
            values = factor * (1.0 + indices[:, None] + np.arange(4)).astype("float32")
            applied.apply([tf.IndexedSlices(values, indices, (ROWS, 4))], [variable])
        seen.append(moved_rows(table, before))
    assert seen == moved
    assert_equal([table, *optimizer.variables], [expected, *reference.variables])
    return digest([table, *optimizer.variables])


@pytest.mark.parametrize("is_sharded", [False, True])
@on_ranks(2)
def test_ranks_without_rows_touch_none(is_sharded):
    """Of 65 rows in batches of 64 most ranks have none in the last one."""
    layer, make, options = keras.layers.Embedding, lambda: SGD(2**-6, momentum=0.5), {}
    if is_sharded:
        layer, make = rr.ShardedEmbedding, lambda: optimizers.Adagrad(2**-6, clipnorm=0.5)
        options = EAGERLY
    generator = np.random.default_rng(0)
    ids = 3 * generator.integers(0, 334, (65, 3))
    targets = generator.normal(size=(65, 1)).astype("float32")
    table, twin = (
        kind(1003, 4, embeddings_initializer="ones", name="table")
        for kind in (layer, keras.layers.Embedding)
    )
    model = recommender(touched(make()), table, 3, **options)
    plain = recommender(touched(make(), communicator=alone()), twin, 3, **EAGERLY)
    how = {"batch_size": 64, "epochs": 2, "shuffle": False, "verbose": 0}
    rr.fit(model, ids, targets, **how)
    plain.fit(ids, targets, **how)
    rows, expected = (layer.weights[0].numpy() for layer in (table, twin))
    if is_sharded:
        expected = expected[rr.rank() :: rr.size()]
    else:
        assert difference(model, plain) < 2e-6
    assert np.abs(rows - expected).max() < 2e-6
    assert ((rows != 1).any(1) == (expected != 1).any(1)).all()
    return digest(model.layers[-1].weights)


@on_ranks(2)
def test_ranks_must_agree_on_it():
    chosen = "all" if rr.rank() == 0 else "touched"
    optimizer = rr.DistributedOptimizer(SGD(0.5), update_rows=chosen)
    with pytest.raises(MismatchError, match="update_rows is 'all' on rank 0"):
        optimizer.build([keras.Variable(tf.zeros((2, 2)))])
