"""Sparse gradients, eagerly on rings of threads; test_routes has all routes."""

import logging
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ringreduce import ArrayError, ConfigError, MismatchError, NumericsError
from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow import GradientBridge
from ringreduce.tensorflow.sparse import as_gradient
from ringreduce.testing import ring_of_threads


def slices(values: Any, indices: Any, shape: Any, dtype: Any = tf.float32) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.constant(values, dtype), tf.constant(indices, tf.int64), tf.constant(shape, tf.int64)
    )


def on_threads(size: int, steps: Any, paths: Any = ("table",), **options: Any) -> list[Any]:
    """What each rank gets from the last of `steps(rank)`, or the error it met."""

    def work(comm: Communicator) -> Any:
        made = GradientBridge(1 << 20, **options)
        try:
            for gradients in steps(comm.rank):
                means = made.mean(comm, gradients, paths)
        except (MismatchError, ArrayError, NumericsError) as error:
            assert comm.failure is not None
            return error
        return means

    return ring_of_threads(size, work)


def test_sparse_as_dense_gives_the_whole() -> None:
    def steps(rank: int) -> Any:
        return [[slices([[2.0]] * 2, [rank, rank], (9, 1))]]

    for (mean,) in on_threads(2, steps, sparse_as_dense=True):
        assert isinstance(mean, tf.Tensor)
        assert mean.numpy().reshape(-1).tolist() == [2.0, 2.0] + [0.0] * 7


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (np.array([1.0, 6.0]), [1, 6]),
        (np.array([1, 6]), [1, 6]),
        ([1, 6.5], [1, 6.5]),
        ((1, 6), [1, 6]),
        (tf.Variable([1.0, 6.0]), [1, 6]),
        (tf.IndexedSlices([1.5], (1,), (2,)), [0, 1.5]),
        (tf.IndexedSlices(np.array([1.5, 2.0]), [1, 1], None), [0, 3.5]),
        (tf.IndexedSlices(tf.constant([1.5]), np.array([1]), tf.constant([2])), [0, 1.5]),
    ],
)
def test_whatever_tensorflow_makes_a_tensor_of_is_a_gradient(gradient: Any, expected: Any) -> None:
    made = as_gradient(gradient, tf.Variable([0.0, 0.0]))
    assert isinstance(made, tf.IndexedSlices) == isinstance(gradient, tf.IndexedSlices)
    assert made.dtype == tf.float32
    assert tf.convert_to_tensor(made).numpy().tolist() == expected


@pytest.mark.parametrize("gradient", [object(), "text", [1.0, [2.0]]])
def test_what_is_no_gradient_is_refused_with_the_name_of_its_variable(gradient: Any) -> None:
    with pytest.raises(ConfigError, match="a gradient of here:0 that is no tensor"):
        as_gradient(gradient, tf.Variable([0.0, 0.0], name="here"))


def test_integers_are_reduced_as_a_whole() -> None:
    for (mean,) in on_threads(2, lambda rank: [[slices([[4]], [rank], (3, 1), tf.int64)]]):
        assert tf.convert_to_tensor(mean).numpy().tolist() == [[2], [2], [0]]


def test_gathering_sends_the_rows_and_not_the_table() -> None:
    def work(comm: Communicator) -> Any:
        made = GradientBridge(1 << 20)
        gradient = slices(np.ones((10, 64)), np.arange(10) + comm.rank, (50_000, 64))
        made.mean(comm, [gradient], ["table"])
        before = comm.statistics().bytes_sent
        made.mean(comm, [gradient], ["table"])
        return comm.statistics().bytes_sent - before

    for sent in ring_of_threads(2, work):
        rows = 10 * (64 * 4 + 8)
        assert rows <= sent < rows + 200


@pytest.mark.parametrize("beside", [[], [np.ones(3, np.float32)]], ids=["alone", "beside a dense"])
@pytest.mark.parametrize("before", [0, 2])
def test_dense_on_one_rank_is_an_error_on_all_that_names_the_variable(
    beside: Any, before: int
) -> None:
    sparse = [slices([[2.0]], [1], (9, 1)), *map(tf.constant, beside)]
    dense = [tf.convert_to_tensor(sparse[0]), *sparse[1:]]
    paths = ["embedding/table", "bias"][: len(sparse)]
    errors = on_threads(3, lambda rank: [*[sparse] * before, sparse if rank else dense], paths)
    for rank, error in enumerate(errors):
        assert isinstance(error, MismatchError)
        assert "embedding/table" in str(error)
        if before == 0:
            assert "embedding/table: sparse float32 of shape (9, 1)" in str(error), rank
            assert "embedding/table: float32 of shape (9, 1)" in str(error), rank
    if before:
        assert "gradients that changed since the last step" in str(errors[0])
        assert "from embedding/table: sparse float32 of shape (9, 1)" in str(errors[0])


def test_ranks_in_different_known_plans_are_told_apart_by_name() -> None:
    """Both plans were used before, so only the signature of the exchange tells."""
    gradient = slices([[2.0]], [1], (9, 1))
    one, other = [gradient, None], [None, gradient]
    steps = [[one, other, last] for last in (other, one)]
    for error in on_threads(2, steps.__getitem__, ["first", "second"]):
        assert isinstance(error, MismatchError)
        assert "first: sparse float32 of shape (9, 1)" in str(error)
        assert "first: no gradient (None)" in str(error)


@pytest.mark.parametrize("index", [-1, 9])
def test_a_row_outside_of_the_table_is_an_error_on_all(index: int) -> None:
    gradients = [slices([[2.0]], [row], (9, 1)) for row in (0, index, 0)]
    for error in on_threads(3, lambda rank: [[gradients[rank]]], ["embedding/table"]):
        assert isinstance(error, ArrayError)
        assert f"rank 1 of 3 has row {index} in its gradient of embedding/table" in str(error)
        assert "Rows are 0 to 8" in str(error)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64])
def test_a_bad_value_is_named_by_its_place_in_the_table(dtype: Any) -> None:
    def steps(rank: int) -> Any:
        values = np.ones((3, 2, 2))
        good = slices(values, [70, 5, 5], (90, 2, 2), dtype)
        values[0, 1, 0] = np.nan if rank == 1 else 1.0
        return [[good], [slices(values, [70, 5, 5], (90, 2, 2), dtype)]]

    for error in on_threads(2, steps, check_numerics="raise"):
        assert isinstance(error, NumericsError)
        kind = f"sparse {dtype.name} of shape (90, 2, 2)"
        assert f"rank 1 of 2 has nan at [70, 1, 0] of table: {kind}" in str(error)
        assert "as its own gradient in step 1" in str(error)


@pytest.mark.parametrize("rows", [30, 2], ids=["gathered", "table"])
def test_a_sum_of_rows_that_overflows_is_told_from_a_bad_gradient(rows: int) -> None:
    largest = float(np.finfo(np.float32).max)

    def steps(rank: int) -> Any:
        # In the first row, which is in rank 0's share.
        return [[slices([[largest], [1.0]], [0, 1], (rows, 1))], [slices([[1.0]], [0], (rows, 1))]]

    errors = on_threads(2, steps, check_numerics="raise")
    assert [type(error) for error in errors] == [NumericsError] * 2
    for error in errors:
        assert "inf at [0, 0] of table" in str(error)
        assert "though each rank's was finite" in str(error)


def test_a_warning_comes_once_for_a_step_with_bad_rows_and_a_bad_bucket(caplog: Any) -> None:
    steps = [[[tf.constant([v]), slices([[v]], [3], (9, 1))]] * 2 for v in (1.0, np.nan)]
    with caplog.at_level(logging.WARNING, "ringreduce"):
        on_threads(2, steps.__getitem__, ["dense", "table"], check_numerics="warn")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "nan at [0] of dense" in said[0]
    assert "in step 0," in said[0]
