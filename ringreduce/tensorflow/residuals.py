"""What rounding has taken from gradients, and the next step adds: of one optimizer's variables.

They belong to variables, since buckets differ between routes: an eager step may come before those
of a graph. While one plan is in use they are laid out as its buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.pure.buckets import BucketPlan

# Of what this rank, or its host, contributes, and of the results that this rank sends.
Pair = tuple[np.ndarray, np.ndarray]


class Residuals:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        # By the variable's identity, flat. The variable is kept, so that no other gets that.
        self._stored: dict[int, tuple[Any, Pair]] = {}
        self._laid_out: list[tuple[Any, Pair]] = []
        self._used_by: object = None
        self._buckets: list[Pair] = []

    def of(self, plan: BucketPlan, variables: Sequence[Any]) -> Callable[[int], Pair]:
        """A function that returns a bucket's residuals, float32 of shape (count,), to be changed.

        `variables` are those of the plan's gradients.
        """
        me = object()

        def residuals(bucket: int) -> Pair:
            if self._used_by is not me:
                self._put_away()
                self._lay_out(plan, variables)
                self._used_by = me
            return self._buckets[bucket]

        return residuals

    def _put_away(self) -> None:
        for variable, (first, second) in self._laid_out:
            self._stored[id(variable)] = variable, (first.copy(), second.copy())

    def _lay_out(self, plan: BucketPlan, variables: Sequence[Any]) -> None:
        self._laid_out, self._buckets = [], []
        for bucket in plan.buckets:
            pair = np.zeros((2, bucket.count), np.float32)
            self._buckets.append((pair[0], pair[1]))
            for slot in bucket.slots:
                variable, parts = variables[slot.gradient], pair[:, slot.start :][:, : slot.count]
                _, parts[:] = self._stored.pop(id(variable), (variable, 0))
                self._laid_out.append((variable, (parts[0], parts[1])))
