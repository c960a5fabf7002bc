"""Which samples belong to which step, in every epoch and on every rank. Pure.

An epoch has `steps` steps, and the data has `count` units (batches, or rows of arrays in batches).
Steps go through the data pass after pass: where an epoch is shorter or longer than a pass, the next
one continues where it ended. All follows from the seed and the epoch's number, so that a job that
starts again at an epoch reads what it would have read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def own_rows(count: int, rank: int, size: int) -> tuple[int, int]:
    """First and end of a rank's rows of a global batch of `count`; lengths differ by at most 1."""
    return count * rank // size, count * (rank + 1) // size


@dataclass(frozen=True)
class Order:
    """The order of `count` units.

    Attributes:
        seed: of all passes; None: units stay in their order.
        steps: of an epoch.
        unit: units that belong to one step, such as the rows of a batch; the last of a pass may
            have fewer.
        whole: shuffle steps, and not single units.
    """

    count: int
    unit: int
    steps: int
    seed: int | None = None
    whole: bool = False

    @property
    def steps_of_pass(self) -> int:
        """Steps that go through all units once."""
        return -(-self.count // self.unit)

    def of_epoch(self, epoch: int) -> Iterator[np.ndarray | slice]:
        """The units of each step of an epoch, counted from 0: indices, or a slice."""
        known: tuple[int, np.ndarray] | None = None
        for step in range(epoch * self.steps, (epoch + 1) * self.steps):
            number, place = divmod(step, self.steps_of_pass)
            if self.seed is None:
                yield self._slice(place)
                continue
            if known is None or known[0] != number:
                count = self.steps_of_pass if self.whole else self.count
                known = number, _permutation(self.seed, number, count)
            if self.whole:
                yield self._slice(int(known[1][place]))
            else:
                yield known[1][self._slice(place)]

    def _slice(self, place: int) -> slice:
        return slice(place * self.unit, min((place + 1) * self.unit, self.count))


def _permutation(seed: int, number: int, count: int) -> np.ndarray:
    """The order of `count` things in pass `number`, int64 of shape (count,)."""
    return np.random.Generator(np.random.PCG64([seed, number])).permutation(count)
