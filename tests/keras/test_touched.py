"""`update_rows="touched"`: what each optimizer does with rows, beside naive twins of them."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
from ringreduce import ConfigError
from ringreduce.keras.wrappable import state_for
from tests.facts import facts_of
from tests.models import EAGERLY
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


@pytest.fixture
def world_of_one():
    """A default communicator of one rank."""
    with ringreduce.init() as communicator:
        yield communicator
    ringreduce.shutdown()


def touched(inner, **options):
    return rr.DistributedOptimizer(inner, update_rows="touched", **options)


def slices(ids, values, dtype="float64"):
    """A sparse gradient; each row has its value and that plus one, or zeros for a 0."""
    values = np.array(values, dtype).reshape(-1, 1)
    whole = np.concatenate([values, values + np.sign(np.abs(values))], 1)
    indices = tf.constant(np.array(ids, "int64"))
    return tf.IndexedSlices(tf.constant(whole), indices, tf.constant([ROWS, WIDTH], tf.int64))


def rows_of(gradient):
    """By row with a gradient, that."""
    found = {}
    for index, values in zip(gradient.indices.numpy(), gradient.values.numpy(), strict=True):
        found[int(index)] = found.get(int(index), 0.0) + values
    return {index: row for index, row in found.items() if row.any()}


# The naive twins change in place one row `w`, with gradient `g` in step t (from 1), and its state.
def sgd(w, g, t):
    w -= RATE * g


def momentum(w, g, t, m):
    m[:] = BETA * m - RATE * g
    w += m


def nesterov(w, g, t, m):
    m[:] = BETA * m - RATE * g
    w += BETA * m - RATE * g


def adam(w, g, t, m, v, largest=None):
    m[:] = BETA * m + (1 - BETA) * g
    v[:] = RHO * v + (1 - RHO) * g * g
    second = v
    if largest is not None:
        largest[:] = second = np.maximum(largest, v)
    w -= RATE * np.sqrt(1 - RHO**t) / (1 - BETA**t) * m / (np.sqrt(second) + EPSILON)


def adamw(w, g, t, m, v):
    w -= 0.25 * RATE * w
    adam(w, g, t, m, v)


def adagrad(w, g, t, total):
    total += g * g
    w -= RATE * g / np.sqrt(total + EPSILON)


def adadelta(w, g, t, grads, deltas):
    grads[:] = RHO * grads + (1 - RHO) * g * g
    delta = -np.sqrt(deltas + EPSILON) / np.sqrt(grads + EPSILON) * g
    deltas[:] = RHO * deltas + (1 - RHO) * delta * delta
    w += RATE * delta


def rmsprop(w, g, t, v):
    v[:] = RHO * v + (1 - RHO) * g * g
    w -= RATE * g / np.sqrt(v + EPSILON)


def centered(w, g, t, v, m, mean):
    v[:] = RHO * v + (1 - RHO) * g * g
    mean[:] = RHO * mean + (1 - RHO) * g
    m[:] = BETA * m + RATE * g / np.sqrt(v - mean * mean + EPSILON)
    w -= m


def adamax(w, g, t, m, u):
    m[:] = BETA * m + (1 - BETA) * g
    u[:] = np.maximum(RHO * u, np.abs(g))
    w -= RATE * m / ((1 - BETA**t) * (u + EPSILON))


def nadam(w, g, t, m, v):
    mu = [BETA * (1 - 0.5 * 0.96**step) for step in range(1, t + 2)]
    m[:] = BETA * m + (1 - BETA) * g
    v[:] = RHO * v + (1 - RHO) * g * g
    mean = mu[t] * m / (1 - np.prod(mu)) + (1 - mu[t - 1]) * g / (1 - np.prod(mu[:t]))
    w -= RATE * mean / (np.sqrt(v / (1 - RHO**t)) + EPSILON)


def lion(w, g, t, m):
    w -= RATE * np.sign(BETA * m + (1 - BETA) * g)
    m[:] = RHO * m + (1 - RHO) * g


def ftrl(w, g, t, total, linear):
    before, after = np.sqrt(total), np.sqrt(total + g * g)
    linear += g - (after - before) / RATE * w
    clipped = np.clip(linear, -0.25, 0.25)
    w[:] = (clipped - linear) / (after / RATE)
    total += g * g


OF_ADAM = {"beta_1": BETA, "beta_2": RHO, "epsilon": EPSILON}
OPTIMIZERS = {
    "SGD": (sgd, lambda: keras.optimizers.SGD(RATE)),
    "momentum": (momentum, lambda: keras.optimizers.SGD(RATE, BETA)),
    "nesterov": (nesterov, lambda: keras.optimizers.SGD(RATE, BETA, nesterov=True)),
    "Adam": (adam, lambda: keras.optimizers.Adam(RATE, **OF_ADAM)),
    "AMSGrad": (adam, lambda: keras.optimizers.Adam(RATE, amsgrad=True, **OF_ADAM)),
    "AdamW": (adamw, lambda: keras.optimizers.AdamW(RATE, weight_decay=0.25, **OF_ADAM)),
    "Adagrad": (adagrad, lambda: keras.optimizers.Adagrad(RATE, 0.25, EPSILON)),
    "Adadelta": (adadelta, lambda: keras.optimizers.Adadelta(RATE, RHO, EPSILON)),
    "RMSprop": (rmsprop, lambda: keras.optimizers.RMSprop(RATE, RHO, epsilon=EPSILON)),
    "centered": (centered, lambda: keras.optimizers.RMSprop(RATE, RHO, BETA, EPSILON, True)),
    "Adamax": (adamax, lambda: keras.optimizers.Adamax(RATE, **OF_ADAM)),
    "Nadam": (nadam, lambda: keras.optimizers.Nadam(RATE, **OF_ADAM)),
    "Lion": (lion, lambda: keras.optimizers.Lion(RATE, BETA, RHO)),
    "Ftrl": (
        ftrl,
        lambda: keras.optimizers.Ftrl(
            RATE, initial_accumulator_value=0.25, l1_regularization_strength=0.25
        ),
    ),
    "loss scale": (
        adam,
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(RATE, **OF_ADAM), initial_scale=1.0
        ),
    ),
}


def table_and_bias():
    start = np.arange(1.0, ROWS * WIDTH + 1).reshape(ROWS, WIDTH)
    return (
        keras.Variable(start, name="table", dtype="float64"),
        keras.Variable(np.ones(3), name="bias", dtype="float64"),
    )


def in_graph(step):
    """With any number of rows, as in training."""
    parts = [tf.TensorSpec([None, WIDTH], tf.float64), tf.TensorSpec([None], tf.int64)]

    @tf.function(input_signature=[*parts, tf.TensorSpec([3], tf.float64)])
    def function(values, indices, dense):
        step(tf.IndexedSlices(values, indices, tf.constant([ROWS, WIDTH], tf.int64)), dense)

    return lambda gradient, dense: function(gradient.values, gradient.indices, dense)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "eager") for name in OPTIMIZERS),
        *((name, "graph") for name in ("momentum", "loss scale")),
        *(in_full(name, "graph") for name in OPTIMIZERS if name not in ("momentum", "loss scale")),
    ],
)
def test_each_row_is_updated_as_if_it_were_alone(world_of_one, name, way):
    twin, make = OPTIMIZERS[name]
    (table, bias), (_, plain_bias) = table_and_bias(), table_and_bias()
    optimizer, plain = touched(make()), make()
    optimizer.build([table, bias])
    plain.build([plain_bias])
    states = state_for(optimizer.inner_optimizer, table)
    own, own_states = table.numpy(), [state.numpy() for state in states]

    def step(gradient, dense):
        optimizer.apply([gradient, dense], [table, bias])

    run = in_graph(step) if way == "graph" else step
    for number, (ids, values) in enumerate(STEPS, 1):
        gradient, dense = slices(ids, values), tf.constant([1.0, 0.0, -float(number)], tf.float64)
        before = [table.numpy(), *(state.numpy() for state in states)]
        run(gradient, dense)
        plain.apply([dense], [plain_bias])
        rows = rows_of(gradient)
        for index, row in rows.items():
            twin(own[index], row, number, *(state[index] for state in own_states))
        others = [index for index in range(ROWS) if index not in rows]
        now = [table.numpy(), *(state.numpy() for state in states)]
        for found, expected, old in zip(now, [own, *own_states], before, strict=True):
            np.testing.assert_allclose(found, expected, 1e-6, 1e-9)
            assert (found[others] == old[others]).all()
    assert int(optimizer.iterations) == len(STEPS)
    # TensorFlow simplifies graphs.
    np.testing.assert_allclose(bias.numpy(), plain_bias.numpy(), 1e-14 if way == "graph" else 0)


def test_no_step_passes_over_the_whole_table(world_of_one):
    """Else its time would depend on the number of rows."""
    table = keras.Variable(tf.zeros((ROWS, WIDTH)), name="table")
    optimizer = touched(keras.optimizers.AdamW(RATE, amsgrad=True, global_clipnorm=1.0))
    optimizer.build([table])

    @tf.function
    def step(values, indices):
        whole = tf.gather(table.value, indices)  # as a model does
        gradient = tf.IndexedSlices(values + whole, indices, tf.constant([ROWS, WIDTH], tf.int64))
        optimizer.apply([gradient], [table])

    graph = step.get_concrete_function(tf.ones((3, WIDTH)), tf.constant([1, 5, 1])).graph
    shapes = {
        tuple(each.shape) for op in graph.get_operations() for each in op.outputs if each.shape.rank
    }
    assert (3, WIDTH) in shapes
    assert (ROWS, WIDTH) not in shapes
    # Keras's embedding reads the table whole, which would copy it.
    assert "DisableCopyOnRead" in {op.type for op in graph.get_operations()}


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_without_momentum_it_is_the_dense_update_exactly(world_of_one, name):
    make = OPTIMIZERS[name][1]
    (table, _), (other, _) = table_and_bias(), table_and_bias()
    optimizer, dense = touched(make()), rr.DistributedOptimizer(make())
    for ids, values in STEPS:
        optimizer.apply([slices(ids, values)], [table])
        dense.apply([slices(ids, values)], [other])
    assert (table.numpy() == other.numpy()).all()
    for own, expected in zip(optimizer.variables, dense.variables, strict=True):
        assert (own.numpy() == expected.numpy()).all()


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(RATE, clipnorm=0.5),
        lambda: keras.optimizers.SGD(RATE, global_clipnorm=0.5),
        lambda: keras.optimizers.SGD(RATE, clipvalue=0.5),
        lambda: keras.optimizers.SGD(SCHEDULE, momentum=0.5, weight_decay=0.25),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(RATE, global_clipnorm=0.5), initial_scale=4.0
        ),
        lambda: keras.optimizers.SGD(RATE, loss_scale_factor=4.0),
    ],
    ids=["clipnorm", "global clipnorm", "clipvalue", "decay", "loss scale", "fixed scale"],
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


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_an_infinity_skips_the_step_under_a_loss_scale(world_of_one, way):
    table, bias = table_and_bias()
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(RATE), initial_scale=4.0)
    optimizer = touched(inner)
    optimizer.build([table, bias])
    start = table.numpy()

    def step(gradient, dense):
        optimizer.apply([gradient, dense], [table, bias])

    run = in_graph(step) if way == "graph" else step
    run(slices([3], [np.inf]), tf.zeros(3, tf.float64))
    assert (table.numpy() == start).all()
    assert (float(inner.dynamic_scale), int(optimizer.iterations)) == (2.0, 0)
    run(slices([3], [2.0]), tf.zeros(3, tf.float64))
    assert np.nonzero((table.numpy() != start).any(1))[0].tolist() == [3]
    assert int(optimizer.iterations) == 1


def test_a_nan_is_not_taken_for_no_gradient(world_of_one):
    table, _ = table_and_bias()
    touched(keras.optimizers.SGD(RATE)).apply([slices([3], [np.nan])], [table])
    assert np.isnan(table.numpy()).any(1).tolist() == [index == 3 for index in range(ROWS)]


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_accumulated_steps_touch_the_rows_of_any_of_them(world_of_one, way):
    (table, bias), (other, other_bias) = table_and_bias(), table_and_bias()
    optimizer = touched(keras.optimizers.SGD(RATE, BETA), accumulate_steps=2)
    reference = touched(keras.optimizers.SGD(RATE, BETA))
    for one, variables in ((optimizer, [table, bias]), (reference, [other, other_bias])):
        one.build(variables)

    def step(gradient, dense):
        optimizer.apply([gradient, dense], [table, bias])

    run = in_graph(step) if way == "graph" else step
    dense = tf.ones(3, tf.float64)
    for first, second in zip(STEPS[::2], STEPS[1::2], strict=True):
        run(slices(*first), dense)
        run(slices(*second), dense)
        both = slices(first[0] + second[0], first[1] + second[1])
        mean = tf.IndexedSlices(both.values / 2, both.indices, both.dense_shape)
        reference.apply([mean, dense], [other, other_bias])
        assert (table.numpy() == other.numpy()).all()
    pairs = zip(optimizer.variables, reference.variables, strict=True)
    assert all((own.numpy() == expected.numpy()).all() for own, expected in pairs)


def recommender(optimizer, **options):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(50, 4, **options), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers, keras.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse")
    return model


IDS = np.array([[3, 3], [9, 12], [3, 40], [12, 12], [9, 9], [3, 12]])
TARGETS = np.arange(6.0, dtype="float32").reshape(6, 1)


def train(model, **options):
    model.fit(IDS, TARGETS, batch_size=2, epochs=2, shuffle=False, verbose=0, **options)
    return model


def test_fit_updates_the_rows_of_its_data_in_every_way(world_of_one):
    models = []
    for options in (EAGERLY, {"steps_per_execution": 3, "jit_compile": False}):
        model = recommender(touched(keras.optimizers.Adam(RATE)))
        model.compile(optimizer=model.optimizer, loss="mse", **options)
        start = model.layers[0].weights[0].numpy()
        train(model)
        moved = np.nonzero((model.layers[0].weights[0].numpy() != start).any(1))[0]
        assert moved.tolist() == [3, 9, 12, 40]
        assert int(model.optimizer.iterations) == 6
        models.append(model)
    for own, expected in zip(*(model.weights for model in models), strict=True):
        np.testing.assert_allclose(own.numpy(), expected.numpy(), 1e-5)


def test_it_works_in_half_precision(world_of_one):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = recommender(touched(keras.optimizers.Adam(2.0**-6)))
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(optimizer=model.optimizer, loss="mse", **EAGERLY)
    start = model.layers[0].weights[0].numpy()
    train(model)
    moved = np.nonzero((model.layers[0].weights[0].numpy() != start).any(1))[0]
    assert set(moved.tolist()) <= {3, 9, 12, 40}
    assert len(moved) > 1
    assert type(model.optimizer.inner_optimizer).__name__ == "Adam"


def test_copies_update_rows_too(world_of_one):
    model = recommender(touched(keras.optimizers.Adam(RATE)))
    copied = recommender(copy.deepcopy(model.optimizer)).optimizer
    assert copied.options["update_rows"] == "touched"


def test_a_step_compiled_with_xla_is_refused(world_of_one):
    model = recommender(touched(keras.optimizers.Adam(RATE)))
    model.compile(optimizer=model.optimizer, loss="mse", jit_compile=True)
    with pytest.raises(ConfigError, match="jit_compile=False"):
        train(model)


class Own(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient - tf.reduce_mean(gradient))


class OfAll(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients(grads_and_vars)


class Clipping(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: touched(keras.optimizers.Muon(0.1)), "Muon.*Use SGD, Adam"),
        (lambda: touched(keras.optimizers.Lamb(0.1)), "Lamb"),
        (lambda: touched(keras.optimizers.Adafactor(0.1)), "Adafactor"),
        (
            lambda: touched(keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(0.1))),
            "Lamb",
        ),
        (lambda: touched(Own(0.1)), "Own.*or is not known"),
        (lambda: touched(OfAll(0.1)), "OfAll.*or is not known"),
        (lambda: touched(Clipping(0.1)), "Clipping.*or is not known"),
        (lambda: touched(keras.optimizers.SGD(0.1, use_ema=True)), "use_ema"),
        (lambda: touched(keras.optimizers.SGD(0.1), sparse_as_dense=True), "sparse_as_dense"),
        (
            lambda: rr.DistributedOptimizer(keras.optimizers.SGD(0.1), update_rows="some"),
            "'some'; accepted: 'all', 'touched'",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(world_of_one, make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_table_with_a_constraint_is_refused(world_of_one):
    model = recommender(touched(keras.optimizers.SGD(0.1)), embeddings_constraint="non_neg")
    with pytest.raises(ConfigError, match=r"embeddings with a constraint"):
        train(model)


def test_gradients_without_rows_are_warned_of_once(world_of_one):
    model = recommender(touched(keras.optimizers.SGD(2.0**-6)), embeddings_regularizer="l2")
    with pytest.warns(rr.ParityWarning, match="no gradient of this step has rows") as found:
        model.fit(IDS, TARGETS, verbose=0)
    assert [each.filename for each in found] == [__file__]
    model.fit(IDS[:5], TARGETS[:5], batch_size=5, verbose=0)


@pytest.fixture(scope="module")
def facts():
    """What each case of programs/touched.py said on ranks 0 and 1."""
    return facts_of("touched", 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["applied", "accumulated"])
def test_rows_of_all_ranks_are_touched_as_by_one_process(facts, case, rank):
    fact = facts[case][rank]
    assert fact["equal"]
    by_step = {
        "applied": [[6, 7], [1, 2], [0, 1, 2, 3, 4, 5], [3]],
        "accumulated": [[], [1, 2, 6, 7], [], [0, 1, 2, 3, 4, 5]],
    }
    assert fact["moved"] == by_step[case]
    assert fact["digest"] == facts[case][0]["digest"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["fit", "sharded, clipped"])
def test_ranks_without_rows_touch_none(facts, case, rank):
    fact = facts[case][rank]
    assert fact["apart"] < 2e-6
    assert fact["moved"]
    assert fact["digest"] == facts[case][0]["digest"]


def test_ranks_must_agree_on_it(facts):
    for fact in facts["settings"].values():
        assert "update_rows is 'all' on rank 0" in fact["text"]
