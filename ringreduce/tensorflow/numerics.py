"""Whose gradient is not a number: each rank looks at its own before the sum hides whose it was.

The sum over the ranks spreads one NaN to all of them, so the only time to tell is just before.
Where a bad one ends training, each rank also looks at its share of the result, 1 / size of
it, for the one case that nobody can see before: finite gradients whose sum overflows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure import kernels
from ringreduce.pure.buckets import BucketPlan, GradientSpec
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.vocabulary.errors import ConfigError, NumericsError

__all__ = ["MODES", "NumericsCheck"]

_log = logging.getLogger(__name__)

MODES = ("warn", "raise", "off")

_ORIGIN = "The first step with such a message, and the rank it names, are where it began: "


class NumericsCheck:
    """Looks at the buckets of one bridge's steps. Used by one thread at a time.

    Args:
        mode: one of `MODES`.

    Raises:
        ConfigError: it is not.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ConfigError(f"check_numerics is {mode!r}; accepted: {', '.join(MODES)}")
        self._mode = mode
        self._step, self._bad_steps, self._is_bad = -1, 0, False

    def begin_step(self) -> None:
        """The next bucket is the first of another step; they are counted from 0."""
        self._step += 1
        self._is_bad = False

    def check_own(
        self, communicator: Communicator, plan: BucketPlan, bucket: int, values: np.ndarray
    ) -> None:
        """Look at this rank's `values` of a bucket, which are about to be reduced.

        Raises:
            NumericsError: one is not finite, and the mode is to raise; on all ranks.
        """
        if self._is_off() or (found := _find(plan, bucket, values, 0, values.size)) is None:
            return
        self._report_own(communicator, found)

    def check_own_rows(
        self, communicator: Communicator, spec: GradientSpec, indices: np.ndarray, rows: np.ndarray
    ) -> None:
        """Look at this rank's rows of a sparse gradient, which are about to be reduced.

        Args:
            communicator: whose rank.
            spec: the gradient.
            indices: shape (n,), where the rows belong.
            rows: shape (n, ...), contiguous.

        Raises:
            As `check_own`.
        """
        if self._is_off() or (found := _find_in_rows(spec, indices, rows)) is None:
            return
        self._report_own(communicator, found)

    def check_mean(
        self, communicator: Communicator, plan: BucketPlan, bucket: int, values: np.ndarray
    ) -> None:
        """Look at this rank's share of the means in a bucket, if the mode is to raise.

        Otherwise it could not be told from another rank's bad gradient, which that rank tells of;
        and it costs nearly as much as looking at all of one's own.

        Raises:
            As `check_own`.
        """
        if self._mode != "raise":
            return
        bounds = chunk_bounds(values.size, communicator.size)
        share = bounds[communicator.rank], bounds[communicator.rank + 1]
        if (found := _find(plan, bucket, values, *share)) is None:
            return
        self._report_mean(communicator, found, values.dtype)

    def check_mean_rows(
        self, communicator: Communicator, spec: GradientSpec, indices: np.ndarray, rows: np.ndarray
    ) -> None:
        """Look at this rank's share of a sparse gradient's mean, if the mode is to raise.

        Args:
            communicator, spec, indices, rows: as for `check_own_rows`, but equal on all ranks.

        Raises:
            As `check_own`.
        """
        if self._mode != "raise":
            return
        bounds = chunk_bounds(len(indices), communicator.size)
        share = slice(bounds[communicator.rank], bounds[communicator.rank + 1])
        if (found := _find_in_rows(spec, indices[share], rows[share])) is None:
            return
        self._report_mean(communicator, found, rows.dtype)

    def _report_own(self, communicator: Communicator, found: str) -> None:
        self._report(
            communicator,
            communicator.rank,
            f"has {found} as its own gradient in step {self._step}",
            f"{_ORIGIN}look at that rank's batch, at what the loss divides by or takes the "
            "logarithm of, and at the learning rate.",
        )

    def _report_mean(self, communicator: Communicator, found: str, dtype: np.dtype) -> None:
        self._report(
            communicator,
            None,
            # Another rank's that was not would have ended this step before it was added.
            f"has {found} as the mean of all ranks' gradients in step {self._step}, though each "
            f"rank's was finite: their sum overflows {dtype.name}",
            "Look at the learning rate, and clip what grows.",
        )

    def _is_off(self) -> bool:
        return self._mode == "off" or self._is_bad

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


def _find(plan: BucketPlan, bucket: int, values: np.ndarray, start: int, end: int) -> str | None:
    """The first value from `start` to `end` that is not finite, and where: for people."""
    if kernels.first_nonfinite(values[start:end]) < 0:
        return None
    # Rarely: now gradient by gradient, since what lies between them does not count.
    for slot in plan.buckets[bucket].slots:
        first = max(start, slot.start)
        index = kernels.first_nonfinite(
            values[first : max(first, min(end, slot.start + slot.count))]
        )
        if index >= 0:
            spec = plan.gradients[slot.gradient]
            place = np.unravel_index(first + index - slot.start, spec.shape)
            return _described(values[first + index], place, spec)
    return None


def _find_in_rows(spec: GradientSpec, indices: np.ndarray, rows: np.ndarray) -> str | None:
    """The same for a sparse gradient: the place is that in the whole."""
    flat = rows.reshape(-1)
    index = kernels.first_nonfinite(flat)
    if index < 0:
        return None
    row, *within = np.unravel_index(index, rows.shape)
    return _described(flat[index], (indices[row], *within), spec)


def _described(value: Any, place: Sequence[Any], spec: GradientSpec) -> str:
    return f"{float(value)} at {[int(i) for i in place]} of {spec.describe()}"
