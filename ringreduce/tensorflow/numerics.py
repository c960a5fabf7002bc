"""Finds the rank whose gradient is not finite: each rank checks its own before they are summed.

The sum spreads one rank's NaN to all. In mode "raise" each rank also checks its share of the
result, 1 / size of it: finite gradients may have a sum that overflows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure import kernels
from ringreduce.pure.buckets import BucketPlan, GradientSpec
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.vocabulary.errors import ConfigError, NumericsError

__all__ = ["MODES", "BucketValues", "NumericsCheck", "RowValues"]

_log = logging.getLogger(__name__)

MODES = ("warn", "raise", "off")

_ORIGIN = "The first step with such a message, and the rank it names, are where it began: "


class NumericsCheck:
    """Checks the buckets of one bridge's steps. Used by one thread at a time.

    Raises:
        ConfigError: `mode` is none of `MODES`.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ConfigError(f"check_numerics is {mode!r}; accepted: {', '.join(MODES)}")
        self._mode = mode
        self._step, self._bad_steps, self._is_bad = -1, 0, False

    def begin_step(self) -> None:
        """Begin the next step; steps are counted from 0."""
        self._step += 1
        self._is_bad = False

    def check_own(self, communicator: Communicator, values: BucketValues | RowValues) -> None:
        """Check this rank's `values` before they are reduced.

        Raises:
            NumericsError: one is not finite, and the mode is "raise"; on all ranks.
        """
        if self._mode == "off" or self._is_bad or (found := values.find(0, len(values))) is None:
            return
        self._report(
            communicator,
            communicator.rank,
            f"has {found} as its own gradient in step {self._step}",
            f"{_ORIGIN}look at that rank's batch, at what the loss divides by or takes the "
            "logarithm of, and at the learning rate.",
        )

    def check_mean(self, communicator: Communicator, values: BucketValues | RowValues) -> None:
        """Check this rank's share of the means in `values`, in mode "raise" only.

        In other modes the rank with the bad gradient has reported it; this costs nearly as much as
        its check.

        Raises:
            NumericsError: one is not finite; on all ranks.
        """
        if self._mode != "raise":
            return
        bounds = chunk_bounds(len(values), communicator.size)
        found = values.find(bounds[communicator.rank], bounds[communicator.rank + 1])
        if found is not None:
            self._report(
                communicator,
                None,
                # All gradients were finite: `check_own` would have ended this step.
                f"has {found} as the mean of all ranks' gradients in step {self._step}, though "
                f"each rank's was finite: their sum overflows {values.dtype.name}",
                "Look at the learning rate, and clip what grows.",
            )

    def _report(self, communicator: Communicator, peer: int | None, what: str, remedy: str) -> None:
        self._is_bad = True
        self._bad_steps += 1
        error = NumericsError(
            what,
            rank=communicator.rank,
            size=communicator.size,
            peer=peer,
            operation="gradient reduction",
            remedy=remedy,
        )
        if self._mode == "raise":
            raise communicator.fail(error)
        if str(self._bad_steps).rstrip("0") == "1":
            _log.warning(
                "[%d/%d] %s This was bad step %d of this rank.",
                *(communicator.rank, communicator.size, error, self._bad_steps),
            )


@dataclass(frozen=True)
class BucketValues:
    """The elements of the plan's bucket number `bucket`; `values` has the shape (count,)."""

    plan: BucketPlan
    bucket: int
    values: np.ndarray

    def __len__(self) -> int:
        """The number of elements."""
        return self.values.size

    @property
    def dtype(self) -> np.dtype:
        """The dtype of an element."""
        return self.values.dtype

    def find(self, start: int, end: int) -> str | None:
        """Describe the first element in `start` to `end` that is not finite; None if all are."""
        if kernels.first_nonfinite(self.values[start:end]) < 0:
            return None
        # This is rare. Search gradient by gradient, since padding between them does not count.
        for slot in self.plan.buckets[self.bucket].slots:
            first = max(start, slot.start)
            last = max(first, min(end, slot.start + slot.count))
            index = kernels.first_nonfinite(self.values[first:last])
            if index >= 0:
                spec = self.plan.gradients[slot.gradient]
                place = np.unravel_index(first + index - slot.start, spec.shape)
                return _described(self.values[first + index], place, spec)
        return None


@dataclass(frozen=True)
class RowValues:
    """Rows of a sparse gradient, shape (n, ...), contiguous, and their indices, shape (n,)."""

    spec: GradientSpec
    indices: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.indices)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of an element."""
        return self.rows.dtype

    def find(self, start: int, end: int) -> str | None:
        """Describe the first element in rows `start` to `end` that is not finite; None: all are."""
        rows = self.rows[start:end]
        index = kernels.first_nonfinite(rows.reshape(-1))
        if index < 0:
            return None
        row, *within = np.unravel_index(index, rows.shape)
        return _described(rows.reshape(-1)[index], (self.indices[start + row], *within), self.spec)


def _described(value: Any, place: Sequence[Any], spec: GradientSpec) -> str:
    return f"{float(value)} at {[int(i) for i in place]} of {spec.describe()}"
