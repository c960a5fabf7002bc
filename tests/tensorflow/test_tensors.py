"""Collectives on tensors: values, gradients and refusals, against what numpy says they should be.

All numbers are small integers, exact in every dtype, so that equality is ``==``.
"""

import re
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce import ArrayError, ConfigError, MismatchError
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.vocabulary.types import DTYPE_NAMES
from tests.ranks import on_ranks
from tests.scope import in_full
from tests.ways import assert_equal, by, needs_xla, outcomes, plain, wrapped

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]
REWRITES_GRAPHS = True

OPS = {
    "sum": lambda parts: np.sum(parts, 0),
    "mean": lambda parts: np.sum(parts, 0) / len(parts),
    "min": lambda parts: np.min(parts, 0),
    "max": lambda parts: np.max(parts, 0),
    "product": lambda parts: np.prod(parts, 0),
}
every_size = pytest.mark.parametrize("size", [in_full(1), 2, in_full(3)])
several_ranks = pytest.mark.parametrize("size", [2, in_full(3)])
every_way = by("eager", "graph", "jit")
both_ways = by("eager", "graph")


def weights(rows):
    """1, 2, 3, ... in two columns; `rows` may be a tensor."""
    return tf.reshape(tf.range(1.0, 2.0 * tf.cast(rows, tf.float32) + 1.0), (rows, 2))


def rows_of(array, rank=None):
    """This rank's rows, or those of another."""
    bounds = chunk_bounds(len(array), rr.size())
    rank = rr.rank() if rank is None else rank
    return array[bounds[rank] : bounds[rank + 1]]


def counts_of(rank):
    """How many rows a rank sends to each; to some it sends none."""
    return [(rank + other) % 3 for other in range(rr.size())]


def exchanged(parts, counts=None):
    """This rank's share of what each cuts into so many rows, or into equal parts."""
    ends = [np.cumsum(rows)[:-1] for rows in counts] if counts else [rr.size()] * rr.size()
    cut = [np.split(part, where) for part, where in zip(parts, ends, strict=True)]
    return np.concatenate([pieces[rr.rank()] for pieces in cut])


@by("eager", "graph", "jit", rare=("eager",))
def test_every_operator_and_dtype(how):
    size, rank = rr.size(), rr.rank()
    parts = [(np.arange(6) % 4).reshape(3, 2) + other + 1 for other in range(size)]
    total = np.sum(parts, 0)
    cases = [
        (partial(rr.all_reduce, tf.cast(parts[rank], tf.float32), op), reduce(parts))
        for op, reduce in OPS.items()
    ]
    for dtype in DTYPE_NAMES:
        part = tf.cast(parts[rank], dtype)
        cases += [
            (partial(rr.all_reduce, part), total),
            (partial(rr.all_gather, part), np.concatenate(parts)),
            (partial(rr.reduce_scatter, part, "sum"), rows_of(total)),
            (partial(rr.broadcast, part, size - 1), parts[-1]),
        ]
    flags, small = tf.constant([rank == 0, True]), tf.constant([60_000, rank], tf.uint16)
    assert_equal(
        how,
        *cases,
        (partial(rr.all_gather, flags), np.array([[r == 0, True] for r in range(size)]).ravel()),
        (partial(rr.all_reduce, flags, "min"), [size == 1, True]),
        (partial(rr.all_reduce, small, "max"), [60_000, size - 1]),
        (partial(rr.broadcast, small, size - 1), [60_000, size - 1]),
    )


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"]
)
def test_alone_a_rank_gets_what_it_has(name):
    """Eagerly; the other tests of one rank are in `make test-full`."""
    value, config = weights(3), ringreduce.Config(rank=0, size=1)
    with ringreduce.Communicator(config) as alone, tf.GradientTape() as tape:
        tape.watch(value)
        result = getattr(rr, name)(value, communicator=alone)
        total = tf.reduce_sum(result * weights(3))
    assert plain(result) == plain(tape.gradient(total, value)) == plain(weights(3))


@every_way
def test_a_structure_is_reduced_leaf_by_leaf(how):
    number, variable = float(rr.rank()), keras.Variable([1.0])
    structure = {"a": tf.fill((2,), number), "b": [np.float32(number), variable]}
    total = sum(range(rr.size()))
    expected = {"a": [total, total], "b": [total, [rr.size()]]}
    assert outcomes(how, lambda: rr.all_reduce(structure)) == [expected]


@every_way
def test_rows_are_scattered_and_exchanged(how):
    size, rank = rr.size(), rr.rank()
    cases = [
        (lambda: rr.all_gather(tf.constant(rank)), range(size)),
        (lambda: rr.all_reduce(tf.zeros((0, 3))), np.zeros((0, 3))),
        (lambda: rr.reduce_scatter(tf.zeros((0, 4))), np.zeros((0, 4))),
        (lambda: rr.reduce_scatter(tf.range(5)), rows_of(np.arange(5) * size)),
    ]
    for rows in (1, 5, 6):
        parts = [weights(rows).numpy() + other for other in range(size)]
        cases += [
            (partial(rr.reduce_scatter, tf.constant(parts[rank]), op), rows_of(reduce(parts)))
            for op, reduce in OPS.items()
        ]
    parts = [weights(2 * size).numpy() + other for other in range(size)]
    flags = [np.arange(2 * size) == other for other in range(size)]
    for dtype, sent in (("bfloat16", parts), ("int64", parts), ("bool", flags)):
        cases.append((partial(rr.all_to_all, tf.cast(sent[rank], dtype)), exchanged(sent)))
    assert_equal(how, *cases)


@both_ways
def test_ranks_may_gather_and_exchange_unequal_rows_or_none(how):
    rank, size = rr.rank(), rr.size()
    rows = [np.full((other, 2), float(other)) for other in range(size)]
    counts = [counts_of(other) for other in range(size)]
    parts = [weights(sum(c)).numpy() + 10.0 * other for other, c in enumerate(counts)]
    gathered, received = outcomes(
        how,
        lambda: rr.all_gather(tf.constant(rows[rank])),
        lambda: rr.all_to_all(tf.constant(parts[rank]), counts[rank]),
    )
    assert gathered == np.concatenate(rows).tolist()
    assert received == [exchanged(parts, counts).tolist(), [c[rank] for c in counts]]


@every_size
@on_ranks()
def test_shapes_are_known_while_tracing_where_they_can_be():
    size = rr.size()
    static = {}

    @tf.function(input_signature=[tf.TensorSpec((5, 2)), tf.TensorSpec((None, 2))])
    def shapes(known, rows):
        parts = tf.zeros((2 * size, 2))
        made = {
            "reduced": rr.all_reduce(known),
            "sent": rr.broadcast(known),
            "gathered": rr.all_gather(known),
            "scattered": rr.reduce_scatter(known),
            "unknown": rr.reduce_scatter(rows),
            "exchanged": rr.all_to_all(parts),
            "by counts": rr.all_to_all(parts, [2] * size),
        }
        static.update(tf.nest.map_structure(lambda tensor: tensor.shape.as_list(), made))
        return made["unknown"]

    assert shapes(tf.ones((5, 2)), tf.ones((3, 2))).shape == (len(rows_of(range(3))), 2)
    assert static == {
        "reduced": [5, 2],
        "sent": [5, 2],
        "gathered": [5, 2] if size == 1 else [None, 2],
        "scattered": [len(rows_of(range(5))), 2],
        "unknown": [None, 2],
        "exchanged": [2 * size, 2],
        "by counts": ([None, 2], [size]),
    }


@every_size
@on_ranks()
def test_neither_inputs_nor_earlier_results_change():
    source = tf.Variable(tf.fill((4,), float(rr.rank())))

    @tf.function
    def step():
        value = source.read_value()
        return value, rr.all_reduce(value), rr.broadcast(value), rr.reduce_scatter(value)

    kept = step()[0], source.read_value()
    rr.all_reduce(kept[0])
    results = [rr.all_reduce(tf.fill((4,), float(number))) for number in range(3)]
    assert plain(kept) == [[rr.rank()] * 4] * 2
    assert plain(results) == [[number * rr.size()] * 4 for number in range(3)]


def gradient_of(collective, rows, *arguments):
    """Return a function that differentiates a loss, times this rank's number plus one."""

    def differentiate():
        value = tf.ones((rows, 2))
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = collective(value, *arguments)
            if isinstance(result, tuple):
                result, _ = result
            loss = tf.reduce_sum(result * weights(tf.shape(result)[0])) * (rr.rank() + 1.0)
        return tape.gradient(loss, value)

    return differentiate


def upstream(rows):
    """The sum of what all ranks weigh so many rows with."""
    return weights(rows).numpy() * rr.size() * (rr.size() + 1) / 2


@every_way
def test_gradients(how):
    """Gathered rows get the sum for their rank's, a root that of all, scattered rows everything."""
    size, rank = rr.size(), rr.rank()

    def of_gathered_scalars():
        value = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = tf.reduce_sum(rr.all_gather(value) * tf.range(1.0, size + 1)) * (rank + 1.0)
        return tape.gradient(loss, value)

    def scattered(rows):
        parts = [rows_of(np.zeros(rows), other) for other in range(size)]
        return np.concatenate([(r + 1) * weights(len(part)) for r, part in enumerate(parts)])

    moved = [(other + 1) * weights(2 * size).numpy() for other in range(size)]
    assert_equal(
        how,
        (gradient_of(rr.all_reduce, 3, "sum"), upstream(3)),
        (gradient_of(rr.all_reduce, 3, "mean"), upstream(3) / size),
        (gradient_of(rr.all_to_all, 2 * size), exchanged(moved)),
        (gradient_of(rr.all_gather, 2), upstream(2 * size)[2 * rank : 2 * rank + 2]),
        (gradient_of(rr.broadcast, 3, size - 1), upstream(3) * (rank == size - 1)),
        (gradient_of(rr.reduce_scatter, 1, "sum"), scattered(1)),
        (gradient_of(rr.reduce_scatter, 5, "sum"), scattered(5)),
        (gradient_of(rr.reduce_scatter, 6, "mean"), scattered(6) / size),
        (of_gathered_scalars, (rank + 1) * size * (size + 1) / 2),
    )


@both_ways
def test_gradients_of_unequal_rows(how):
    size, rank = rr.size(), rr.rank()

    def gathered(counts):
        parts = np.split(upstream(sum(counts)), np.cumsum(counts)[:-1])
        return gradient_of(rr.all_gather, counts[rank]), parts[rank]

    received = [[counts_of(source)[target] for source in range(size)] for target in range(size)]
    moved = [(other + 1) * weights(sum(rows)).numpy() for other, rows in enumerate(received)]
    counts = counts_of(rank)
    assert_equal(
        how,
        gathered(list(range(size))),
        gathered([0] * (size - 1) + [5]),
        (gradient_of(rr.all_to_all, sum(counts), counts), exchanged(moved, received)),
    )


def derivatives_of(collective, value):
    """Return a function: first and second derivatives of a sum of squares of a collective."""

    def differentiate():
        with tf.GradientTape() as outer:
            outer.watch(value)
            with tf.GradientTape() as inner:
                inner.watch(value)
                loss = tf.reduce_sum(collective(value) ** 2)
            first = inner.gradient(loss, value)
        return tf.stack([first, outer.gradient(first, value)])

    return differentiate


@every_way
def test_second_derivatives_and_loops(how):
    size, rank = rr.size(), rr.rank()
    value = tf.constant([1.0, 2.0])

    def through_all(value):
        return rr.broadcast(rr.all_gather(rr.reduce_scatter(value)), size - 1)

    def loop():
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = tf.while_loop(
                lambda step, total: step < 3,
                lambda step, total: (step + 1, rr.all_reduce(total)),
                (0, value),
            )[1]
        return tf.stack([result, tape.gradient(result, value)])

    # y = sum x_r; L = sum over ranks of y^2: dL/dx = 2 N y, and that summed, by x: 2 N^2. The same
    # function by three collectives: what all have gathered, of the last rank.
    both = 2.0 * size**2
    moved = derivatives_of(lambda rows: rr.all_to_all(rows * (rank + 1.0)), tf.ones((size, 2)))
    assert_equal(
        how,
        (derivatives_of(rr.all_reduce, value), [[both, 2 * both], [both, both]]),
        (derivatives_of(through_all, tf.ones((size, 2))), np.full((2, size, 2), both)),
        (loop, [[size**3, 2 * size**3], [size**3] * 2]),
        (moved, np.full((2, size, 2), 2 * (rank + 1.0) ** 2)),
    )


REFUSED = {
    "dtype bool": lambda: rr.all_reduce(tf.constant([True])),
    "dtype complex128": lambda: rr.all_gather(tf.constant([1j])),
    "dtype string": lambda: rr.broadcast(tf.constant(["a"])),
    "'xor'": lambda: rr.all_reduce(tf.ones((2, 2)), "xor"),
    "got root": lambda: rr.broadcast(tf.ones((2, 2)), rr.size()),
    "got root -1": lambda: wrapped("graph", lambda: rr.broadcast(tf.ones((2, 2)), -1))(),
    "Use all_reduce": lambda: rr.reduce_scatter(tf.constant(1.0)),
    "all_to_all got a tensor without dimensions": lambda: rr.all_to_all(tf.constant(1.0)),
    "got counts of dtype int32 and shape": lambda: rr.all_to_all(
        tf.ones((2, 2)), [1] * rr.size() + [2 - rr.size()]
    ),
    "for 2 rows": lambda: rr.all_to_all(tf.ones((2, 2)), [3] * rr.size()),
}


@every_size
@pytest.mark.parametrize("text", REFUSED)
@on_ranks()
def test_what_cannot_travel_is_refused_before_anything_does(text):
    with pytest.raises(ArrayError, match=re.escape(text)):
        REFUSED[text]()


@several_ranks
@on_ranks()
def test_rows_that_cannot_be_divided_are_refused():
    odd = tf.ones((2 * rr.size() + 1, 2))
    text = f"cannot divide {2 * rr.size() + 1} rows evenly among {rr.size()} ranks"
    for action in (wrapped("graph", lambda: rr.all_to_all(odd)), lambda: hvd.alltoall(odd)):
        with pytest.raises(ArrayError, match=text):
            action()


def in_a_condition():
    def step(flag):
        return tf.cond(flag, lambda: rr.all_reduce(tf.ones(2)), lambda: tf.ones(2))

    wrapped("graph", step)(tf.constant(rr.rank() == 0))


def in_an_old_graph():
    with tf.Graph().as_default():
        rr.all_reduce(tf.ones(2))


def in_the_condition_of_a_compiled_loop():
    def step():
        return tf.while_loop(
            lambda total: tf.reduce_all(rr.all_reduce(total) < 9.0),
            lambda total: (total + 1.0,),
            (tf.ones((2, 2)),),
        )

    wrapped("jit", step)()


def compiled_without_a_shape():
    unknown = [tf.TensorSpec((None, 2))]
    tf.function(rr.all_reduce, jit_compile=True, autograph=False, input_signature=unknown)(
        tf.ones((2, 2))
    )


def compiled_with_counts():
    wrapped("jit", lambda: rr.all_to_all(tf.ones((rr.size(), 2)), [1] * rr.size()))()


@several_ranks
@pytest.mark.parametrize(
    ("act", "text"),
    [
        (in_a_condition, "reduce a tensor inside a branch of tf.cond"),
        (in_an_old_graph, "reduce a tensor in a graph that is not that of a tf.function"),
        pytest.param(
            in_the_condition_of_a_compiled_loop, "in the condition of a loop", marks=needs_xla
        ),
        pytest.param(compiled_without_a_shape, "of shape (None, 2) inside", marks=needs_xla),
        pytest.param(compiled_with_counts, "pad all parts to one length", marks=needs_xla),
    ],
)
@on_ranks()
def test_places_where_it_cannot_be_done_are_refused(act, text):
    with pytest.raises(ConfigError, match=re.escape(text)) as refusal:
        act()
    assert "DistributedOptimizer" not in str(refusal.value)


@pytest.mark.parametrize("op", ["min", "max", "product"])
@by("eager", "graph", sizes=(3,))
def test_other_operators_have_no_gradient(how, op):
    collective = rr.all_reduce if how == "eager" else rr.reduce_scatter
    with pytest.raises(ConfigError, match=rf"op='{op}'(?s:.*)tf\.stop_gradient"):
        wrapped(how, gradient_of(collective, 2, op))()


@several_ranks
@on_ranks()
def test_shapes_that_differ_are_a_mismatch_on_all_ranks_for_good():
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def reduce(value):
        return rr.all_reduce(value)

    shape = (2, 3) if rr.rank() == 0 else (3, 2)
    for collective in (reduce, rr.all_gather):
        with pytest.raises(MismatchError):
            collective(tf.ones(shape))
