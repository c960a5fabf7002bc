"""Sketches: differences of arrays, from a few numbers."""

import numpy as np
import pytest

from ringreduce.pure.sketch import LENGTH, sketch

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(), (3, 7), (LENGTH,), (0,)])
def test_a_small_array_keeps_its_elements(shape):
    array = RANDOM.integers(-9, 9, shape).astype(np.float32)
    assert sketch(array, "x")[: array.size].tolist() == array.reshape(-1).tolist()
    assert not sketch(array, "x")[array.size :].any()


def test_norms_of_differences_are_about_those_of_the_arrays():
    one = RANDOM.normal(size=(400, 250)).astype(np.float32)
    # Its sum is 0, which a sum of parts would take for nothing.
    one -= one.mean()
    two = one + np.float32(0.01) * RANDOM.normal(size=one.shape).astype(np.float32)
    here, there = sketch(one, "kernel"), sketch(two, "kernel")
    ratio = np.linalg.norm(here - there) / np.linalg.norm(here)
    assert ratio == pytest.approx(0.01, rel=0.4)
    assert np.linalg.norm(here) == pytest.approx(np.linalg.norm(one), rel=0.4)


def test_it_is_linear_and_not_finite_where_the_array_is_not():
    one, two = RANDOM.integers(-9, 9, (2, 1001)).astype(np.float32)
    assert (sketch(one - 3 * two, "x") == sketch(one, "x") - 3 * sketch(two, "x")).all()
    # Pieces of ranks, each in a whole of zeros, add up to the whole.
    pieces = np.zeros((2, 1001), np.float32)
    pieces[0, ::2], pieces[1, 1::2] = one[::2], one[1::2]
    assert (sketch(pieces[0], "x") + sketch(pieces[1], "x") == sketch(one, "x")).all()
    two[77] = np.nan
    two[70] = -np.inf
    assert not np.isfinite(sketch(two, "x")).all()
