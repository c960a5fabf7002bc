"""Groups: who is in which, in what order, under which number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.membership import Choice, Membership, whole

_colors = st.one_of(st.none(), st.integers(-2, 2), st.sampled_from(["a", "b"]))


@st.composite
def memberships(draw: st.DrawFn) -> Membership:
    members = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True))
    return Membership(tuple(members), draw(st.integers(0, 9)), draw(st.integers(0, 9)))


@st.composite
def splits(draw: st.DrawFn) -> tuple[Membership, list[Choice]]:
    parent = draw(memberships())
    choice = st.builds(Choice, _colors, st.integers(-3, 3), st.integers(0, 9))
    return parent, [draw(choice) for _ in parent.members]


@given(splits())
def test_each_rank_is_in_the_group_of_its_color_ordered_by_key_then_by_place(split):
    parent, choices = split
    wanted: dict[object, list[tuple[int, int]]] = {}
    for place, choice in enumerate(choices):
        if choice.color is not None:
            wanted.setdefault(choice.color, []).append((choice.key, place))
    groups = parent.split(choices)
    assert [list(group.members) for group in groups] == [
        [parent.members[place] for _, place in sorted(places)] for places in wanted.values()
    ]
    # Its number is one that no member has seen.
    numbers = {group.group for group in groups}
    assert len(numbers) == len(groups)
    assert all(number > choice.highest for number in numbers for choice in choices)
    assert all(group.epoch == 0 for group in groups)


@given(memberships())
def test_the_ring_leads_through_all_members_and_back(membership):
    rank = first = membership.members[0]
    seen = []
    for _ in membership.members:
        seen.append(rank)
        assert membership.ahead(membership.ahead(rank, 1), -1) == rank
        assert membership.ahead(rank, membership.size) == rank
        rank = membership.ahead(rank, 1)
    assert rank == first
    assert tuple(seen) == membership.members
    for place, rank in enumerate(seen):
        around = {seen[place - 1], seen[(place + 1) % membership.size]}
        assert set(membership.neighbours(rank)) == around
        assert membership.group_rank(rank) == place


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ((3,), "the group of rank 3"),
        ((2, 0), "the group of ranks 2 and 0"),
        ((0, 1, 2, 3, 4), "the group of ranks 0, 1, 2, 3 and 4"),
        ((0, 2, 4, 6, 8, 10), "the group of ranks 0, 2, 4, 6 and 2 more"),
    ],
)
def test_messages_name_a_group_by_its_first_members(members, name):
    assert Membership(members, group=7).name == name
    assert whole(len(members)).name == "the whole job"
