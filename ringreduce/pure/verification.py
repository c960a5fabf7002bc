"""Whether N ranks train as one process does, and if not why, from records of the same steps. Pure.

Sums in another order are rounded differently, and training makes more of that with every step. So
weights are compared after the first, and by what it has changed of all of them: some optimizers
make steps of one size from any gradients, also from those that are 0 but for rounding.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

# Larger relative differences are no rounding: of initial weights, of the first loss, of later ones,
# and of what the first step has changed. With 16-bit floats so many times as large.
_INITIAL_MAX, _FIRST_LOSS_MAX, _LOSS_MAX, _CHANGE_MAX, _HALF = 1e-5, 1e-3, 1e-2, 0.02, 10
# A float32 that changes is rounded by this part of itself.
_EPSILON, _TINY = 1e-7, 1e-30
_SHOWN = 3


class Run(msgspec.Struct, frozen=True):
    """The record of a job."""

    ranks: int
    losses: list[float]  # of each step, over the rows of all ranks; NaN if not known
    rows: int  # of all ranks in the first step; 0 if not known
    step_s: float  # the median, but for the first
    # threads, memory: of each rank; memory is the peak.
    threads: int
    memory: list[int]
    settings: dict[str, str]  # arguments, settings of optimizer and layers, by name
    # names: of the weights, with their shapes; and which are trained.
    names: list[str]
    trained: list[bool]
    is_half: bool  # whether some layers compute with 16 bits
    # In words, what looks at a whole batch, and what changes gradients as one process does not.
    of_batches: list[str]
    of_gradients: list[str]

    @property
    def who(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks != 1)}"

    @property
    def speed(self) -> float:
        """Samples in a second, or steps where they are not known."""
        return (self.rows or 1) / self.step_s


class Recorded(NamedTuple):
    """A run, and its weights before and after the first step, each by its place among the names."""

    run: Run
    before: Callable[[int], np.ndarray]
    after: Callable[[int], np.ndarray]


class Comparison(NamedTuple):
    """How a run differs from the first."""

    agrees: bool  # whether the differences are those of rounding
    # The largest of a loss, and that of what the first step changes in trained weights; relative.
    loss: float
    change: float
    step: int  # the first, from 1 on, whose loss differs by more than rounding; 0 for none
    initial: str  # the first weight with another initial value; empty for none
    # weight, by: the first that differs after the first step, and by how much.
    weight: str
    by: float


def compare(one: Recorded, two: Recorded) -> Comparison:
    """How the second differs from the first."""
    first, other, times = one.run, two.run, _HALF if one.run.is_half else 1
    pairs = zip(first.losses, other.losses, strict=False)
    losses = [_apart(*pair, abs(first.losses[0]) / 100) for pair in pairs]
    limits = itertools.chain([_FIRST_LOSS_MAX], itertools.repeat(_LOSS_MAX))
    are_far = [loss > times * limit for loss, limit in zip(losses, limits, strict=False)]
    loss, step = max(losses), are_far.index(True) + 1 if any(are_far) else 0
    names = list(itertools.zip_longest(first.names, other.names, fillvalue=""))
    if alien := next((one or two for one, two in names if one != two), ""):
        return Comparison(False, loss, math.inf, step, "", alien, math.inf)
    initial, weight, by, agrees = "", "", 0.0, not step
    moved_all = apart_all = 0.0
    for number, name in enumerate(first.names):
        old, new = (one.before(number), two.before(number)), (one.after(number), two.after(number))
        if not initial and _norm(old[0] - old[1]) > _INITIAL_MAX * _norm(old[0]):
            initial = name
        moved = max(_norm(now - then) for now, then in zip(new, old, strict=True))
        apart = max(0.0, _norm(new[0] - new[1]) - _EPSILON * _norm(new[0]))
        differs = not apart <= times * _CHANGE_MAX * moved
        if differs and not weight:
            weight, by = name, apart / max(moved, _TINY)
        if first.trained[number]:
            moved_all, apart_all = math.hypot(moved_all, moved), math.hypot(apart_all, apart)
        elif differs:
            agrees = False
    change = apart_all / max(moved_all, _TINY)
    agrees = agrees and not initial and change <= times * _CHANGE_MAX
    return Comparison(agrees, loss, change, step, initial, weight, by)


def reasons(first: Run, other: Run, difference: Comparison, again: Comparison) -> Iterator[str]:
    """Why two runs differ as `difference`, the likeliest first.

    `again` compares the first with another one that has as many ranks.
    """
    if not again.agrees and again.initial:
        yield (
            "The initial weights differ in each run. Seed them: keras.utils.set_random_seed(1) "
            "before the model is made."
        )
    elif not again.agrees:
        yield (
            f"Two runs with {first.who} differ too: something random has no seed, such as the "
            "order of data, dropout or augmentation. See keras.utils.set_random_seed(1) and "
            "shuffle(n, seed=1)."
        )
    elif difference.initial:
        yield ("The initial weights depend on the number of ranks. Seed them alike for any number.")
    given = {**first.settings, **other.settings}
    texts = [(n, *(run.settings.get(n, "absent") for run in (first, other))) for n in given]
    for name, here, there in [text for text in texts if text[1] != text[2]][:_SHOWN]:
        yield f"{name} is {here} with {first.who} and {there} with {other.who}."
    if first.rows != other.rows:
        yield (
            f"A step has {first.rows} samples with {first.who} and {other.rows} with {other.who}: "
            "batches given to rr.fit are those of all ranks together."
        )
    # Other gradients change a loss only after the first step.
    kinds = (other.of_batches, other.of_gradients)[:: 1 if difference.step == 1 else -1]
    yield from (f"{text}." for text in itertools.chain(*kinds))


def verdict(
    runs: Sequence[Run], found: Sequence[Comparison], again: Comparison | None
) -> Iterator[str]:
    """Lines of text; `found` compares the first run with each of the others.

    `again` compares it with one that has as many ranks, if any differs.
    """
    first, different = runs[0], [n for n, each in enumerate(found, 1) if not each.agrees]
    if again is None:
        loss, change = max(each.loss for each in found), max(each.change for each in found)
        yield (
            f"The numbers agree: {len(first.losses)} losses to {_part(loss)}, and what the first "
            f"step changes to {_part(change)}."
        )
    else:
        other, own = runs[different[0]], found[different[0] - 1]
        yield f"The numbers differ between {first.who} and {other.who}:"
        if own.step:
            here, there = (run.losses[own.step - 1] for run in (first, other))
            yield f"  from step {own.step} on the loss, which is {here:.6g} and {there:.6g}"
        if own.initial:
            yield f"  the initial weights, first {own.initial}"
        elif own.weight:
            by = f" by {_part(own.by)} of what it changed" if math.isfinite(own.by) else ""
            yield f"  after the first step the weights, first {own.weight}{by}"
        texts = list(reasons(first, other, own, again)) or [
            "Nothing in model and optimizer explains it. See what depends on rr.rank() or "
            "rr.size(), such as the data."
        ]
        yield "The likely reason:" if len(texts) == 1 else "The likely reasons, likeliest first:"
        yield from (f"  {n}. {text}" for n, text in enumerate(texts, 1))
        for run in (runs[n] for n in different[1:]):
            yield f"The numbers differ between {first.who} and {run.who}, too."
    fastest, slowest = (choose(runs, key=lambda run: run.speed) for choose in (max, min))
    ratio = fastest.speed / slowest.speed
    yield f"Fastest on this machine: {fastest.who}, {ratio:.2f} times as fast as {slowest.who}."


HEADER = "ranks  threads  peak memory  ms/step  samples/s  first loss  last loss  differ"


def row(run: Run, comparison: Comparison | None = None) -> str:
    """A line of the table: a run, and how its losses differ from the first run's."""
    samples = f"{run.speed:,.0f}" if run.rows else "-"
    first, last = (f"{run.losses[n]:.5g}" for n in (0, -1))
    differ = "-" if comparison is None else _part(comparison.loss)
    memory = f"{max(run.memory) / (1 << 30):.2f} GiB"
    return (
        f"{run.ranks:>5}{run.threads:>9}{memory:>13}{run.step_s * 1e3:>9,.1f}{samples:>11}"
        f"{first:>12}{last:>11}{differ:>8}"
    )


def _apart(one: float, other: float, least: float) -> float:
    """The relative difference; of numbers near 0, to `least`."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other) / max(abs(one), abs(other), least)
    return math.inf if math.isnan(apart) else apart


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.reshape(-1).astype(np.float64)))


def _part(ratio: float) -> str:
    """``12%``, ``0.3%``, or ``3e-05`` where it is little."""
    if ratio < 0.001:
        return f"{ratio:.0e}" if ratio else "0"
    return f"{ratio:.0%}" if ratio >= 0.1 else f"{ratio:.1%}"
