"""Collectives on tensors: values, gradients and refusals, against what numpy says they should be.

All numbers are small integers, exact in every dtype, so that equality is ``==``.
"""

import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.vocabulary.types import DTYPE_NAMES
from tests.scope import in_full
from tests.tensor_facts import SIZES, WAYS, facts_of, needs_xla, of_every_rank, on_2_only

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

OPS = {
    "sum": lambda parts: np.sum(parts, 0),
    "mean": lambda parts: np.sum(parts, 0) / len(parts),
    "min": lambda parts: np.min(parts, 0),
    "max": lambda parts: np.max(parts, 0),
    "product": lambda parts: np.prod(parts, 0),
}
every_size = pytest.mark.parametrize("size", SIZES)
both_ways = pytest.mark.parametrize("how", ["eager", "graph"])
every_way = pytest.mark.parametrize("how", WAYS)


def parts_of(size):
    """What each rank passes in most cases."""
    return [(np.arange(6) % 4).reshape(3, 2) + rank + 1.0 for rank in range(size)]


def weights(rows):
    return np.arange(1.0, 2 * rows + 1).reshape(rows, 2)


def rows_of(array, size):
    """The rows of each rank."""
    bounds = chunk_bounds(len(array), size)
    return [array[bounds[rank] : bounds[rank + 1]] for rank in range(size)]


def assert_equal(case, size, how, expected):
    """`expected` has an array for each rank."""
    for got, wanted in zip(of_every_rank(case, size, how), expected, strict=True):
        assert got == np.asarray(wanted).tolist()


def rounded(array):
    """As float32 has it."""
    return np.asarray(array, np.float32).astype(float)


@every_size
@every_way
@pytest.mark.parametrize("op", OPS)
def test_all_reduce(op, how, size):
    expected = OPS[op](parts_of(size))
    if op == "mean":
        for got in of_every_rank(f"all_reduce {op}", size, how):
            np.testing.assert_allclose(got, expected, rtol=1e-6)
    else:
        assert_equal(f"all_reduce {op}", size, how, [expected] * size)


@every_size
@every_way
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_dtype_is_reduced(dtype, how, size):
    assert_equal(f"all_reduce {dtype}", size, how, [np.sum(parts_of(size), 0)] * size)


@on_2_only("eager", "graph")
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_dtype_travels(dtype, how, size):
    parts = parts_of(size)
    total = np.sum(parts, 0)
    assert_equal(f"all_gather {dtype}", size, how, [np.concatenate(parts)] * size)
    assert_equal(f"reduce_scatter {dtype}", size, how, rows_of(total, size))
    assert_equal(f"broadcast {dtype}", size, how, [parts[-1]] * size)


@pytest.mark.parametrize(
    "name",
    ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"],
)
def test_alone_a_rank_gets_what_it_has(name):
    """Eagerly; what else is said here of one rank is in `make test-full`."""
    value = tf.constant(weights(3))
    with (
        ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as alone,
        tf.GradientTape() as tape,
    ):
        tape.watch(value)
        result = getattr(rr, name)(value, communicator=alone)
        total = tf.reduce_sum(result * weights(3))
    assert result.numpy().tolist() == tape.gradient(total, value).numpy().tolist()
    assert result.numpy().tolist() == weights(3).tolist()


@every_size
@every_way
def test_a_structure_is_reduced_leaf_by_leaf(how, size):
    ranks = sum(range(size))
    for got in of_every_rank("structure", size, how):
        assert got == {"a": [ranks, ranks], "b": [ranks, [size]]}


@every_size
@every_way
def test_nothing_can_be_reduced(how, size):
    assert_equal("empty", size, how, [np.zeros((0, 3))] * size)
    assert_equal("scatter none", size, how, [np.zeros((0, 4))] * size)


@every_size
@both_ways
def test_ranks_may_gather_unequal_rows_or_none(how, size):
    rows = np.concatenate([np.full((rank, 2), float(rank)) for rank in range(size)])
    assert_equal("gather rows", size, how, [rows] * size)


@every_size
@every_way
def test_scalars_are_gathered_as_vectors(how, size):
    assert_equal("gather scalars", size, how, [np.arange(size)] * size)


def assert_scattered(rows, op, how, size):
    reduced = OPS[op]([weights(rows) + rank for rank in range(size)])
    assert_equal(f"scatter {rows} {op}", size, how, rows_of(rounded(reduced), size))


@every_size
@every_way
@pytest.mark.parametrize("op", OPS)
def test_reduce_scatter_deals_out_rows(op, how, size):
    assert_scattered(5, op, how, size)


@on_2_only("eager", "graph")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [1, 6])
def test_reduce_scatter_deals_out_few_and_equal_rows(rows, op, how, size):
    assert_scattered(rows, op, how, size)


@every_size
@every_way
def test_reduce_scatter_of_a_vector(how, size):
    assert_equal("scatter vector", size, how, rows_of(np.arange(5) * size, size))


def counts_of(rank, size):
    """How many rows a rank sends to each."""
    return [(rank + other) % 3 for other in range(size)]


def exchanged(parts, counts):
    """What each rank receives of what each cuts into so many rows."""
    cut = [np.split(part, np.cumsum(each)[:-1]) for part, each in zip(parts, counts, strict=True)]
    return [np.concatenate([each[rank] for each in cut]) for rank in range(len(parts))]


@every_size
@every_way
@pytest.mark.parametrize("dtype", ["bfloat16", "int64"])
def test_all_to_all(dtype, how, size):
    parts = [weights(2 * size) + rank for rank in range(size)]
    assert_equal(f"all_to_all {dtype}", size, how, exchanged(parts, [[2] * size] * size))


@every_size
@every_way
def test_all_to_all_of_bool(how, size):
    parts = [np.arange(2 * size) == rank for rank in range(size)]
    assert_equal("parts of flags", size, how, exchanged(parts, [[2] * size] * size))


@every_size
@both_ways
def test_all_to_all_by_counts_says_how_many_rows_came(how, size):
    counts = [counts_of(rank, size) for rank in range(size)]
    parts = [weights(sum(each)) + 10.0 * rank for rank, each in enumerate(counts)]
    expected = exchanged(parts, counts)
    for rank, (rows, received) in enumerate(of_every_rank("parts by counts", size, how)):
        assert rows == expected[rank].tolist()
        assert received == [each[rank] for each in counts]


@every_size
def test_shapes_are_known_while_tracing_where_they_can_be(size):
    for rank, fact in enumerate(facts_of(size)["static shapes"]):
        own = len(rows_of(np.zeros(5), size)[rank])
        assert fact["reduced"] == fact["sent"] == [5, 2]
        assert fact["gathered"] == ([5, 2] if size == 1 else [None, 2])
        assert fact["scattered"] == [own, 2]
        assert fact["unknown"] == [None, 2]
        assert fact["exchanged"] == [2 * size, 2]
        assert fact["exchanged by counts"] == [[None, 2], [size]]
        assert fact["rows"] == [len(rows_of(np.zeros(3), size)[rank]), 2]


@every_size
def test_neither_inputs_nor_earlier_results_change(size):
    for rank, fact in enumerate(facts_of(size)["left alone"]):
        assert fact["kept"] == [[rank] * 4] * 2
        assert fact["results"] == [[step * size] * 4 for step in range(3)]


def total_weight(size):
    """The sum of what each rank weighs its loss with."""
    return size * (size + 1) // 2


@every_size
@every_way
def test_gradient_of_all_reduce(how, size):
    total = total_weight(size) * weights(3)
    assert_equal("gradient sum", size, how, [total] * size)
    for got in of_every_rank("gradient mean", size, how):
        np.testing.assert_allclose(got, total / size, rtol=1e-6)


@every_size
@both_ways
@pytest.mark.parametrize(
    ("case", "lengths"),
    [
        ("gradient gather", range),
        ("gradient gather of one rank's", lambda size: [0] * (size - 1) + [5]),
    ],
)
def test_gradient_of_all_gather_is_the_sum_of_all_ranks_for_own_rows(case, lengths, how, size):
    counts = list(lengths(size))
    total = total_weight(size) * weights(sum(counts))
    assert_equal(case, size, how, np.split(total, np.cumsum(counts)[:-1]))


@on_2_only("eager", "graph")
def test_gradient_of_all_gather_of_equal_rows(how, size):
    total = total_weight(size) * weights(2 * size)
    assert_equal("gradient gather equal", size, how, np.split(total, size))


@on_2_only("eager", "graph")
def test_gradient_of_gathered_scalars_is_a_scalar(how, size):
    expected = [total_weight(size) * (rank + 1) for rank in range(size)]
    assert of_every_rank("gradient gather scalars", size, how) == expected


@on_2_only("eager", "graph")
def test_gradient_of_broadcast_goes_to_the_root(how, size):
    zeros = [np.zeros((3, 2))] * (size - 1)
    assert_equal("gradient broadcast", size, how, [*zeros, total_weight(size) * weights(3)])


@on_2_only("eager", "graph")
@pytest.mark.parametrize(("case", "rows"), [("1", 1), ("5", 5), ("6", 6), ("mean", 6)])
def test_gradient_of_reduce_scatter_is_gathered(case, rows, how, size):
    parts = rows_of(np.zeros((rows, 2)), size)
    upstream = [(rank + 1) * weights(len(part)) for rank, part in enumerate(parts)]
    whole = np.concatenate(upstream) / (size if case == "mean" else 1)
    assert_equal(f"gradient scatter {case}", size, how, [rounded(np.float32(whole))] * size)


@every_size
@every_way
def test_gradient_of_all_to_all_goes_back(how, size):
    upstream = [(rank + 1) * weights(2 * size) for rank in range(size)]
    assert_equal("gradient all_to_all", size, how, exchanged(upstream, [[2] * size] * size))


@every_size
@both_ways
def test_gradient_of_all_to_all_goes_back_by_the_received_counts(how, size):
    received = [[counts_of(rank, size)[each] for rank in range(size)] for each in range(size)]
    upstream = [(rank + 1) * weights(sum(each)) for rank, each in enumerate(received)]
    assert_equal("gradient parts by counts", size, how, exchanged(upstream, received))


@every_size
@every_way
def test_second_derivatives(how, size):
    # y = sum x_r; L = sum over ranks of y^2: dL/dx = 2 N y, and that summed, by x: 2 N^2.
    first, second = [2 * size * size * x for x in (1.0, 2.0)], [2.0 * size * size] * 2
    assert of_every_rank("second derivative", size, how) == [[first, second]] * size
    # The same function by three collectives: what all have gathered, of the last rank.
    first, second = [[2.0 * size**2] * 2] * size, [[2.0 * size**2] * 2] * size
    assert of_every_rank("second derivative of all", size, how) == [[first, second]] * size


@every_size
@both_ways
def test_second_derivatives_of_what_moves_rows(how, size):
    for rank, got in enumerate(of_every_rank("second derivative of parts", size, how)):
        both = [[2.0 * (rank + 1) ** 2] * 2] * size
        assert got == [both, both]


@every_size
@every_way
def test_a_loop_reduces_in_each_turn_and_back(how, size):
    value, gradient = [[x * size**3 for x in (1.0, 2.0)], [float(size**3)] * 2]
    assert of_every_rank("loop", size, how) == [[value, gradient]] * size


@every_size
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("bool", "dtype bool"),
        ("complex", "dtype complex128"),
        ("text", "dtype string"),
        ("operator", "'xor'"),
        ("root", "got root"),
        ("root in a graph", "got root -1"),
        ("no rows", "Use all_reduce"),
        ("no parts", "all_to_all got a tensor without dimensions"),
        ("counts", "got counts of dtype int32 and shape"),
        ("other counts", "for 2 rows"),
    ],
)
def test_what_cannot_travel_is_refused_before_anything_does(case, text, size):
    for fact in facts_of(size)[case]:
        assert fact["error"] == "ArrayError"
        assert text in fact["text"]


@pytest.mark.parametrize("size", [2, in_full(3)])
def test_equal_parts_need_rows_that_can_be_divided(size):
    for fact in facts_of(size)["odd rows"]:
        assert fact["error"] == "ArrayError"
        assert f"cannot divide {2 * size + 1} rows evenly among {size} ranks" in fact["text"]


@pytest.mark.parametrize("size", [2, in_full(3)])
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("cond", "reduce a tensor inside a branch of tf.cond"),
        ("old graph", "reduce a tensor in a graph that is not that of a tf.function"),
        pytest.param("loop condition", "in the condition of a loop", marks=needs_xla),
        pytest.param("jit", "of shape (None, 2) inside", marks=needs_xla),
        pytest.param("jit counts", "pad all parts to one length", marks=needs_xla),
    ],
)
def test_places_where_it_cannot_be_done_are_refused(case, text, size):
    for fact in facts_of(size)[case]:
        assert fact["error"] == "ConfigError"
        assert text in fact["text"]
        assert "DistributedOptimizer" not in fact["text"]


@pytest.mark.parametrize("size", [2, in_full(3)])
@pytest.mark.parametrize("where", ["", " in a graph"])
@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_other_operators_have_no_gradient(op, where, size):
    for fact in facts_of(size)[f"gradient {op}{where}"]:
        assert fact["error"] == "ConfigError"
        assert f"op='{op}'" in fact["text"]
        assert "tf.stop_gradient" in fact["text"]


@pytest.mark.parametrize("size", [2, in_full(3)])
def test_shapes_that_differ_are_a_mismatch_on_all_ranks_for_good(size):
    said = facts_of(size)
    for first, again in zip(said["mismatch"], said["mismatch again"], strict=True):
        assert first["error"] == "MismatchError"
        assert first["ours"]
        assert again["error"] == "MismatchError"


@on_2_only("eager", "graph")
@pytest.mark.parametrize("name", ["allgather", "broadcast", "reducescatter", "reducescatter mean"])
def test_gradients_under_horovods_names_are_horovods(name, how, size):
    mean = (size + 1) / 2
    for rank, got in enumerate(of_every_rank(f"horovod {name}", size, how)):
        rows = {
            "allgather": [mean] * size,
            "broadcast": [mean if rank == size - 1 else 0] * size,
            "reducescatter": [size * (row + 1) for row in range(size)],
            "reducescatter mean": [row + 1 for row in range(size)],
        }[name]
        assert got == [[row] * 2 for row in rows]


@on_2_only("eager", "graph")
def test_factors_are_in_the_gradient_too(how, size):
    mean = 6 * (size + 1) / 2
    assert of_every_rank("horovod allreduce", size, how) == [[[mean] * 2] * size] * size


@on_2_only("eager", "graph")
def test_integers_are_rounded_towards_zero_and_once_as_horovods(how, size):
    ranks = range(size)
    own = np.array([[-7 * rank - 1, 5 + 2 * rank, 9] for rank in ranks])
    first = np.full(size, own[:, 0].sum())
    for rank, got in enumerate(of_every_rank("horovod integers", size, how)):
        assert got == [
            np.trunc(own.sum(0) / size).tolist(),
            np.trunc(own.sum(0) * 2 / size).tolist(),
            np.trunc(own * 0.5).sum(0).tolist(),
            np.trunc(first * 1.5 / size)[rank : rank + 1].tolist(),
        ]


@every_size
@both_ways
def test_each_rank_divides_its_own_rows_as_horovods_alltoall_does(how, size):
    received = [1.0 + rank for rank in range(size) for _ in range(rank + 1)]
    for rank, got in enumerate(of_every_rank("horovod alltoall", size, how)):
        gradient = [other + 1.0 for other in range(size) for _ in range(rank + 1)]
        assert got == [received, gradient]


@pytest.mark.parametrize("size", [2, in_full(3)])
def test_rows_that_a_rank_cannot_divide_are_refused(size):
    for fact in facts_of(size)["horovod odd rows"]:
        assert fact["error"] == "ArrayError"
        assert f"cannot divide {2 * size + 1} rows evenly among {size} ranks" in fact["text"]


@every_size
def test_slices_have_no_least_rows_as_horovods(size):
    for fact in facts_of(size)["least of slices"]:
        assert "cannot reduce tf.IndexedSlices with op='min'" in fact["text"]


@every_size
def test_means_of_whole_numbers_in_slices_are_no_whole_numbers(size):
    """Also where their shape is not known."""
    ranks = list(range(size))
    means = [[(rank + 1) / size] for rank in ranks]
    twice = [[2 * mean] for [mean] in means]
    for fact in facts_of(size)["whole slices"]:
        assert fact["values"] == [[means, ranks], [twice, ranks]]


@every_size
@every_way
def test_variables_are_copied_where_that_stands(how, size):
    assert of_every_rank("copied", size, how) == [[10 * size, [size]]] * size
    if how != "jit":
        assert of_every_rank("copied flags", size, how) == [[True, False]] * size


@every_size
def test_horovods_example_may_copy_variables_within_its_function(size):
    first, *others = facts_of(size)["example"]
    for other in others:
        assert {**other, "rank": 0} == first
    assert first["rate"] == 0.5


@pytest.mark.parametrize("size", [2, in_full(3)])
def test_copying_variables_in_a_condition_is_refused_in_few_words(size):
    for fact in facts_of(size)["broadcast in a condition"]:
        assert fact["error"] == "ConfigError"
        assert "tf.cond" in fact["text"]


@every_size
@every_way
def test_bool_and_uint16_travel(how, size):
    flags = [flag for rank in range(size) for flag in (rank == 0, True)]
    assert of_every_rank("flags", size, how) == [[flags, [size == 1, True]]] * size
    last = [60_000, size - 1]
    assert of_every_rank("uint16", size, how) == [[last, last]] * size


@every_size
def test_slices_stay_sparse(size):
    for fact in facts_of(size)["slices"]:
        assert fact["sparse"] == [True, True]
        rows = [[1.0] if row < size else [0.0] for row in range(4)]
        assert fact["both"] == [[[2 * v] for [v] in rows], [[2 * size * v] for [v] in rows]]


@every_size
@every_way
def test_local_sources_stay_local_and_sums_are_sums(how, size):
    total = size * (size + 1) / 2
    for rank, got in enumerate(of_every_rank("tape of local", size, how)):
        assert got == [[[rank + 1] * 2] * 2, [total]]
    assert [fact["weight"] for fact in facts_of(size)["optimizer sum"]] == [[-total]] * size
