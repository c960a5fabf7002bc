"""Kernels against their naive twins, called by address as the compiled ring calls them."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from ringreduce.pure import kernels
from ringreduce.vocabulary.types import ReduceOp
from tests import naive

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t)

LENGTHS = (0, 1, 1009, 100_003)
FLOATS = ("float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


def call(address: int, target: np.ndarray, source: np.ndarray) -> None:
    """Run the kernel at `address` on all elements of `target`."""
    _KERNEL(address)(target.ctypes.data, source.ctypes.data, target.size)


def random(dtype: np.dtype, count: int, seed: int) -> np.ndarray:
    """Anything the dtype can hold: whole range for integers, many magnitudes for floats."""
    generator = np.random.default_rng(seed)
    if dtype.kind == "f":
        exponents = generator.integers(-30, 30, count)
        return np.ldexp(generator.standard_normal(count), exponents).astype(dtype)
    return generator.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)


def misaligned(array: np.ndarray) -> np.ndarray:
    """A copy of `array` that starts one byte after an aligned address."""
    copy = np.empty(array.nbytes + 65, np.uint8)
    start = -copy.ctypes.data % 64 + 1
    twin = copy[start : start + array.nbytes].view(array.dtype)
    twin[:] = array
    assert array.size == 0 or twin.ctypes.data % 64 == 1
    return twin


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether all elements are equal, NaN to NaN."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@pytest.mark.parametrize("dtype", naive.COMPUTED.values(), ids=naive.COMPUTED)
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name.lower())
def test_reduction_equals_its_naive_twin(op, dtype):
    for count in LENGTHS:
        target, source = random(dtype, count, 1), random(dtype, count, 2)
        expected = naive.combine(op, target, source)
        call(kernels.reduction(op, dtype), target, source)
        assert same(target, expected)


@pytest.mark.parametrize("dtype", naive.COMPUTED.values(), ids=naive.COMPUTED)
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name.lower())
def test_reduction_takes_a_source_at_an_odd_address(op, dtype):
    """A payload lies wherever libzmq has put it."""
    for count in LENGTHS:
        target, source = random(dtype, count, 1), misaligned(random(dtype, count, 2))
        expected = naive.combine(op, target, source)
        call(kernels.reduction(op, dtype), target, source)
        assert same(target, expected)


@pytest.mark.parametrize("dtype", naive.COMPUTED.values(), ids=naive.COMPUTED)
def test_reduction_leaves_its_source_and_what_lies_beyond_alone(dtype):
    memory, source = random(dtype, 1000, 1), random(dtype, 1000, 2)
    before, source_before = memory.copy(), source.copy()
    call(kernels.reduction(ReduceOp.SUM, dtype), memory[3:500], source[3:500])
    assert same(memory[:3], before[:3])
    assert same(memory[500:], before[500:])
    assert same(source, source_before)


@pytest.mark.parametrize("dtype", [naive.COMPUTED[name] for name in FLOATS], ids=FLOATS)
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name.lower())
def test_nan_on_either_side_stays_visible(op, dtype):
    """Long enough that the vectorised loop and its remainder are both met."""
    values = np.tile(np.array([np.nan, 1, np.nan, -np.inf, np.nan, 0], dtype), 11)
    others = np.tile(np.array([1, np.nan, np.nan, np.nan, np.inf, 0], dtype), 11)
    call(kernels.reduction(op, dtype), values, others)
    expected = np.tile(np.array([True, True, True, True, True, False]), 11)
    assert np.array_equal(np.isnan(values), expected)


@pytest.mark.parametrize("dtype", [naive.COMPUTED[name] for name in FLOATS], ids=FLOATS)
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name.lower())
def test_infinities_combine_as_in_numpy(op, dtype):
    edges = np.array([np.inf, -np.inf, 0, -0.0, 1, -1, np.finfo(dtype).max], dtype)
    target, source = np.repeat(edges, edges.size), np.tile(edges, edges.size)
    expected = naive.combine(op, target, source)
    call(kernels.reduction(op, dtype), target, source)
    assert same(target, expected)


@pytest.mark.parametrize("dtype", [naive.COMPUTED[name] for name in FLOATS], ids=FLOATS)
def test_denormal_sums_are_not_flushed_to_zero(dtype):
    tiny = np.full(100, np.finfo(dtype).smallest_subnormal, dtype)
    target = tiny.copy()
    call(kernels.reduction(ReduceOp.SUM, dtype), target, tiny)
    assert (target == tiny * dtype.type(2)).all()
    assert (target > 0).all()


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("dtype", naive.COMPUTED.values(), ids=naive.COMPUTED)
def test_division_equals_its_naive_twin(dtype, divisor):
    for count in LENGTHS:
        target = random(dtype, count, 1)
        expected = naive.divide(target, divisor)
        call(kernels.divide(dtype), target, np.array([divisor], dtype))
        assert same(target, expected)


@pytest.mark.parametrize("name", INTEGERS[:-1])
def test_division_of_negative_integers_rounds_down(name):
    target = np.array([-4, -3, -2, -1, 0, 1, 2, 3], name)
    call(kernels.divide(target.dtype), target, np.array([2], name))
    assert target.tolist() == [-2, -2, -1, -1, 0, 0, 1, 1]


@pytest.mark.parametrize("dtype", [naive.COMPUTED[name] for name in FLOATS], ids=FLOATS)
def test_division_by_three_gives_back_what_was_added_three_times(dtype):
    """Multiplying by a rounded third would not."""
    numbers = np.arange(1, 1000).astype(dtype)
    target = numbers * dtype.type(3)
    call(kernels.divide(dtype), target, np.array([3], dtype))
    assert (target == numbers).all()


def test_kernel_is_compiled_once_for_an_operator_and_dtype():
    addresses = [kernels.reduction(ReduceOp.SUM, np.dtype(np.float32)) for _ in range(2)]
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("dtype", naive.COMPUTED.values(), ids=naive.COMPUTED)
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name.lower())
def test_reduce_rows_equals_its_naive_twin(op, dtype):
    for count in (0, 1, 1009):
        rows = np.stack([naive.integer_valued(rank, count, dtype) for rank in range(5)])
        target = np.empty(count, dtype)
        reduce_rows(op, rows, target)
        assert same(target, naive.all_reduce(op, list(rows)))


@pytest.mark.parametrize("start", [0, 1, 2])
def test_reduce_rows_may_leave_the_result_in_the_row_it_begins_with(start):
    rows = np.arange(15, dtype=np.float64).reshape(3, 5)
    expected = naive.all_reduce(ReduceOp.MEAN, list(rows.copy()))
    reduce_rows(ReduceOp.MEAN, rows, rows[start], start)
    assert (rows[start] == expected).all()


@pytest.mark.parametrize("start", range(7))
def test_reduce_rows_adds_downwards_from_the_row_it_begins_with(start):
    """So that every rank, which has the others' rows in another order, gets the same bits."""
    rows = np.random.default_rng(3).standard_normal((7, 1009)).astype(np.float32)
    target = np.empty(1009, np.float32)
    reduce_rows(ReduceOp.SUM, rows, target, start)
    ordered = [rows[(start - rank) % 7] for rank in range(7)]
    assert target.tobytes() == naive.all_reduce(ReduceOp.SUM, ordered).tobytes()


def reduce_rows(op: ReduceOp, rows: np.ndarray, target: np.ndarray, start: int = 0) -> None:
    finish = kernels.divide(rows.dtype) if op is ReduceOp.MEAN else 0
    divisor = np.array([len(rows)], rows.dtype).view(np.uint8)
    combine = kernels.reduction(op, rows.dtype)
    rows_bytes, target_bytes = rows.view(np.uint8), target.view(np.uint8)
    kernels.reduce_rows(rows_bytes, start, target_bytes, target.size, combine, finish, divisor)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("table", "count", "width"), [(5, 40, 3), (1, 7, 1), (4, 0, 2), (3, 5, 0)])
def test_add_rows_equals_its_naive_twin(dtype, table, count, width):
    """To the bit, with many rows for each place: the order of additions is that of the rows."""
    rows = random(np.dtype(dtype), count * width, 1).reshape(count, width)
    places = np.random.default_rng(2).integers(0, table, count)
    target = random(np.dtype(dtype), table * width, 3).reshape(table, width)
    expected = target.copy()
    naive.add_rows(expected, places, rows)
    rows.flags.writeable = False  # As what TensorFlow hands out may be.
    kernels.add_rows(target, places, rows)
    assert target.tobytes() == expected.tobytes()


HALVES = [naive.DTYPES[name] for name in naive.HALVES]
ALL_HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


@pytest.mark.parametrize("dtype", HALVES, ids=naive.HALVES)
def test_widen_gives_the_exact_value_of_every_half(dtype):
    halves = ALL_HALVES.view(dtype)
    wide = np.empty(halves.size, np.float32)
    kernels.widen(halves, wide)
    assert_same_bits(wide, halves.astype(np.float32))


@pytest.mark.parametrize("dtype", HALVES, ids=naive.HALVES)
def test_narrow_undoes_widen_for_every_half(dtype):
    halves = ALL_HALVES.view(dtype)
    wide, narrow = np.empty(halves.size, np.float32), np.empty(halves.size, dtype)
    kernels.widen(halves, wide)
    kernels.narrow(wide, narrow)
    assert_same_bits(narrow, halves)


@pytest.mark.parametrize("dtype", HALVES, ids=naive.HALVES)
def test_narrow_rounds_any_float_as_the_reference_does(dtype):
    """Random bits: normal and denormal numbers, infinities and NaN of both signs."""
    words = np.random.default_rng(5).integers(0, 1 << 32, 2_000_003, np.uint32)
    assert_narrowed_like_the_reference(words.view(np.float32), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=naive.HALVES)
def test_narrow_rounds_to_even_between_any_two_halves(dtype):
    """The midpoint of neighbours, and the floats next to it on both sides."""
    with np.errstate(invalid="ignore"):
        halves = ALL_HALVES.view(dtype).astype(np.float64)
    positive = np.unique(halves[np.isfinite(halves) & (halves >= 0)])
    middle = ((positive[:-1] + positive[1:]) / 2).astype(np.float32)
    edges = (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)))
    floats = np.concatenate(edges)
    assert_narrowed_like_the_reference(np.concatenate([floats, -floats]), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=naive.HALVES)
def test_narrow_keeps_the_edges_of_float32(dtype):
    limits = np.finfo(np.float32)
    edges = [0.0, np.inf, np.nan, limits.max, limits.tiny, limits.smallest_subnormal]
    edges += [65504.0, 65519.99, 65520.0, 65536.0, 2.0**-24, 2.0**-25]
    floats = np.array(edges, np.float32)
    assert_narrowed_like_the_reference(np.concatenate([floats, -floats]), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=naive.HALVES)
def test_narrow_of_any_nan_is_nan_and_not_infinity(dtype):
    """Cut off bluntly, a NaN whose only bits are the lowest would become infinity."""
    words = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    narrow = np.empty(words.size, dtype)
    kernels.narrow(words.view(np.float32), narrow)
    assert np.isnan(narrow.astype(np.float32)).all()


def assert_narrowed_like_the_reference(floats: np.ndarray, dtype: np.dtype) -> None:
    narrow = np.empty(floats.size, dtype)
    kernels.narrow(floats, narrow)
    with np.errstate(all="ignore"):
        assert_same_bits(narrow, floats.astype(dtype))


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, except that a NaN may be any NaN of the same sign."""
    word = np.dtype(f"u{got.itemsize}")
    got_bits, expected_bits = got.view(word), expected.view(word)
    with np.errstate(invalid="ignore"):  # ml_dtypes asks signalling NaN without this
        nan = np.isnan(expected)
        assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got_bits[~nan], expected_bits[~nan])
    sign = word.type(1 << (8 * got.itemsize - 1))
    assert np.array_equal(got_bits[nan] & sign, expected_bits[nan] & sign)


FLOATS = [name for name in naive.DTYPES if name.endswith(("16", "32", "64")) and "float" in name]


def naive_first_nonfinite(flat):
    return next(
        (i for i, value in enumerate(flat.astype(np.float64)) if not np.isfinite(value)), -1
    )


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 3, 7, 64, 4097, 9001])
def test_the_first_value_that_is_not_finite_is_found_wherever_it_is(name, bad, count):
    largest = float(ml_dtypes.finfo(naive.DTYPES[name]).max)
    edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        largest,
        -largest,
        float(ml_dtypes.finfo(naive.DTYPES[name]).tiny),
    ]
    flat = np.resize(np.array(edges).astype(naive.DTYPES[name]), count)
    assert kernels.first_nonfinite(flat) == naive_first_nonfinite(flat) == -1
    for index in {0, 1, 2, 3, count // 2, 4095, 4096, count - 2, count - 1} & set(range(count)):
        changed = flat.copy()
        changed[index] = bad
        changed[index:][-1:] = bad  # a later one does not matter
        assert kernels.first_nonfinite(changed) == index == naive_first_nonfinite(changed)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_is_finite_or_not_as_numpy_says(name):
    every = np.arange(1 << 16, dtype=np.uint16).view(naive.DTYPES[name])
    found = [kernels.first_nonfinite(every[i : i + 4]) for i in range(0, every.size, 4)]
    with np.errstate(invalid="ignore"):  # some are signalling NaNs
        quads = ~np.isfinite(every.reshape(-1, 4))
    assert found == [int(q.argmax()) if q.any() else -1 for q in quads]


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int64"])
def test_integers_are_finite(name):
    assert kernels.first_nonfinite(np.full(100, -1).astype(naive.DTYPES[name])) == -1


def test_nothing_is_finite():
    assert kernels.first_nonfinite(np.empty(0, np.float32)) == -1
