"""Encodes results of calls: arrays, and lists, tuples and dicts of them and of plain values.

Decoded they have the same types and bits. What travels between ranks as an object loses tuples and
holds no arrays; see `ringreduce.pure.payload`.
"""

import math
from typing import Any

import msgspec
import numpy as np

from ringreduce.pure import payload
from ringreduce.pure.decoding import UNREADABLE
from ringreduce.vocabulary.errors import ArrayError, ProtocolError
from ringreduce.vocabulary.types import DTYPE_NAMES, dtype_named

# MessagePack's codes of what it does not have itself.
_ARRAY, _SCALAR, _TUPLE = 1, 2, 3
_PLAIN = (type(None), bool, int, float, str, bytes)
_KINDS = "biufcSUMm"  # numpy's kinds of dtypes whose elements are their bytes, and have a name


def pack(value: Any) -> bytes:
    """Encode `value`; ArrayError, which names it, for another type, or if it is too large.

    The limit is that of objects that travel.
    """
    return payload.encode(_prepared(value)).tobytes()


def unpack(packed: bytes) -> Any:
    """What `pack` encoded; arrays are the caller's own. ProtocolError for other bytes."""
    try:
        return _restored(msgspec.msgpack.decode(packed))
    except (*UNREADABLE, TypeError) as error:
        text = f"received {len(packed)} bytes that are no result of ringreduce: {error}"
        raise ProtocolError(text, remedy="All ranks must run the same ringreduce.") from error


def _prepared(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [*map(_prepared, value)]
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([*map(_prepared, value)]))
    if kind is dict and all(type(key) is str for key in value):
        return {key: _prepared(each) for key, each in value.items()}
    if kind is np.ndarray or isinstance(value, np.generic):
        dtype = value.dtype
        if value.nbytes > payload.OBJECT_BYTES_MAX:
            raise ArrayError(f"cannot keep an array of {value.nbytes} bytes")
        name = dtype.name if dtype.name in DTYPE_NAMES and dtype.isnative else dtype.str
        if dtype.name in DTYPE_NAMES or (dtype.kind in _KINDS and dtype.itemsize):
            described = msgspec.msgpack.encode([name, value.shape, value.tobytes()])
            return msgspec.msgpack.Ext(_ARRAY if kind is np.ndarray else _SCALAR, described)
        raise ArrayError(f"cannot keep elements of dtype {dtype.name}")
    raise ArrayError(f"cannot keep a {kind.__name__}")


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_restored, value)]
    if isinstance(value, dict):
        return {key: _restored(each) for key, each in value.items()}
    if not isinstance(value, msgspec.msgpack.Ext):
        return value
    parts = msgspec.msgpack.decode(value.data)
    if value.code == _TUPLE:
        return tuple(map(_restored, parts))
    if value.code not in (_ARRAY, _SCALAR):
        raise ValueError(f"unknown code {value.code}")
    name, shape, data = parts
    dtype = dtype_named(name)
    is_kept = dtype.name in DTYPE_NAMES or (dtype.kind in _KINDS and dtype.itemsize)
    if not is_kept or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes as {dtype.name} {tuple(shape)}")
    array = np.ndarray(tuple(shape), dtype, data).copy()
    return array if value.code == _ARRAY else array[()]
