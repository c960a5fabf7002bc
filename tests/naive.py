"""Naive twins: what kernels and collectives must give, in plain numpy and the fewest words."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ringreduce.vocabulary.types import DTYPE_NAMES, ReduceOp

DTYPES = {
    name: np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    for name in DTYPE_NAMES
}
HALVES = ("float16", "bfloat16")
# What kernels work on: halves are widened first.
COMPUTED = {name: dtype for name, dtype in DTYPES.items() if name not in HALVES}


def combine(op: ReduceOp, target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """`target` and `source` reduced element by element; a mean is not divided yet."""
    with np.errstate(all="ignore"):
        if op is ReduceOp.MIN:
            return np.minimum(target, source)  # NaN where either has NaN
        if op is ReduceOp.MAX:
            return np.maximum(target, source)
        if op is ReduceOp.PRODUCT:
            return target * source
        return target + source


def divide(array: np.ndarray, divisor: int) -> np.ndarray:
    """`array` divided as a mean is: integers round towards minus infinity."""
    with np.errstate(all="ignore"):
        return array / array.dtype.type(divisor) if _is_float(array) else array // divisor


def all_reduce(op: ReduceOp, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """What all ranks hold after an all-reduce of `arrays`; halves accumulate in float32."""
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.name in HALVES else dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = combine(op, total, array.astype(wide))
    if op is ReduceOp.MEAN:
        total = divide(total, len(arrays))
    return total.astype(dtype)


def all_gather(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """What all ranks get from an all-gather of `arrays`."""
    return np.concatenate([np.atleast_1d(array) for array in arrays])


def add_rows(target: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """Add each row to that of `target` where it belongs, one after the other."""
    for place, row in zip(places, rows, strict=True):
        target[place] = target[place] + row


def integer_valued(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    """`count` small whole numbers that differ between ranks; sums and products are exact."""
    values = (np.arange(count) * 7 + rank * 3) % 5
    return values.astype(dtype) if dtype.kind == "u" else (values - 2).astype(dtype)


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.name.startswith("float")
