"""How what a step gives for parts of some rows must combine to what it gives for all of them. Pure.

Ranks take the mean of their gradients, weighted by rows. That is one process's gradient where a
step's is a mean over its rows. A step that divides by a constant, or by nothing, needs the sum; one
that mixes rows, or divides by what not every row counts in, neither.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

# Parts of the largest gradient below which a variable's own is noise, or is none at all.
_SMALL, _NOTHING = 1e-4, 1e-12
# How much worse than the tolerance the mean must be before a sum is believed.
_MISSES = 10.0


class Fit(enum.Enum):
    """What makes the whole of the parts."""

    MEAN = "mean"
    SUM = "sum"
    NEITHER = "neither"
    NOT_FINITE = "not finite"  # of a part, where the whole is
    NOTHING = "nothing"  # all is 0, or the whole is not finite: it tells nothing


class Comparison(NamedTuple):
    """A `Fit`; where it is not a mean, the place that misses most, and by which part of it."""

    fit: Fit
    place: int = 0
    missed: float = 0.0


# What is to be said of several, first.
_GRAVEST_FIRST = (Fit.NOT_FINITE, Fit.NEITHER, Fit.SUM, Fit.MEAN, Fit.NOTHING)


def gravest(fits: Iterable[Fit]) -> Fit:
    """What is to be said of several, such as of two optimizers; of none NOTHING."""
    return min(fits, key=_GRAVEST_FIRST.index, default=Fit.NOTHING)


def compare_each(
    whole: Sequence[np.ndarray],
    parts: Sequence[Sequence[np.ndarray]],
    rows: Sequence[int],
    tolerance: float,
    owners: Sequence[int],
) -> list[Comparison]:
    """`compare` for each owner: `owners` are those of the arrays, from 0 on.

    What is noise is told from the largest array of all.
    """
    largest, found = 0.0, []
    if len(set(owners)) > 1:
        every = (_largest(array) for arrays in (whole, *parts) for array in arrays)
        largest = max(filter(math.isfinite, every), default=0.0)
    for owner in range(max(owners, default=-1) + 1):
        own = [place for place, its in enumerate(owners) if its == owner]
        of_whole, *of_parts = ([arrays[n] for n in own] for arrays in (whole, *parts))
        one = compare(of_whole, of_parts, rows, tolerance, largest)
        found.append(one._replace(place=own[one.place] if own else 0))
    return found


def compare(
    whole: Sequence[np.ndarray],
    parts: Sequence[Sequence[np.ndarray]],
    rows: Sequence[int],
    tolerance: float,
    beside: float = 0.0,
) -> Comparison:
    """Compare arrays of all rows with those of parts, which have that many `rows` each.

    Args:
        whole: arrays of floats, of any shapes.
        parts: the same of each part of the rows.
        tolerance: of the larger of whole and parts, for each array.
        beside: the largest number among other arrays, which tells what is noise in these.
    """
    # Each array is read once for this: those of a large model are hundreds of megabytes.
    of_whole, *of_parts = (list(map(_largest, arrays)) for arrays in (whole, *parts))
    if not all(map(math.isfinite, of_whole)):
        return Comparison(Fit.NOTHING)
    for place, those in enumerate(zip(*of_parts, strict=True)):
        if not all(map(math.isfinite, those)):
            return Comparison(Fit.NOT_FINITE, place, math.inf)
    sizes = list(map(max, zip(of_whole, *of_parts, strict=True)))
    largest = max(sizes, default=0.0)
    if largest <= _NOTHING:
        return Comparison(Fit.NOTHING)
    largest = max(largest, beside)

    def missed_by(weights: Sequence[float]) -> list[float]:
        return [
            _largest(array - sum(w * part for w, part in zip(weights, those, strict=True)))
            / max(size, _SMALL * largest)
            for array, size, *those in zip(whole, sizes, *parts, strict=True)
        ]

    missed = missed_by([n / sum(rows) for n in rows])
    place = int(np.argmax(missed))
    worst = missed[place]
    if worst <= tolerance:
        return Comparison(Fit.MEAN)
    is_sum = worst > _MISSES * tolerance and max(missed_by([1.0] * len(rows))) <= tolerance
    return Comparison(Fit.SUM if is_sum else Fit.NEITHER, place, worst)


def chosen_rows(counts: np.ndarray, most: int) -> np.ndarray:
    """Choose at most `most` rows, those with the smallest and largest `counts`, sorted by these.

    So that a loss that divides by what counts sees parts in which unequal numbers of it do.
    """
    order = np.argsort(counts, kind="stable")
    half = most // 2
    return order if len(order) <= most else np.concatenate([order[:half], order[half - most :]])


def _largest(array: np.ndarray) -> float:
    """NaN if there is one."""
    return float(max(-np.min(array), np.max(array))) if array.size else 0.0
