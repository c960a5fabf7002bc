"""Finds the rank whose gradient is not finite: each rank checks its own before they are summed.

The sum spreads one rank's NaN to all. In mode "raise" each rank also checks its share of the
result, 1 / size of it: finite gradients may have a sum that overflows.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import fail
from ringreduce.pure import kernels
from ringreduce.pure.buckets import GradientSpec
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.vocabulary.errors import ConfigError, NumericsError

_log = logging.getLogger(__name__)

MODES = ("warn", "raise", "off")
# Gradients, each with the place of its first element; of a sparse one there are rows with these
# indices only.
Parts = Sequence[tuple[GradientSpec, int, np.ndarray | None]]


class NumericsCheck:
    """Checks the buckets of one bridge's steps, in a mode of `MODES`; for one thread."""

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ConfigError(f"check_numerics is {mode!r}; accepted: {', '.join(MODES)}")
        self._mode = mode
        self._step, self._bad_steps, self._is_bad = -1, 0, False

    def begin_step(self) -> None:
        """Begin the next step; steps are counted from 0."""
        self._step += 1
        self._is_bad = False

    def check_own(self, ring: Communicator, elements: np.ndarray, parts: Parts) -> None:
        """Check this rank's `elements`, contiguous of shape (count,), before they are reduced."""
        is_off = self._mode == "off" or self._is_bad
        if is_off or (place := _found(elements, parts, 0, elements.size)) is None:
            return
        self._report(
            ring,
            ring.config.rank,
            f"has {place} as its own gradient in step {self._step}",
            "The first step with such a message, and the rank it names, are where it began: look "
            "at that rank's batch, at what the loss divides by or takes the logarithm of, and at "
            "the learning rate.",
        )

    def check_mean(
        self,
        ring: Communicator,
        elements: np.ndarray,
        parts: Parts,
        compression: str = "none",
        own: tuple[int, int] | None = None,
    ) -> None:
        """Check this rank's share of the means in `elements`, in mode "raise" only.

        Where `own` begins and ends; None: as many elements as other ranks check.
        """
        if self._mode != "raise":
            return
        bounds = chunk_bounds(elements.size, ring.size)
        place = _found(elements, parts, *(own or bounds[ring.rank : ring.rank + 2]))
        if place is not None:
            encoded = "" if compression == "none" else f", or compression={compression}"
            self._report(
                ring,
                None,
                # All gradients were finite: `check_own` would have ended this step.
                f"has {place} as the mean of all ranks' gradients in step {self._step}, though "
                f"each rank's was finite: their sum overflows {elements.dtype.name}{encoded}",
                "Look at the learning rate, and clip what grows.",
            )

    def _report(self, ring: Communicator, peer: int | None, what: str, remedy: str) -> None:
        self._is_bad = True
        self._bad_steps += 1
        error = NumericsError(
            what, **ring.config.who, peer=peer, operation="gradient reduction", remedy=remedy
        )
        if self._mode == "raise":
            raise fail(ring, error)
        if str(self._bad_steps).rstrip("0") == "1":
            text = "[%d/%d] %s This was bad step %d of this rank."
            _log.warning(text, *ring.config.who.values(), error, self._bad_steps)


def _found(elements: np.ndarray, parts: Parts, start: int, end: int) -> str | None:
    """Describe the first element in `start` to `end` that is not finite; None if all are."""
    if kernels.first_nonfinite(elements[start:end]) < 0:
        return None
    # This is rare. Search gradient by gradient, since padding between them does not count.
    for spec, begin, indices in parts:
        shape = spec.shape if indices is None else (len(indices), *spec.shape[1:])
        first = max(start, begin)
        last = max(first, min(end, begin + math.prod(shape)))
        index = kernels.first_nonfinite(elements[first:last])
        if index >= 0:
            place = [int(i) for i in np.unravel_index(first + index - begin, shape)]
            if indices is not None:
                place[0] = int(indices[place[0]])
            return f"{float(elements[first + index])} at {place} of {spec.describe()}"
    return None
