"""One step of subspace iteration, beside numpy."""

import numpy as np
import pytest

from ringreduce.pure import low_rank

SHAPES = [(1, 1, 1), (7, 5, 2), (64, 3, 1), (33, 130, 4)]


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_the_steps_are_those_of_numpy(rows, columns, rank):
    matrix, left, across = drawn(rows, columns), drawn(rows, columns, seed=1), drawn(rank, columns)
    whole = matrix.astype(float) + left
    down = np.empty((rows, rank), np.float32)
    low_rank.project(matrix, left, across, down)
    np.testing.assert_array_equal(matrix, whole.astype(np.float32))
    np.testing.assert_allclose(down, whole @ across.T, rtol=1e-4, atol=1e-4)
    low_rank.orthonormalize(down)
    np.testing.assert_allclose(down.T @ down, np.eye(rank), atol=1e-6)
    new = np.empty_like(across)
    low_rank.project_back(matrix, down, new)
    np.testing.assert_allclose(new, down.T @ whole, rtol=1e-4, atol=1e-4)
    low_rank.replace(matrix, left, down, new)
    np.testing.assert_allclose(matrix, down @ new, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(matrix.astype(float) + left, whole, atol=1e-5)


def test_a_matrix_of_low_rank_is_found_whole():
    matrix = drawn(50, 3) @ drawn(3, 40, seed=1)
    whole, left, down = matrix.copy(), np.zeros_like(matrix), np.empty((50, 3), np.float32)
    new = np.empty((3, 40), np.float32)
    low_rank.project(matrix, left, drawn(3, 40, seed=2), down)
    low_rank.orthonormalize(down)
    low_rank.project_back(matrix, down, new)
    low_rank.replace(matrix, left, down, new)
    np.testing.assert_allclose(matrix, whole, rtol=1e-4, atol=1e-4)


def test_columns_that_depend_on_others_become_zero():
    down = drawn(20, 4)
    down[:, 1] = 0
    down[:, 3] = 2 * down[:, 0] - down[:, 2]
    low_rank.orthonormalize(down)
    np.testing.assert_allclose(down.T @ down, np.diag([1, 0, 1, 0]), atol=1e-6)
    assert not down[:, [1, 3]].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    matrix = drawn(9, 8)
    matrix[4, 5] = bad
    down = np.empty((9, 2), np.float32)
    low_rank.project(matrix, np.zeros_like(matrix), drawn(2, 8), down)
    assert not np.isfinite(down[4]).any()
    assert np.isfinite(np.delete(down, 4, axis=0)).all()
