"""Kernels against their naive twins, called by address as the compiled ring calls them."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from ringreduce.pure import kernels
from ringreduce.vocabulary.types import ReduceOp
from tests import naive

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t)

LENGTHS = (0, 1, 1009, 100_003)
ALL_HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)

all_ops = pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name.lower())
all_dtypes = pytest.mark.parametrize("dtype", naive.COMPUTED.values(), ids=naive.COMPUTED)
floats = pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f8")], ids=str)
halves = pytest.mark.parametrize("dtype", [naive.DTYPES[n] for n in naive.HALVES], ids=naive.HALVES)


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
    memory = np.empty(array.nbytes + 65, np.uint8)
    start = -memory.ctypes.data % 64 + 1
    copy = memory[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    assert array.size == 0 or copy.ctypes.data % 64 == 1
    return copy


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether all elements are equal, NaN to NaN."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@all_dtypes
@all_ops
def test_reduction_equals_its_naive_twin(op, dtype):
    """Also from an odd address, since a payload lies wherever libzmq has put it."""
    for count in LENGTHS:
        target, source = random(dtype, count, 1), random(dtype, count, 2)
        expected = naive.combine(op, target, source)
        for placed in (source, misaligned(source)):
            found = target.copy()
            call(kernels.reduction(op, dtype), found, placed)
            assert same(found, expected)
            assert same(placed, source)


@all_dtypes
def test_reduction_leaves_what_lies_beyond_alone(dtype):
    memory, source = random(dtype, 1000, 1), random(dtype, 1000, 2)
    before = memory.copy()
    call(kernels.reduction(ReduceOp.SUM, dtype), memory[3:500], source[3:500])
    assert same(memory[:3], before[:3])
    assert same(memory[500:], before[500:])


@floats
@all_ops
def test_nan_and_infinity_combine_as_in_numpy(op, dtype):
    """Often enough that the vectorised loop and its remainder are both met."""
    edges = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, -1, np.finfo(dtype).max], dtype)
    target, source = np.repeat(edges, edges.size), np.tile(edges, edges.size)
    target, source = np.append(target, target[:5]), np.append(source, source[:5])
    expected = naive.combine(op, target, source)
    call(kernels.reduction(op, dtype), target, source)
    assert same(target, expected)
    assert np.isnan(target[np.isnan(source)]).all()


@floats
def test_denormal_sums_are_not_flushed_to_zero(dtype):
    tiny = np.full(100, np.finfo(dtype).smallest_subnormal, dtype)
    target = tiny.copy()
    call(kernels.reduction(ReduceOp.SUM, dtype), target, tiny)
    assert (target == tiny * dtype.type(2)).all()
    assert (target > 0).all()


@all_dtypes
@pytest.mark.parametrize("divisor", [1, 2, 3, 17])
def test_division_equals_its_naive_twin(dtype, divisor):
    for count in LENGTHS:
        target = random(dtype, count, 1)
        expected = naive.divide(target, divisor)
        call(kernels.divide(dtype), target, np.array([divisor], dtype))
        assert same(target, expected)


@floats
def test_division_by_three_gives_back_what_was_added_three_times(dtype):
    """Multiplying by a rounded third would not."""
    numbers = np.arange(1, 1000).astype(dtype)
    target = numbers * dtype.type(3)
    call(kernels.divide(dtype), target, np.array([3], dtype))
    assert (target == numbers).all()


def test_kernel_is_compiled_once_for_an_operator_and_dtype():
    addresses = {kernels.reduction(ReduceOp.SUM, np.dtype(np.float32)) for _ in range(2)}
    assert len(addresses) == 1


def reduce_rows(op: ReduceOp, rows: np.ndarray, target: np.ndarray, start: int = 0) -> None:
    finish = kernels.divide(rows.dtype) if op is ReduceOp.MEAN else 0
    divisor = np.array([len(rows)], rows.dtype).view(np.uint8)
    combine = kernels.reduction(op, rows.dtype)
    rows_bytes, target_bytes = rows.view(np.uint8), target.view(np.uint8)
    kernels.reduce_rows(rows_bytes, start, target_bytes, target.size, combine, finish, divisor)


@all_dtypes
@all_ops
def test_reduce_rows_equals_its_naive_twin(op, dtype):
    for count in (0, 1, 1009):
        rows = np.stack([naive.integer_valued(rank, count, dtype) for rank in range(5)])
        target = np.empty(count, dtype)
        reduce_rows(op, rows, target)
        assert same(target, naive.all_reduce(op, list(rows)))


@pytest.mark.parametrize("start", [0, 1, 6])
def test_reduce_rows_adds_downwards_from_the_row_it_begins_with(start):
    """So that every rank, which has the others' rows in another order, gets the same bits.

    The result may be left in that row.
    """
    rows = np.random.default_rng(3).standard_normal((7, 1009)).astype(np.float32)
    expected = naive.all_reduce(ReduceOp.SUM, [rows[(start - rank) % 7] for rank in range(7)])
    for target in (np.empty(1009, np.float32), rows[start]):
        reduce_rows(ReduceOp.SUM, rows, target, start)
        assert target.tobytes() == expected.tobytes()


@floats
@pytest.mark.parametrize(("table", "count", "width"), [(5, 40, 3), (1, 7, 1), (4, 0, 2), (3, 5, 0)])
def test_add_rows_equals_its_naive_twin(dtype, table, count, width):
    """To the bit, with many rows for each place: the order of additions is that of the rows."""
    rows = random(dtype, count * width, 1).reshape(count, width)
    places = np.random.default_rng(2).integers(0, table, count)
    target = random(dtype, table * width, 3).reshape(table, width)
    expected = target.copy()
    naive.add_rows(expected, places, rows)
    rows.flags.writeable = False  # As what TensorFlow hands out may be.
    kernels.add_rows(target, places, rows)
    assert target.tobytes() == expected.tobytes()


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


@halves
def test_widen_gives_the_exact_value_of_every_half_and_narrow_undoes_it(dtype):
    every = ALL_HALVES.view(dtype)
    wide, narrow = np.empty(every.size, np.float32), np.empty(every.size, dtype)
    kernels.widen(every, wide)
    assert_same_bits(wide, every.astype(np.float32))
    kernels.narrow(wide, narrow)
    assert_same_bits(narrow, every)


def middles(dtype: np.dtype) -> np.ndarray:
    """The midpoints of neighbouring halves, and the floats next to them on both sides."""
    with np.errstate(invalid="ignore"):
        every = ALL_HALVES.view(dtype).astype(np.float64)
    positive = np.unique(every[np.isfinite(every) & (every >= 0)])
    middle = ((positive[:-1] + positive[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(to)) for to in (0, np.inf)]
    return np.concatenate([middle, *beside])


def edges(dtype: np.dtype) -> np.ndarray:
    """The edges of float32 and float16, and NaN that would become infinity, cut off bluntly."""
    limits = np.finfo(np.float32)
    found = [0.0, np.inf, np.nan, limits.max, limits.tiny, limits.smallest_subnormal]
    found += [65504.0, 65519.99, 65520.0, 65536.0, 2.0**-24, 2.0**-25]
    nan = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    return np.append(np.array(found, np.float32), nan)


def any_bits(dtype: np.dtype) -> np.ndarray:
    """Normal and denormal numbers, infinities and NaN."""
    return np.random.default_rng(5).integers(0, 1 << 31, 1_000_003, np.uint32).view(np.float32)


@halves
@pytest.mark.parametrize("floats_of", [middles, edges, any_bits])
def test_narrow_rounds_as_the_reference_does(dtype, floats_of):
    floats = floats_of(dtype)
    floats = np.concatenate([floats, -floats])
    narrow = np.empty(floats.size, dtype)
    kernels.narrow(floats, narrow)
    with np.errstate(all="ignore"):
        assert_same_bits(narrow, floats.astype(dtype))


ALL_FLOATS = [name for name in naive.DTYPES if "float" in name]
BLOCK = kernels._BLOCK


@pytest.mark.parametrize("name", ALL_FLOATS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 3, 64, BLOCK + 5])
def test_the_first_value_that_is_not_finite_is_found_wherever_it_is(name, bad, count):
    limits = ml_dtypes.finfo(naive.DTYPES[name])
    values = [0.0, -0.0, 1.0, -1.0, float(limits.max), -float(limits.max), float(limits.tiny)]
    flat = np.resize(np.array(values).astype(naive.DTYPES[name]), count)
    assert kernels.first_nonfinite(flat) == -1
    for index in {0, 1, 2, count // 2, BLOCK - 1, BLOCK, count - 2, count - 1} & set(range(count)):
        changed = flat.copy()
        changed[index] = changed[-1] = bad  # a later one does not matter
        assert kernels.first_nonfinite(changed) == index


@halves
def test_every_half_is_finite_or_not_as_numpy_says(dtype):
    every = ALL_HALVES.view(dtype)
    found = [kernels.first_nonfinite(every[i : i + 4]) for i in range(0, every.size, 4)]
    with np.errstate(invalid="ignore"):  # some are signalling NaNs
        quads = ~np.isfinite(every.reshape(-1, 4))
    assert found == [int(q.argmax()) if q.any() else -1 for q in quads]


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int64"])
def test_integers_are_finite(name):
    assert kernels.first_nonfinite(np.full(100, -1).astype(name)) == -1
    assert kernels.first_nonfinite(np.empty(0, np.float32)) == -1
