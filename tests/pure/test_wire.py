"""The header: eight words that two ranks read alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure import wire
from ringreduce.pure.wire import Header, Kind
from ringreduce.vocabulary.types import DTYPE_NAMES, ReduceOp, dtype_code


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


WIDTHS = {
    "kind": 8,
    "job": 64,
    "rank": 32,
    "sequence": 64,
    "dtype": 8,
    "op": 8,
    "epoch": 16,
    "group": 16,
    "count": 64,
    "step": 32,
    "segment": 32,
    "nbytes": 64,
    "signature": 64,
    "magic": 32,
    "version": 8,
}
headers = st.builds(Header, **{name: unsigned(bits) for name, bits in WIDTHS.items()})
all_words = st.lists(unsigned(64), min_size=8, max_size=8)
ZEROS = Header(kind=0, job=0, rank=0, sequence=0, magic=0, version=0)


@given(headers)
def test_decode_undoes_encode(header):
    assert wire.decode(wire.encode(header)) == header


@given(all_words)
def test_encode_undoes_decode_of_any_words(words):
    assert wire.encode(wire.decode(np.array(words, np.uint64))).tolist() == words


@given(all_words)
def test_describe_never_fails_whatever_arrived(words):
    assert f"#{words[3]}" in wire.decode(np.array(words, np.uint64)).describe()


@pytest.mark.parametrize(
    ("field", "word", "shift"),
    [
        ("magic", 0, 0),
        ("version", 0, 32),
        ("kind", 0, 40),
        ("dtype", 0, 48),
        ("op", 0, 56),
        ("job", 1, 0),
        ("epoch", 2, 0),
        ("group", 2, 16),
        ("rank", 2, 32),
        ("sequence", 3, 0),
        ("count", 4, 0),
        ("step", 5, 0),
        ("segment", 5, 32),
        ("nbytes", 6, 0),
        ("signature", 7, 0),
    ],
)
def test_field_is_where_the_compiled_loop_looks_for_it(field, word, shift):
    largest = 2 ** WIDTHS[field] - 1
    expected = [0] * 8
    expected[word] = largest << shift
    assert wire.encode(Header(**{**vars(ZEROS), field: largest})).tolist() == expected


def test_header_begins_with_the_magic_and_version_in_memory():
    text = wire.encode(Header(kind=Kind.BARRIER, job=0, rank=0, sequence=0)).tobytes()
    assert text[:6] == b"RRRF" + bytes([wire.WIRE_VERSION, Kind.BARRIER])


def test_header_is_as_long_as_it_says():
    assert wire.encode(ZEROS).nbytes == wire.HEADER_BYTES == 64


def test_describe_names_the_call_as_the_user_makes_it():
    header = Header(
        kind=Kind.ALL_REDUCE,
        job=1,
        rank=2,
        sequence=7,
        dtype=dtype_code(np.dtype(np.float32)),
        op=ReduceOp.SUM,
        count=1000,
    )
    assert header.describe() == "all_reduce #7 of 1000 float32, sum"


def test_describe_leaves_out_what_a_call_does_not_have():
    assert Header(kind=Kind.BARRIER, job=1, rank=0, sequence=3).describe() == "barrier #3"


def test_describe_says_that_it_does_not_know_an_operation():
    assert Header(kind=99, job=1, rank=0, sequence=3).describe() == "unknown operation 99 #3"


def test_describe_leaves_out_a_dtype_it_does_not_know():
    code = len(DTYPE_NAMES) + 1
    header = Header(kind=Kind.BROADCAST, job=1, rank=0, sequence=0, dtype=code, count=5)
    assert header.describe() == "broadcast #0"


@pytest.mark.parametrize(
    ("parts", "signature"),
    [
        ((), 5694367389426422167),
        (("plan", 1, (2, 3)), 8197589543118763555),
        (("root", 0), 15721097805606681370),
    ],
)
def test_signature_is_the_same_in_every_process(parts, signature):
    """Also in every release that keeps the wire version: these numbers are the contract."""
    assert wire.signature_of(*parts) == signature


@given(st.lists(st.integers() | st.text() | st.booleans() | st.none(), max_size=4), st.data())
def test_signature_changes_with_any_part(parts, data):
    changed = list(parts)
    changed.insert(data.draw(st.integers(0, len(parts))), "another")
    assert wire.signature_of(*parts) != wire.signature_of(*changed)


@pytest.mark.parametrize(
    ("one", "other"),
    [((1,), (True,)), ((1,), ("1",)), (("ab",), ("a", "b")), (((1, 2), 3), (1, (2, 3)))],
)
def test_signature_tells_apart_parts_that_look_alike(one, other):
    assert wire.signature_of(*one) != wire.signature_of(*other)
