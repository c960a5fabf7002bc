"""Operators and element types, and their codes on the wire."""

import numpy as np
import pytest

from ringreduce.vocabulary import types
from ringreduce.vocabulary.errors import ArrayError
from ringreduce.vocabulary.types import ReduceOp
from tests import naive


def test_codes_on_the_wire_have_not_moved():
    """Two ranks of one wire version must mean the same dtype and operator by the same code."""
    codes = {name: types.dtype_code(dtype) for name, dtype in naive.DTYPES.items()}
    names = " ".join(sorted(codes, key=codes.__getitem__))
    assert names == "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8"
    assert sorted(codes.values()) == list(range(1, 10))
    codes = {op.name: op.value for op in ReduceOp}
    assert codes == {"SUM": 1, "MEAN": 2, "MIN": 3, "MAX": 4, "PRODUCT": 5}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((text, np.dtype(text).name) for text in ("bool", "uint16", "uint64", "complex64")),
        *((text, np.dtype(text).name) for text in ("object", "datetime64[s]", "U3", "S3", "V2")),
        (np.dtype([("a", np.float32)]), "void"),
        (np.dtype("float32").newbyteorder("S"), "float32 in foreign byte order"),
        (np.dtype("int64").newbyteorder("S"), "int64 in foreign byte order"),
    ],
)
def test_dtype_that_cannot_travel_is_refused_by_name(dtype, name):
    with pytest.raises(ArrayError, match="cannot send elements of dtype") as caught:
        types.dtype_code(np.dtype(dtype))
    assert name in str(caught.value)
    assert "float32" in str(caught.value)  # one of those it could be converted to


def test_half_types_are_the_two_16_bit_floats():
    halves = {n for n, dtype in naive.DTYPES.items() if types.is_half(types.dtype_code(dtype))}
    assert halves == {"float16", "bfloat16"}


@pytest.mark.parametrize("op", list(ReduceOp))
def test_operator_may_be_given_as_itself_or_as_text_in_any_case(op):
    texts = (op.name, op.name.lower(), op.name.title())
    assert [types.reduce_op(given) for given in (op, *texts)] == [op] * 4


@pytest.mark.parametrize("bad", ["average", "", "sum ", 1, None, np.add, b"sum"])
def test_unknown_operator_is_refused_with_the_known_ones(bad):
    with pytest.raises(ArrayError) as caught:
        types.reduce_op(bad)
    assert repr(bad) in str(caught.value)
    assert "sum, mean, min, max, product" in str(caught.value)
