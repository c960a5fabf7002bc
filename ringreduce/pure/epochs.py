"""Which samples belong to which step, in every epoch and on every rank. Pure.

An epoch has `steps` steps, and the data has `count` units (batches, or rows of arrays in batches).
Where an epoch is shorter than a pass, the next one continues where it ended; it ends with the pass,
as Keras's epochs do. All follows from the seed and the epoch's number, so that a job that starts
again at an epoch reads what it would have read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def own_rows(count: int, rank: int, size: int) -> tuple[int, int]:
    """First and end of a rank's rows of a global batch of `count`; lengths differ by at most 1."""
    return count * rank // size, count * (rank + 1) // size


@dataclass(frozen=True)
class Order:
    """The order of `count` units."""

    count: int
    # Units that belong to one step, such as the rows of a batch; the last of a pass may have fewer.
    unit: int
    steps: int  # of an epoch, at most
    seed: int | None = None  # of all passes; None: units stay in their order
    first: int = 0  # the epoch with which the first pass begins

    @property
    def steps_of_pass(self) -> int:
        """Steps that go through all units once."""
        return -(-self.count // self.unit)

    def of_epoch(self, epoch: int) -> Iterator[np.ndarray | slice]:
        """The units of each step of an epoch, counted from 0: indices, or a slice."""
        epochs = max(1, -(-self.steps_of_pass // max(1, self.steps)))
        since = (epoch - self.first) % epochs
        order = None
        if self.seed is not None:
            # That of the pass from its first epoch on.
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch - since]))
            order = generator.permutation(self.count)
        for place in range(since * self.steps, min((since + 1) * self.steps, self.steps_of_pass)):
            rows = slice(place * self.unit, min((place + 1) * self.unit, self.count))
            yield rows if order is None else order[rows]
