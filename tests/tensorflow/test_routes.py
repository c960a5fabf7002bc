"""Gradients by every route through the bridge, on real rings: the same means, bit by bit.

Values are whole multiples of the number of ranks, so means are exact. Every rank knows what all
have, and compares its results with what plain numpy makes of that.
"""

import gc
import math
import types
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import MismatchError, RingReduceError
from ringreduce.effects import native
from ringreduce.tensorflow import GradientBridge, bridge, ops
from tests.programs.shared import built, digest
from tests.ranks import on_ranks
from tests.scope import in_full
from tests.ways import wrapped

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

REWRITES_GRAPHS = True

GRAPHS = ("python", "native") if native.library() else ("python",)
# XLA is given the ring by the native library.
JIT = ("jit",) if native.library() else ()
WAYS = ("eager", "graph", *JIT)
on_1_to_3 = pytest.mark.parametrize("size", [in_full(1), 2, in_full(3)])
on_2_and_3 = pytest.mark.parametrize("size", [2, in_full(3)])
DTYPES = ("float32", "float64", "float16", "bfloat16")
SHAPES = [(0,), (), (1,), (7, 3), (1009,), (64, 64), (2, 0, 3), (100_003,)]


def dense(shape, dtype="float32", step=0):
    """A gradient of each rank."""
    values = np.arange(math.prod(shape)).reshape(shape) % 7 + step
    return [tf.cast((values + rank) * rr.size(), dtype) for rank in range(rr.size())]


def noise(shape, dtype, step):
    """A gradient of each rank, whose mean is rounded."""
    generators = [np.random.default_rng([rank, step]) for rank in range(rr.size())]
    return [tf.cast(generator.normal(size=shape), dtype) for generator in generators]


def of_every_shape(make):
    """Several steps of all dtypes, and None: memory of one step is used again in the next."""
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    return [[None, *(make(*kind, step) for kind in kinds)] for step in range(3)]


def sparse(indices, shape, dtype="float32", index_dtype="int64", seed=0):
    """A gradient of each rank."""
    generator = np.random.default_rng(seed)
    values = [generator.integers(-3, 4, (len(own), *shape[1:])) * rr.size() for own in indices]
    return [
        tf.IndexedSlices(
            tf.cast(rows, dtype), tf.constant(own, index_dtype), tf.constant(shape, tf.int64)
        )
        for rows, own in zip(values, indices, strict=True)
    ]


def everywhere():
    return [[0, 1, 2, 3, 4]] * rr.size()


def repeated(number):
    """Within a rank, and between ranks; in no order."""
    return [[9, rank, 4, rank, 9, rank + number, 9] for rank in range(rr.size())]


def of_dtypes(dtype, index_dtype):
    kinds = {"dtype": dtype, "index_dtype": index_dtype}
    gathered = sparse(repeated(1), (90, 3), **kinds, seed=3)
    return [[gathered, sparse(everywhere(), (5, 3), **kinds, seed=4), dense((7,), dtype)]]


def sparse_and_dense():
    table = sparse(everywhere(), (5, 1), "float64", seed=2)
    parts = [dense((3, 4)), sparse(repeated(2), (60, 3)), None]
    return [[*parts, dense((1000,), "float64"), table, dense(())]]


def other_rows_in_each_step():
    def step(n):
        indices = [[(rank * 3 + i * n) % 20 for i in range(n * 4)] for rank in range(rr.size())]
        return [sparse(indices, (20, 4), seed=n), dense((5,))]

    return [step(n) for n in (0, 1, 2, 5, 1, 0)]


# Steps, each a list of the gradients of all variables, each of them a list by rank, or None.
CASES = {
    "duplicates": lambda: [[sparse(repeated(0), (40, 3))]],
    "whole table": lambda: [[sparse(everywhere(), (5, 3))]],
    "whole table, duplicates": lambda: [[sparse([[4, 2, 0, 4, 1, 3]] * rr.size(), (5, 2))]],
    "rows of one rank": lambda: [[sparse([[]] * (rr.size() - 1) + [[3, 1, 3]], (40, 3))]],
    "no rows": lambda: [[sparse([[]] * rr.size(), (40, 3))]],
    "no rows of one of two": lambda: [
        [sparse([[]] * rr.size(), (9, 3)), sparse(repeated(1), (40, 3))]
    ],
    "two sparse": lambda: [
        [sparse(repeated(0), (50, 2, 2)), sparse(everywhere(), (5,), index_dtype="int32", seed=1)]
    ],
    "sparse and dense": sparse_and_dense,
    "float16": lambda: of_dtypes("float16", "int64"),
    "bfloat16": lambda: of_dtypes("bfloat16", "int32"),
    "float32": lambda: of_dtypes("float32", "int32"),
    "float64": lambda: of_dtypes("float64", "int64"),
    "width of zero": lambda: [[sparse(everywhere(), (5, 0)), sparse(repeated(0), (40, 1))]],
    "other rows in each step": other_rows_in_each_step,
    "dense": lambda: of_every_shape(dense),
    "noise": lambda: of_every_shape(noise),
}
DENSE = ("dense", "noise")
TRACED = ("duplicates", "sparse and dense", "bfloat16", "other rows in each step")


def bridged(route):
    """The means by one route, with a bucket for each large gradient."""
    used = types.SimpleNamespace(are_available=lambda: False) if route == "python" else ops
    made = GradientBridge(1024)

    def mean(gradients, names):
        with mock.patch.object(bridge, "ops", used):
            return made.mean(rr.init(), gradients, names)

    return mean


def whole(gradient):
    """The sum of a gradient's rows as float64."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, tf.float64).numpy()
    table = np.zeros(gradient.dense_shape.numpy())
    np.add.at(table, gradient.indices.numpy(), tf.cast(gradient.values, tf.float64).numpy())
    return table


def assert_is_mean(mean, by_rank, is_exact):
    if by_rank is None:
        assert mean is None
        return
    assert isinstance(mean, tf.IndexedSlices) == isinstance(by_rank[0], tf.IndexedSlices)
    assert (mean.dtype, mean.shape) == (by_rank[0].dtype, by_rank[0].shape)
    if is_exact:
        assert (whole(mean) == sum(map(whole, by_rank)) / rr.size()).all(), mean.dtype
    if isinstance(mean, tf.IndexedSlices):
        assert mean.indices.dtype == by_rank[0].indices.dtype
        assert (mean.dense_shape.numpy() == by_rank[0].dense_shape.numpy()).all()
        assert (np.diff(mean.indices.numpy()) > 0).all()


def spec_of(gradient):
    """With any number of rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.TensorSpec(gradient.shape, gradient.dtype)
    index_dtype = gradient.indices.dtype
    return tf.IndexedSlicesSpec(gradient.shape, gradient.dtype, index_dtype, tf.int64, [None])


def reduced(case, route):
    """Reduce all steps; return the number of rows of each mean, and a digest of them."""
    mean, steps = bridged(route), CASES[case]()
    shapes = [by_rank and by_rank[0].shape for by_rank in steps[0]]

    def step(*gradients):
        remaining = iter(gradients)
        own = [None if shape is None else next(remaining) for shape in shapes]
        for n, gradient in enumerate(own):
            if isinstance(gradient, tf.IndexedSlices):
                shape = tf.constant(shapes[n].as_list(), tf.int64)
                own[n] = tf.IndexedSlices(gradient.values, gradient.indices, shape)
        means = mean(own, [f"variable {number}" for number in range(len(shapes))])
        for shape, result in zip(shapes, means, strict=True):
            if isinstance(result, tf.IndexedSlices):
                assert result.values.shape[1:] == shape[1:]
        return means

    firsts = [by_rank[0] for by_rank in steps[0] if by_rank]
    travels = rr.size() > 1 and any(isinstance(gradient, tf.Tensor) for gradient in firsts)
    if route != "eager":
        signature = [spec_of(gradient) for gradient in firsts]
        step = tf.function(step, input_signature=signature, jit_compile=route == "jit")
        nodes = {op.type for op in step.get_concrete_function().graph.get_operations()}
        assert ("RingreduceWait" in nodes) == (route == "native" and travels)
    reducing_s = rr.init().statistics().reducing_s
    found = [step(*(by_rank[rr.rank()] for by_rank in own if by_rank)) for own in steps]
    assert rr.init().statistics().reducing_s > reducing_s or not travels
    # Now, so that what the next step has done to the means of one would be seen.
    for means, gradients in zip(found, steps, strict=True):
        for result, by_rank in zip(means, gradients, strict=True):
            assert_is_mean(result, by_rank, is_exact=case != "noise")
    rows = [[len(m.indices) for m in means if isinstance(m, tf.IndexedSlices)] for means in found]
    tensors = tf.nest.flatten(found, expand_composites=True)
    return rows, digest(tensor.numpy() for tensor in tensors if tensor is not None)


def reduced_by_all(case):
    """Reduce by all routes; on two ranks, sparse ones by those that take branches of their own."""
    graphs = GRAPHS if rr.size() != 2 or case in (*TRACED, *DENSE) else ()
    routes = ("eager", *graphs, *(JIT if case in DENSE else ()))
    first, *others = (reduced(case, route) for route in routes)
    assert others == [first] * len(others)
    return first


@pytest.mark.parametrize(
    ("size", "transport", "case"),
    [
        *((2, transport, case) for transport in ("shm", "zmq") for case in DENSE),
        *(in_full(3, transport, case) for transport in ("shm", "zmq") for case in DENSE),
        *((2, "auto", case) for case in CASES if case not in DENSE),
        *(in_full(size, "auto", case) for size in (1, 3) for case in CASES),
    ],
)
def test_means_are_exact_and_bit_identical_by_every_route(ranks, size, transport, case):
    results = ranks.ring(size, RINGREDUCE_TRANSPORT=transport)(reduced_by_all, case)
    assert results == results[:1] * size


@on_2_and_3
@on_ranks()
def test_both_ways_of_reducing_are_taken():
    """The number of rows tells, and the test above would not show it."""
    ranks = range(rr.size())
    assert reduced("duplicates", "eager")[0] == [[len({9, 4, *ranks})]]
    rows, _ = reduced("other rows in each step", "eager")
    assert rows[0] == rows[-1] == [0]
    assert 0 < rows[1][0] < 20
    gathered = len({9, 4, *ranks, *range(1, rr.size() + 1)})
    assert reduced("float32", "eager")[0] == [[gathered, 5]]


@on_1_to_3
@on_ranks()
def test_duplicates_of_halves_are_added_in_float32():
    """2048 + 1 is 2048 in float16, but 2048 + 1 + 1 is not when added in float32."""
    values = tf.constant([[2048.0], [1.0], [1.0]], tf.float16)
    gradient = tf.IndexedSlices(values, tf.constant([2, 2, 2]), tf.constant([90, 1]))
    [mean] = bridged("eager")([gradient], ["v"])
    assert float(tf.reduce_sum(tf.cast(mean.values, tf.float32))) == 2050.0


@pytest.mark.parametrize("way", GRAPHS)
@on_1_to_3
@on_ranks()
def test_ranks_may_trace_at_different_steps(way):
    """A batch of another length makes a rank trace again when the others do not."""
    mean = bridged(way)

    @tf.function
    def step(indices):
        values = tf.ones((len(indices), 2)) * rr.size()
        gradient = tf.IndexedSlices(values, indices, tf.constant([100, 2]))
        return tf.convert_to_tensor(mean([tf.ones(3), gradient], ["dense", "sparse"])[1])

    tables = []
    for number in range(5):
        counts = [2 + (number // 2 if rank else number % 3) for rank in range(rr.size())]
        tables.append(step(tf.fill([counts[rr.rank()]], number)).numpy())
        assert (tables[-1][number] == sum(counts)).all()
    assert step.experimental_get_tracing_count() == 3
    return digest(tables)


@pytest.mark.parametrize("way", GRAPHS)
@on_1_to_3
@on_ranks()
def test_steps_in_a_loop_of_one_function(way):
    """As with ``steps_per_execution``."""
    mean = bridged(way)

    @tf.function
    def steps():
        table = tf.zeros((50, 2))
        for number in tf.range(4):
            indices = tf.stack([number, number, number + 10 + rr.rank()])
            gradient = tf.IndexedSlices(tf.ones((3, 2)) * rr.size(), indices, tf.constant([50, 2]))
            table += tf.convert_to_tensor(mean([tf.ones(3), gradient], ["dense", "sparse"])[1])
            table.set_shape((50, 2))
        return table

    expected = np.zeros((50, 2))
    for number in range(4):
        expected[number] += 2 * rr.size()
        expected[number + 10 : number + 10 + rr.size()] += 1
    assert (steps().numpy() == expected).all()


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.01),
    "global clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.01),
    "decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=64.0
    ),
}


def embedded(make, is_eager, sparse_as_dense):
    """Weights after training a model whose embedding is used twice, and the bytes sent for it."""
    keras.utils.set_random_seed(7)
    embed = keras.layers.Embedding(200, 4)
    inputs = keras.Input((3,), dtype="int32"), keras.Input((2,), dtype="int32")
    joined = keras.layers.Concatenate(axis=1)([embed(part) for part in inputs])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(joined)))
    optimizer = rr.DistributedOptimizer(make(), sparse_as_dense=sparse_as_dense)
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=is_eager)
    if is_eager:
        built(model)
    generator = np.random.default_rng(rr.rank())
    words = [generator.integers(0, 200, (12, count)).astype("int32") for count in (3, 2)]
    labels = generator.normal(size=(12, 1)).astype("float32")
    before = rr.init().statistics().bytes_sent
    model.fit(words, labels, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights(), rr.init().statistics().bytes_sent - before


@pytest.mark.parametrize(
    ("size", "name", "is_eager"),
    [
        (2, "adam", False),
        (2, "global clipnorm", True),
        (2, "loss scale", True),
        in_full(3, "adam", True),
        *(in_full(3, name, False) for name in OPTIMIZERS),
    ],
)
@on_ranks()
def test_keras_trains_to_the_weights_of_the_dense_way(name, is_eager):
    weights, sent = embedded(OPTIMIZERS[name], is_eager, False)
    expected, sent_dense = embedded(OPTIMIZERS[name], is_eager, True)
    # Of two ranks a sum does not depend on the order; tf.clip_by_norm's depends on the rows.
    limit = 1e-7 if rr.size() == 2 else 1e-5
    assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) <= limit
    assert sent < sent_dense
    return digest(weights)


@pytest.mark.parametrize(
    ("size", "name", "way", "options"),
    [
        *((2, name, "eager", {}) for name in ("SGD", "Adagrad", "Ftrl", "Lion", "Adam")),
        (2, "Adam", "eager", {"sparse_as_dense": True}),
        (2, "Adam", "graph", {}),
        (2, "Adam", WAYS[-1], {"gradient_accumulation_steps": 2}),
        *(in_full(3, name, "graph", {}) for name in ("SGD", "Adagrad", "Ftrl", "Lion", "Adam")),
        *(in_full(3, "Adam", way, {"sparse_as_dense": True}) for way in WAYS),
        *(
            in_full(size, "Adam", way, {"gradient_accumulation_steps": 2})
            for way in WAYS
            for size in (1, 3)
        ),
    ],
)
@on_ranks()
def test_rows_are_added_before_an_optimizer_sees_them(name, way, options):
    """Keras's own squares them, or takes their signs, one by one: Adam's 13.4525 for 13.2389."""
    rows, indices = np.arange(12.0, dtype="float32").reshape(6, 2), np.array([1, 4, 1, 3, 4, 4])
    table, expected = (keras.Variable(np.arange(1.0, 13.0).reshape(6, 2)) for _ in range(2))
    plain = getattr(keras.optimizers, name)(learning_rate=0.1, name="repeated")
    for _ in range(2):
        plain.apply([tf.math.unsorted_segment_sum(rows, indices, 6)], [expected])
    inner = getattr(keras.optimizers, name)(learning_rate=0.1, name="repeated")
    optimizer = rr.DistributedOptimizer(inner, **options)
    optimizer.build([table])
    own = slice(rr.rank() * 6 // rr.size(), (rr.rank() + 1) * 6 // rr.size())

    def apply():
        values = tf.constant(rows[own] * rr.size())
        gradient = tf.IndexedSlices(values, tf.constant(indices[own]), tf.constant([6, 2]))
        optimizer.apply([gradient], [table])

    step = wrapped(way, apply)
    for _ in range(2 * options.get("gradient_accumulation_steps", 1)):
        step()
    np.testing.assert_allclose(table.numpy(), expected.numpy(), rtol=0, atol=1e-5)


@on_ranks(2)
def test_a_graph_whose_optimizer_has_gone_says_so():
    comm, reducer = rr.init(), GradientBridge(1 << 20)
    gc.collect()
    plans = comm._session.engine._plans
    others = len(plans)
    step = tf.function(lambda x: reducer.mean(comm, [x], ["a"]))
    concrete = step.get_concrete_function(tf.TensorSpec([3], tf.float32))
    concrete(tf.ones(3))
    assert len(plans) == others + 1
    reducer._routes.clear()
    gc.collect()
    assert len(plans) == others
    text = "the plan was given up with the optimizer it was made for"
    with pytest.raises((RingReduceError, tf.errors.OpError), match=text):
        concrete(tf.ones(3))


@on_2_and_3
@on_ranks()
def test_sparse_on_some_ranks_only_is_our_error_out_of_a_function():
    mean = bridged("native")

    @tf.function
    def step():
        gradient = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([9, 2]))
        if rr.rank() == 0:
            gradient = tf.convert_to_tensor(gradient)
        return mean([tf.ones(3), gradient], ["kernel", "table"])[0]

    with pytest.raises(MismatchError) as failure:
        step()
    for words in ("table: sparse float32 of shape (9, 2)", "table: float32 of shape (9, 2)"):
        assert words in str(failure.value)
