"""What is encoded comes back as close as it must, and what is lost is in the residuals."""

import numpy as np
import pytest

from ringreduce.pure.encodings import encoding_of

COUNTS = (0, 1, 255, 256, 257, 1009)
NAMES = ("fp16", "bf16", "int8")
# Of the largest value of 256.
STEP = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 127 * 1.001}


def values_of(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def coded(name, values, residuals=None):
    """The encoded values, and what they are decoded to."""
    encoding = encoding_of(name)
    wire = np.full(encoding.nbytes(values.size), 255, np.uint8)
    encoding.encode(values, wire, residuals)
    found = np.full(values.size, 7, np.float32)
    encoding.decode(wire, found)
    return wire, found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", COUNTS)
def test_values_come_back_within_half_a_step(name, count):
    values = values_of(count)
    before = values.copy()
    _, found = coded(name, values)
    for start in range(0, count, 256):
        block = slice(start, start + 256)
        most = np.abs(values[block]).max()
        np.testing.assert_allclose(found[block], values[block], atol=most * STEP[name], rtol=0)
    assert np.array_equal(values, before)


@pytest.mark.parametrize(
    ("name", "count", "nbytes"),
    [("bf16", 257, 514), ("fp16", 0, 0), ("int8", 0, 0), ("int8", 256, 260), ("int8", 257, 268)],
)
def test_bytes(name, count, nbytes):
    assert encoding_of(name).nbytes(count) == nbytes


def test_int8_by_hand():
    values = np.array([127, -64, 0.4, -0.6, 0, 2.5], np.float32)
    residuals = np.array([0, 0, 0.2, 0, 0, 0], np.float32)
    wire, found = coded("int8", values, residuals)
    assert found.tolist() == [127, -64, 1, -1, 0, 2]
    np.testing.assert_allclose(residuals, [0, 0, -0.4, 0.4, 0, 0.5], atol=1e-6)
    assert wire[:4].view(np.float32).tolist() == [1.0]


@pytest.mark.parametrize("count", COUNTS)
def test_int8_loses_nothing_over_many_steps(count):
    """What was decoded plus what is left is what was given, and little is left."""
    residuals = np.zeros(count, np.float32)
    given, got = np.zeros(count), np.zeros(count)
    for step in range(50):
        values = values_of(count, step)
        given += values
        got += coded("int8", values, residuals)[1]
    np.testing.assert_allclose(got + residuals, given, atol=2e-4)
    assert np.abs(residuals).max(initial=0) < 0.05


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(name, bad):
    values = values_of(600)
    values[300] = bad
    wire, found = coded(name, values, np.zeros(600, np.float32))
    assert not np.isfinite(found[300])
    assert np.isfinite(np.delete(found, slice(256, 512))).all()
    encoding = encoding_of(name)
    assert not encoding.are_finite(wire, 600)
    assert encoding.are_finite(coded(name, values[:256])[0], 256)


@pytest.mark.parametrize("large", [0.0, 1e-45, 1e-38, 3e38])
def test_int8_of_the_smallest_and_largest_blocks(large):
    values = np.array([large, -large, large / 2], np.float32)
    residuals = np.zeros(3, np.float32)
    _, found = coded("int8", values, residuals)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, values, atol=max(2.5e-38, large / 200))
    np.testing.assert_allclose(found + residuals, values, rtol=1e-6)


@pytest.mark.parametrize("value", [1.0, 0.3, 3e-37, 3e-38])
def test_what_is_left_of_a_gradient_that_became_zero_stays_finite(value):
    """It shrinks by a factor of some 250 in each step, through every size that floats have."""
    values = values_of(300) * np.float32(value)
    residuals = np.zeros_like(values)
    for _ in range(40):
        _, found = coded("int8", values, residuals)
        assert np.isfinite(found).all()
        assert np.isfinite(residuals).all()
        values = np.zeros_like(values)
