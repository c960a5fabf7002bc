"""Values that neighbours compare when both have them, in whatever order they come."""

from ringreduce.pure import claims
from ringreduce.pure.claims import Claim, Claims


def claim(key: str, value: bytes = b"a") -> Claim:
    return Claim(key, value, "text", "remedy")


def test_equal_values_are_forgotten_once_all_neighbours_have_given_theirs():
    known = Claims(neighbours=2)
    assert known.receive(1, "first", b"a") is None
    assert known.make(claim("first")) is None
    assert known.receive(2, "first", b"a") is None
    assert not known._own
    assert not known._theirs


def test_a_difference_is_seen_whoever_comes_first():
    known = Claims(neighbours=2)
    assert known.make(claim("ours first")) is None
    assert known.receive(2, "ours first", b"b") == claim("ours first")
    assert known.receive(1, "theirs first", b"b") is None
    assert known.make(claim("theirs first")) == 1


def test_where_equal_values_are_looked_for_others_are_not_told():
    known = Claims(neighbours=2)
    for key, value in (("equal", b"a"), ("other", b"b")):
        own = claim(key)._replace(finds_equals=True)
        assert known.receive(1, key, value) is None
        assert known.make(own) == (1 if key == "equal" else None)
        assert known.receive(2, key, value) == (own if key == "equal" else None)


def test_values_under_different_keys_are_not_compared():
    known = Claims(neighbours=1)
    assert known.make(claim("one")) is None
    assert known.receive(1, "two", b"b") is None


def test_what_is_never_answered_does_not_pile_up():
    known = Claims(neighbours=1)
    for number in range(claims._WAITING_MAX + 10):
        known.make(claim(f"own {number}"))
        known.receive(1, f"theirs {number}", b"b")
    assert len(known._own) == len(known._theirs) == claims._WAITING_MAX
    assert known.make(claim(f"theirs {number}")) == 1
