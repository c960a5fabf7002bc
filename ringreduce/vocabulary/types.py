"""Reduction operators and element types, and their codes on the wire."""

import enum
from functools import lru_cache

import numpy as np

from ringreduce.vocabulary.errors import ArrayError


class ReduceOp(enum.IntEnum):
    """How the elements of all ranks combine; the value is the code on the wire.

    MEAN is the sum divided by the number of ranks. Integer sums wrap as in numpy, and their
    division rounds towards minus infinity (numpy's ``//``). MIN and MAX give NaN where any rank
    has NaN, so that a bad gradient stays visible.
    """

    # Enum's own is written in Python, and every call looks itself up by its operator.
    __hash__ = int.__hash__

    SUM = 1
    MEAN = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


# The position is the code on the wire: append only.
DTYPE_NAMES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8"),
)
_CODES = {name: code for code, name in enumerate(DTYPE_NAMES, start=1)}
_HALF_CODES = frozenset({_CODES["float16"], _CODES["bfloat16"]})


@lru_cache
def dtype_code(dtype: np.dtype) -> int:
    """Code of `dtype` on the wire; ArrayError: it is not supported, or not in native byte order.

    bfloat16 is recognised by name, so that only its users need ml_dtypes.
    """
    if dtype.isnative and dtype.name in _CODES:
        return _CODES[dtype.name]
    order = "" if dtype.isnative else " in foreign byte order"
    raise ArrayError(
        f"cannot send elements of dtype {dtype.name}{order}",
        remedy=f"Convert the array to one of {', '.join(DTYPE_NAMES)}.",
    )


def dtype_named(name: str) -> np.dtype:
    """The dtype of this name, one of `DTYPE_NAMES`; ArrayError for bfloat16 without ml_dtypes."""
    if name == "bfloat16":
        try:
            # Registers it with numpy.
            import ml_dtypes  # noqa: F401
        except ImportError as error:
            raise ArrayError(
                "received elements of dtype bfloat16, which numpy has not",
                remedy="Install ml_dtypes.",
            ) from error
    return np.dtype(name)


def is_half(code: int) -> bool:
    """Whether the dtype with this code is 16-bit floating point, which accumulates in float32."""
    return code in _HALF_CODES


def reduce_op(op: ReduceOp | str) -> ReduceOp:
    """`op` as a ReduceOp; strings such as ``"mean"`` in any case. Raises ArrayError if unknown."""
    if type(op) is ReduceOp:
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    names = ", ".join(name.lower() for name in ReduceOp.__members__)
    raise ArrayError(f"got {op!r} as reduction operator", remedy=f"Use one of {names}.")
