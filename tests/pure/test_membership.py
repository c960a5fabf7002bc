"""Groups: who is in which, in what order, under which number."""

from __future__ import annotations

import itertools

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
def test_each_rank_is_in_the_group_of_its_color_and_in_no_other(
    split: tuple[Membership, list[Choice]],
) -> None:
    parent, choices = split
    groups = parent.split(choices)
    for rank, choice in zip(parent.members, choices, strict=True):
        own = [group for group in groups if rank in group.members]
        assert len(own) == (choice.color is not None)
        for group in own:
            same = {
                r for r, c in zip(parent.members, choices, strict=True) if c.color == choice.color
            }
            assert set(group.members) == same
            assert len(group.members) == len(same)


@given(splits())
def test_members_are_ordered_by_key_then_by_place(split: tuple[Membership, list[Choice]]) -> None:
    parent, choices = split
    for group in parent.split(choices):
        places = [parent.group_rank(rank) for rank in group.members]
        assert [(choices[p].key, p) for p in places] == sorted((choices[p].key, p) for p in places)


@given(splits())
def test_a_group_has_a_number_that_no_member_has_seen(
    split: tuple[Membership, list[Choice]],
) -> None:
    parent, choices = split
    groups = parent.split(choices)
    numbers = [group.group for group in groups]
    assert len(set(numbers)) == len(numbers)
    assert all(number > choice.highest for number in numbers for choice in choices)
    assert all(group.epoch == 0 for group in groups)


@pytest.mark.parametrize("size", range(1, 7))
def test_every_partition_comes_out_as_it_was_chosen(size: int) -> None:
    """All ways to give up to six ranks up to three colors or none."""
    for colors in itertools.product((None, 0, 1, 2), repeat=size):
        groups = whole(size).split([Choice(color, 0, 0) for color in colors])
        wanted: dict[int, list[int]] = {}
        for rank, color in enumerate(colors):
            if color is not None:
                wanted.setdefault(color, []).append(rank)
        assert [list(group.members) for group in groups] == list(wanted.values())


@given(memberships())
def test_the_ring_leads_through_all_members_and_back(membership: Membership) -> None:
    rank = first = membership.members[0]
    seen = []
    for _ in membership.members:
        seen.append(rank)
        assert membership.ahead(membership.ahead(rank, 1), -1) == rank
        assert membership.ahead(rank, membership.size) == rank
        rank = membership.ahead(rank, 1)
    assert rank == first
    assert tuple(seen) == membership.members


@given(memberships())
def test_neighbours_are_those_before_and_after(membership: Membership) -> None:
    for place, rank in enumerate(membership.members):
        around = {membership.members[place - 1], membership.members[(place + 1) % membership.size]}
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
