"""Operators and element types, and their codes on the wire."""

from __future__ import annotations

import numpy as np
import pytest

from ringreduce.vocabulary import types
from ringreduce.vocabulary.errors import ArrayError
from ringreduce.vocabulary.types import ReduceOp
from tests import naive


def test_codes_on_the_wire_have_not_moved():
    """Two ranks of one wire version must mean the same dtype by the same code."""
    codes = {name: types.dtype_code(dtype) for name, dtype in naive.DTYPES.items()}
    assert codes == {
        "float16": 1,
        "bfloat16": 2,
        "float32": 3,
        "float64": 4,
        "int8": 5,
        "int16": 6,
        "int32": 7,
        "int64": 8,
        "uint8": 9,
    }


def test_operators_on_the_wire_have_not_moved():
    codes = {op.name: op.value for op in ReduceOp}
    assert codes == {"SUM": 1, "MEAN": 2, "MIN": 3, "MAX": 4, "PRODUCT": 5}


@pytest.mark.parametrize(
    "name",
    ["bool", "uint16", "uint64", "complex64", "object", "datetime64[s]", "U3", "S3", "V2"],
)
def test_dtype_that_cannot_travel_is_refused_by_name(name):
    dtype = np.dtype(name)
    with pytest.raises(ArrayError, match="cannot send elements of dtype") as caught:
        types.dtype_code(dtype)
    assert dtype.name in str(caught.value)
    assert "float32" in str(caught.value)  # one of those it could be converted to


def test_record_dtype_is_refused():
    with pytest.raises(ArrayError):
        types.dtype_code(np.dtype([("a", np.float32)]))


@pytest.mark.parametrize("name", ["float32", "int64"])
def test_foreign_byte_order_is_refused_and_named(name):
    with pytest.raises(ArrayError, match=f"{name} in foreign byte order"):
        types.dtype_code(np.dtype(name).newbyteorder("S"))


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
