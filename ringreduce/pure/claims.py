"""Values that should be equal on all ranks, or differ, and are compared beside the calls. Pure.

A rank sends each value to its neighbours when it has it; whoever has both compares them. So it
costs no collective, and ranks may be at different points of their programs.
"""

from typing import Any, NamedTuple

# Values that wait for the other rank's; those of a rank that never makes its own are dropped.
_WAITING_MAX = 4096


class Claim(NamedTuple):
    """One value of this rank."""

    key: str  # what it is the value of, alike on all ranks
    value: bytes  # any bytes, compared as they are
    text: str  # what a difference means, with ``{peer}`` for the other rank
    remedy: str  # what to do about that
    finds_equals: bool = False  # whether the text is about equal values, and a warning


class Claims:
    """The values of this rank and of its `neighbours` that have not been compared yet."""

    def __init__(self, neighbours: int) -> None:
        self._neighbours = neighbours
        self._own: dict[str, tuple[Claim, set[int]]] = {}
        self._theirs: dict[str, dict[int, bytes]] = {}

    def make(self, claim: Claim) -> int | None:
        """Note a value of this rank; return a neighbour whose value its text is about, or None."""
        self._own[claim.key] = claim, set()
        _bound(self._own)
        for rank, value in self._theirs.pop(claim.key, {}).items():
            if self.receive(rank, claim.key, value) is not None:
                return rank
        return None

    def receive(self, rank: int, key: str, value: bytes) -> Claim | None:
        """Note the value of a neighbour; return this rank's if its text is about the two."""
        if key not in self._own:
            self._theirs.setdefault(key, {})[rank] = value
            _bound(self._theirs)
            return None
        claim, compared = self._own[key]
        if (claim.value == value) is claim.finds_equals:
            return claim
        compared.add(rank)
        if len(compared) == self._neighbours:
            del self._own[key]
        return None


def _bound(waiting: dict[Any, Any]) -> None:
    while len(waiting) > _WAITING_MAX:
        del waiting[next(iter(waiting))]
