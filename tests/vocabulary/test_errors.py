"""Errors: their family, their words, and that they travel whole."""

import copy
import pickle
from dataclasses import fields

import pytest

from ringreduce.vocabulary import errors
from ringreduce.vocabulary.errors import RingReduceError

CLASSES = [getattr(errors, name) for name in errors.__all__]

FIELDS = {
    **{"rank": 3, "size": 8, "peer": 2, "origin": 1, "host": "node2", "operation": "all_reduce"},
    **{"sequence": 1841, "group": "the group of ranks 2 and 3"},
    **{"step": "reduce-scatter step 4 of 7", "remedy": "Read rank 2's log first."},
}
IN_THE_CALL = "in all_reduce #1841 of the group of ranks 2 and 3, reduce-scatter step 4 of 7"


def test_errors_can_be_caught_as_ours_and_as_ordinary_ones():
    assert all(issubclass(kind, RingReduceError) for kind in CLASSES)
    assert issubclass(errors.PeerTimeoutError, errors.PeerError)
    assert issubclass(errors.PeerTimeoutError, TimeoutError)
    assert issubclass(errors.PeerLostError, errors.PeerError)
    assert issubclass(errors.PeerLostError, ConnectionError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.ArrayError, ValueError)
    assert issubclass(errors.NativeError, ImportError)


@pytest.mark.parametrize("kind", CLASSES)
def test_text_says_who_what_where_and_what_to_do_in_this_order(kind):
    said = f"rank 3 of 8 waited 30.0 s for rank 2, {IN_THE_CALL}. Rank 2 is on node2. "
    error = kind("waited 30.0 s for rank 2", **{**FIELDS, "origin": None})
    assert str(error) == f"{said}Read rank 2's log first."


def test_where_a_rank_was_told_comes_before_what_it_was_told():
    told = "was told by rank 1: rank 1 lost rank 2"
    said = f"rank 3 of 8, {IN_THE_CALL}, {told}. Rank 2 is on node2. Read rank 2's log first."
    assert str(errors.PeerLostError(told, **FIELDS)) == said


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "failed."),
        ({"rank": 0}, "rank 0 failed."),
        ({"rank": 0, "size": 1}, "rank 0 of 1 failed."),
        ({"size": 4}, "failed."),
        ({"operation": "barrier"}, "failed, in barrier."),
        ({"operation": "barrier", "sequence": 0}, "failed, in barrier #0."),
        ({"operation": "barrier", "step": "hop 1"}, "failed, in barrier, hop 1."),
        ({"remedy": "Wait."}, "failed. Wait."),
        ({"peer": 1, "host": "b"}, "failed. Rank 1 is on b."),
    ],
)
def test_text_leaves_out_what_is_not_known(fields, text):
    assert str(RingReduceError("failed", **fields)) == text


def test_text_does_not_get_a_second_full_stop():
    for end in ".!?":
        assert str(RingReduceError(f"failed{end}", remedy="Wait.")) == f"failed{end} Wait."


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copy_keeps_type_text_and_fields_but_no_traceback(kind, duplicate):
    """Tracebacks would pile up."""
    with pytest.raises(kind) as caught:
        raise kind("waited 30.0 s for rank 2", **FIELDS)
    error, twin = caught.value, duplicate(caught.value)
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert {name: getattr(twin, name) for name in FIELDS} == FIELDS
    assert {each.name for each in fields(RingReduceError)} == {"message", *FIELDS}
    assert twin.__traceback__ is None


@pytest.mark.parametrize("text", ["short", "a" * 3000, "\u9519\u8bef" * 700])
def test_it_is_known_by_what_an_op_has_kept_of_its_text(text):
    """Which is cut by bytes: an error in Chinese after 680 characters."""
    one = errors.PeerLostError(text, rank=1, size=2)
    kept = str(one).encode()[:2047].decode(errors="ignore")
    assert one.is_quoted_in(f"UnknownError: bucket 0 of plan 1: {kept} [Op:Wait]")
    assert not errors.PeerLostError(text, rank=0, size=2).is_quoted_in(kept)
