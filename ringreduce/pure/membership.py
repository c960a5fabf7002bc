"""Who is in a group, in which order. Pure.

A group is a part of a job's ranks with collectives of its own; the whole job is group 0. Ranks of
the job are named in every error and message; within a group, members have places 0 to size - 1,
which users see as its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

GROUPS_MAX = 1 << 16  # numbers of groups have 16 bits in a header


class Choice(NamedTuple):
    """A rank's arguments of `Communicator.split`; it knows groups up to `highest`."""

    color: int | str | None
    key: int
    highest: int


@dataclass(frozen=True)
class Membership:
    """The members of a group: ranks of the job, each once, in the order of their places."""

    members: tuple[int, ...]
    group: int = 0
    epoch: int = 0  # grows whenever its ring is formed anew

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def name(self) -> str:
        """The group's name in messages; of a large one the first members are named."""
        if self.group == 0:
            return "the whole job"
        *first, last = map(str, self.members)
        if self.size > 5:
            first, last = first[:4], f"{self.size - 4} more"
        named = f"{', '.join(first)} and {last}" if first else last
        return f"the group of rank{'s' * (self.size > 1)} {named}"

    def group_rank(self, rank: int) -> int:
        return self.members.index(rank)

    def ahead(self, rank: int, distance: int) -> int:
        """The member `distance` places after `rank`, around the ring; before it if negative."""
        return self.members[(self.group_rank(rank) + distance) % self.size]

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The members before and after `rank` on the ring, which may be the same one."""
        return tuple(sorted({self.ahead(rank, -1), self.ahead(rank, 1)}))

    def split(self, choices: Sequence[Choice]) -> list[Membership]:
        """The groups of those that chose the same color, in the order of their first places.

        Members of each are ordered by key, then by place here; those that chose None are in none.
        `choices` are by place. The numbers of the groups are new to each member.
        """
        highest = max(choice.highest for choice in choices)
        by_color: dict[int | str, list[int]] = {}
        for place, choice in enumerate(choices):
            if choice.color is not None:
                by_color.setdefault(choice.color, []).append(place)
        ordered = [sorted(places, key=lambda p: choices[p].key) for places in by_color.values()]
        return [
            Membership(tuple(self.members[p] for p in places), number)
            for number, places in enumerate(ordered, highest + 1)
        ]


def whole(size: int) -> Membership:
    """All ranks of a job."""
    return Membership(tuple(range(size)))
