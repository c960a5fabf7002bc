"""Residuals: parts of gradients that rounding has taken, which the next step adds.

They belong to variables, since buckets differ between routes: an eager step may come before those
of a graph. While one plan is in use they are laid out as its buckets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.pure.buckets import BucketPlan


class Residuals:
    """Changed by one thread at a time.

    With `arrays` 2, of int8, they are of what this rank or its host contributes, and of the results
    that it sends.
    """

    def __init__(self, arrays: int) -> None:
        self._arrays = arrays
        # Flat, by the variable's identity. The variable is kept, so that no other gets that.
        self._stored: dict[int, tuple[Any, np.ndarray]] = {}
        self._laid_out: list[tuple[Any, np.ndarray]] = []
        self._used_by: object = None
        self._buckets: list[np.ndarray] = []

    def of(self, plan: BucketPlan, variables: Sequence[Any]) -> Callable[[int], np.ndarray]:
        """Return a function from buckets to their residuals, float32 of shape (arrays, count)."""
        me = object()

        def residuals(bucket: int) -> np.ndarray:
            if self._used_by is not me:
                self._put_away()
                self._lay_out(plan, variables)
                self._used_by = me
            return self._buckets[bucket]

        return residuals

    def _put_away(self) -> None:
        for variable, parts in self._laid_out:
            self._stored[id(variable)] = variable, parts.copy()

    def _lay_out(self, plan: BucketPlan, variables: Sequence[Any]) -> None:
        self._laid_out, self._buckets = [], []
        for bucket in plan.buckets:
            memory = np.zeros((self._arrays, bucket.count), np.float32)
            self._buckets.append(memory)
            for slot in bucket.slots:
                variable, parts = variables[slot.gradient], memory[:, slot.start :][:, : slot.count]
                _, parts[:] = self._stored.pop(id(variable), (variable, 0))
                self._laid_out.append((variable, parts))
