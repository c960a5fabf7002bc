"""Results of calls as bytes: of the same types and bits again."""

import msgspec
import numpy as np
import pytest

from ringreduce.pure.results import pack, unpack
from ringreduce.vocabulary.errors import ArrayError, ProtocolError

NAN = np.frombuffer(np.array([0x7FC12345, 0xFF800001], np.uint32).tobytes(), np.float32)


def same(one, other):
    """Whether they have the same structure, types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(same, one.values(), other.values()))
    if isinstance(one, (np.ndarray, np.generic)):
        kinds = [(each.dtype, each.shape, each.tobytes()) for each in (one, other)]
        return kinds[0] == kinds[1]
    return one == other or one != one


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, -(2**63), 2**64 - 1, 0.1, float("nan"), "text", b"bytes"],
        ((), (1, (2, [3, (4,)])), {"a": (5,), "b": {"c": None}}),
        NAN,
        np.float32(0.1),
        {"loss": np.float64(2), "outputs": [np.ones((2, 0, 3), np.int8), (np.zeros(()),)]},
        [
            np.array(["a", "bc"]),
            np.array([True, False]),
            np.array([1 + 2j]),
            np.arange(3, dtype=">i4"),
        ],
        np.arange(6.0).reshape(2, 3).T,
        np.array(["2026-12-01"], "M8[D]"),
    ],
)
def test_types_and_bits_stay_and_arrays_are_new(value):
    assert same(unpack(pack(value)), value)
    array = unpack(pack(np.zeros(3)))
    array[0] = 1  # The caller's own.
    assert array.flags.owndata


def test_small_floats_of_other_packages_stay():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert same(unpack(pack(np.array([1, 2], bfloat16))), np.array([1, 2], bfloat16))


class Named(dict):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([{"a": object()}], "cannot keep a object"),
        (Named(), "cannot keep a Named"),
        ({1: 2}, "cannot keep a dict"),
        (np.array([None]), "cannot keep elements of dtype object"),
        (np.ma.masked_array([1.0]), "cannot keep a MaskedArray"),
        (np.zeros(2, [("a", "i4")]), "cannot keep elements of dtype"),
        (1 << 64, "cannot send a int"),
    ],
)
def test_what_would_change_is_refused_by_name(value, named):
    with pytest.raises(ArrayError, match=named):
        pack(value)


def ext(code, value):
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value)))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        ext(9, []),
        ext(1, ["float32", [2], b"1234567"]),
        ext(1, ["float32", [2], b"123456789"]),
        ext(1, ["float32", [-1, -2], b"12345678"]),
        ext(1, ["object", [1], b"12345678"]),
        ext(1, ["O", [1], b"12345678"]),
        ext(1, ["V8", [1], b"12345678"]),
        ext(1, ["no dtype", [1], b"12345678"]),
        ext(1, ["float64", ["1"], b"12345678"]),
        ext(1, 5),
        ext(3, 5),
    ],
)
def test_other_bytes_are_an_error_of_ours(packed):
    with pytest.raises(ProtocolError, match="no result of ringreduce"):
        unpack(packed)
