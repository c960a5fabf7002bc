"""The header: eight words that two ranks read alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure import wire
from ringreduce.pure.wire import Header, Kind
from ringreduce.vocabulary.types import DTYPE_NAMES, ReduceOp, dtype_code


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


# Bits of each field, and where it lies: its word, and the bits below it there.
FIELDS = {
    **{"magic": (32, 0, 0), "version": (8, 0, 32), "kind": (8, 0, 40), "dtype": (8, 0, 48)},
    **{"op": (8, 0, 56), "job": (64, 1, 0)},
    **{"epoch": (16, 2, 0), "group": (16, 2, 16), "rank": (32, 2, 32)},
    **{"sequence": (64, 3, 0), "count": (64, 4, 0), "step": (32, 5, 0), "segment": (32, 5, 32)},
    **{"nbytes": (64, 6, 0), "signature": (64, 7, 0)},
}
headers = st.builds(Header, **{name: unsigned(bits) for name, (bits, *_) in FIELDS.items()})
all_words = st.lists(unsigned(64), min_size=8, max_size=8)
ZEROS = Header(kind=0, job=0, rank=0, sequence=0, magic=0, version=0)


@given(headers)
def test_decode_undoes_encode(header):
    assert wire.decode(wire.encode(header)) == header


@given(all_words)
def test_any_words_are_decoded_and_described_whatever_arrived(words):
    header = wire.decode(np.array(words, np.uint64))
    assert wire.encode(header).tolist() == words
    assert f"#{words[3]}" in header.describe()


@pytest.mark.parametrize("field", FIELDS)
def test_field_is_where_the_compiled_loop_looks_for_it(field):
    bits, word, shift = FIELDS[field]
    largest = 2**bits - 1
    expected = [0] * 8
    expected[word] = largest << shift
    assert wire.encode(Header(**{**vars(ZEROS), field: largest})).tolist() == expected


def test_header_has_64_bytes_and_begins_with_the_magic_and_version_in_memory():
    header = wire.encode(Header(kind=Kind.BARRIER, job=0, rank=0, sequence=0))
    assert header.tobytes()[:6] == b"RRRF" + bytes([wire.WIRE_VERSION, Kind.BARRIER])
    assert header.nbytes == wire.HEADER_BYTES == 64


FLOATS = {"dtype": dtype_code(np.dtype(np.float32)), "op": ReduceOp.SUM, "count": 1000}


@pytest.mark.parametrize(
    ("kind", "more", "text"),
    [
        (Kind.ALL_REDUCE, FLOATS, "all_reduce #7 of 1000 float32, sum"),
        (Kind.BARRIER, {}, "barrier #7"),
        (99, {}, "unknown operation 99 #7"),
        (Kind.BROADCAST, {"dtype": len(DTYPE_NAMES) + 1, "count": 5}, "broadcast #7"),
    ],
)
def test_a_call_is_described_as_the_user_makes_it_without_what_is_not_known(kind, more, text):
    assert Header(kind=kind, job=1, rank=2, sequence=7, **more).describe() == text


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
