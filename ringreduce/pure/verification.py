"""Whether N ranks train as one process does, from records of the same steps. Pure.

    initial weights | step 1: returned -> gradients -> weights | step 2: ... | outputs
                      -------- what differs first is named ------

Gradients are those that the optimizer gets, after their reduction: some optimizers make steps of
one size from any gradients, so that weights are nearly the same with half of them. Sums in another
order are rounded differently, and training makes more of that with every step, so later steps are
compared more coarsely. What was not seen, or is not finite, is said: it never counts as equal.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

# Larger relative differences are no rounding; in the first step, and in later ones. With 16-bit
# floats ten times as large. What a step returns beside losses may count rows, as an accuracy does.
_INITIAL_MAX, _OUTPUT_MAX = 1e-5, 0.05
_LOSS_MAX, _RETURNED_MAX, _GRADIENT_MAX, _CHANGE_MAX = (
    *((1e-3, 0.01), (0.01, 0.1)),
    *((2e-3, 0.1), (0.02, 0.1)),
)
_HALF, _MAX = 10, 0.5
# A float32 that changes is rounded by this part of itself. What is this part of all gradients may
# be 0 but for rounding, as that of a bias before a normalization is.
_EPSILON, _SMALL, _TINY = 1e-7, 1e-3, 1e-30
# Norms as far apart as this are equal. What is left of gradients that are a multiple of others is
# less than this part: ranks whose rows differ by one have slightly other weights.
_SAME_NORM, SAME_FACTOR = 1e-5, 0.05
_EXPLAINED = 0.2  # of a difference may be left if a factor is to explain it
_FEW = 3  # numbers, which may be a multiple of others by chance

# What is compared, as the first words of it.
INITIAL, OUTPUTS, VARIABLES = "initial weights", "outputs", "the variables"
WEIGHTS, GRADIENTS, UNTRAINED = "weights", "gradients", "untrained variables"


class Tried(msgspec.Struct, frozen=True):
    """What a trial of the step on a few rows has found before the first one."""

    found: str = ""  # of gradients, a `ringreduce.pure.parity.Fit`; empty: nothing was tried
    rows: int = 0  # that were tried
    why: str = ""  # nothing was tried
    findings: list[str] = []  # in words: by what ranks train differently, with a remedy each


class Run(msgspec.Struct, frozen=True):
    """The record of a job, but for its `Arrays`."""

    ranks: int
    # By its key what a step returns, of each step, over the rows of all ranks; and the loss's key.
    returned: dict[str, list[float]]
    loss: str  # empty: none
    rows: int  # of all ranks in the first step; 0 if not known
    step_s: float  # the median of those in which no gradients were recorded, but for the first
    # threads, memory: of each rank; memory is the peak.
    threads: int
    memory: list[int]
    steps: int  # how many were recorded
    settings: dict[str, str]  # arguments, settings of optimizer and layers, by name
    # names: of the weights, with their shapes; and which are trained.
    names: list[str]
    trained: list[bool]
    gradient_names: list[str]  # the optimizer's name, and the variable's
    is_half: bool  # whether some layers compute with 16 bits
    skips: bool  # whether the optimizer skips a step whose gradients are not finite
    own_step: str  # the name of a training step of the program's own; empty: Keras's
    clips: str  # the function by which that may clip; empty: none is known
    # In words, what by how it was made looks at a whole batch, beside what was tried; and what
    # changes gradients as one process does not.
    of_batches: list[str]
    of_gradients: list[str]
    rows_of_outputs: str = ""  # a digest of the rows for which `Arrays.outputs` are
    unseen: dict[str, str] = {}  # what that matters was not seen, and why
    left_out: dict[str, str] = {}  # the same of what shows nothing that the rest does not show
    tried: Tried = Tried()
    is_loop: bool = False  # whether it is a loop of the program's own, of which rows are not known
    adds_up_by: str = 'gradients="sum" to rr.DistributedOptimizer'  # what sums over rows need

    @property
    def who(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks != 1)}"

    @property
    def speed(self) -> float:
        """Samples in a second, or steps where they are not known."""
        return (self.rows or 1) / self.step_s

    @property
    def losses(self) -> list[float]:
        """The loss of each step; empty where none is known."""
        return self.returned.get(self.loss, [])


class Arrays(NamedTuple):
    """What was recorded of variables, as sketches: their last axis. float64, but for `calls`."""

    before: np.ndarray  # of each weight
    changes: np.ndarray  # since then, after each step: (steps, weights, _)
    gradients: np.ndarray  # of each of the first steps: (steps, gradients, _)
    calls: np.ndarray  # how often the optimizer got them in a step; 0: they are absent
    # Before the reduction, on each rank in these steps: (ranks, steps, gradients, 2), the norm and
    # the largest magnitude; 0 where a rank had no rows.
    own: np.ndarray
    outputs: np.ndarray  # of each output of the model after the last step


class Recorded(NamedTuple):
    """A run, and what it has recorded of variables."""

    run: Run
    arrays: Arrays


class Compared(NamedTuple):
    """How one kind of numbers differs between two runs."""

    what: str
    by: float  # the largest relative difference; infinite where only one is finite, or there
    step: int | None = None  # the first that differs by more than rounding; 0 for initial values
    name: str = ""  # what differs first in that step, if there are several, and by how much
    at: float = 0.0
    here: float = math.nan
    there: float = math.nan


class Comparison(NamedTuple):
    """How a run differs from the first."""

    parts: list[Compared]  # in the order in which a step computes them
    first: Compared | None  # what differs first; None: nothing does
    # By what number the first run's gradients are those of the second, where they differ in
    # nothing else: of the first step's, of so many among so many; None: by no number.
    factor: float | None
    scaled: tuple[int, int]
    clip: str  # where each rank's own gradients are cut off, and at what; empty: nowhere
    unseen: dict[str, str]  # what that matters was not compared, and why
    left_out: dict[str, str]
    infinite: dict[str, int]  # what is finite in neither, and since which step

    @property
    def agrees(self) -> bool:
        """Whether the differences are those of rounding: of what was seen."""
        return self.first is None

    @property
    def is_open(self) -> bool:
        """Whether nothing differs, but something that matters was not seen, or is not finite."""
        return self.agrees and bool(self.unseen or self.infinite)

    @property
    def shown(self) -> float:
        """The difference of losses, or of gradients where there are none; NaN: not known."""
        for part in self.parts:
            if part.what != INITIAL:
                return math.nan if part.what in self.infinite else part.by
        return math.nan


@np.errstate(invalid="ignore", over="ignore")  # Of numbers that are not finite.
def compare(one: Recorded, two: Recorded) -> Comparison:
    """How the second differs from the first."""
    first, other = one.run, two.run
    names = itertools.zip_longest(
        [*first.names, *first.gradient_names], [*other.names, *other.gradient_names], fillvalue=""
    )
    times = _HALF if first.is_half or other.is_half else 1
    unseen = {**first.unseen, **other.unseen}
    left_out = {**first.left_out, **other.left_out}
    infinite: dict[str, int] = {}
    if alien := next((one or two for one, two in names if one != two), ""):
        parts = [*_returned(first, other, times, infinite)]
        parts.append(Compared(VARIABLES, math.inf, 0, alien, math.inf))
    else:
        parts = [*_parts(one, two, times, unseen, left_out, infinite)]
    far = [(part.step, n) for n, part in enumerate(parts) if part.step is not None]
    factor, scaled = None, (0, 0)
    if not alien and GRADIENTS not in unseen:
        factor, scaled = _factor(one.arrays, two.arrays, times)
    clip = _clip([one, two])
    found = parts[min(far)[1]] if far else None
    return Comparison(parts, found, factor, scaled, clip, unseen, left_out, infinite)


def _parts(
    one: Recorded,
    two: Recorded,
    times: int,
    unseen: dict[str, str],
    left_out: dict[str, str],
    infinite: dict[str, int],
) -> Iterator[Compared]:
    """All that two runs with the same variables have recorded."""
    first, here, there = one.run, one.arrays, two.arrays
    norms = _norms(here.before)
    apart = np.maximum(0, _norms(here.before - there.before) - _EPSILON * norms)
    initial = _ratio(apart, norms)[None]
    yield _compared(INITIAL, initial, (_INITIAL_MAX,), first.names, step=0)
    yield from _returned(first, two.run, times, infinite)
    if GRADIENTS not in unseen:
        yield from _gradients(one, two, times, unseen, infinite)
    yield from _changes(one, two, times, infinite)
    if first.rows_of_outputs != two.run.rows_of_outputs:
        left_out.setdefault(OUTPUTS, "the runs have not kept the same rows")
    elif not (first.left_out.get(OUTPUTS) or two.run.left_out.get(OUTPUTS)):
        yield from _outputs(here, there, times, infinite)


def _returned(first: Run, other: Run, times: int, infinite: dict[str, int]) -> Iterator[Compared]:
    """What steps return, the loss first."""
    names = list(dict.fromkeys([*first.returned, *other.returned]))
    for name in sorted(names, key=lambda name: name not in (first.loss, other.loss)):
        is_loss = name in (first.loss, other.loss)
        one, two = first.returned.get(name, []), other.returned.get(name, [])
        if not (one and two):
            who = (first if one else other).who
            yield Compared(name, math.inf, 1, f"which a step returns with {who} alone", math.inf)
            continue
        steps = min(len(one), len(two))
        values = np.array([one[:steps], two[:steps]], np.float64)
        if bad := _infinite(*values[:, :, None, None]):
            infinite[name] = bad
            values = values[:, : bad - 1]
        sizes = np.abs(values)
        finite = sizes[np.isfinite(sizes)]
        # Of numbers near 0 the difference is relative to larger ones.
        least = (sizes[0, 0] / 100 if is_loss else finite.max()) if finite.size else 0.0
        parts = _ratio(np.abs(values[0] - values[1]), np.maximum(sizes.max(0), least))
        limits = _limits(_LOSS_MAX if is_loss else _RETURNED_MAX, times)
        found = _compared(name, parts[:, None], limits, [""])
        if found.step:
            here, there = values[:, found.step - 1].tolist()
            found = found._replace(here=here, there=there)
        yield found


def _gradients(
    one: Recorded, two: Recorded, times: int, unseen: dict[str, str], infinite: dict[str, int]
) -> Iterator[Compared]:
    here, there, names = one.arrays, two.arrays, one.run.gradient_names
    steps = min(len(here.gradients), len(there.gradients))
    calls = here.calls[:steps], there.calls[:steps]
    came = calls[0].any(1) | calls[1].any(1)
    if not came.any():
        unseen[GRADIENTS] = f"none came to a DistributedOptimizer in {steps} steps"
        return
    begin = int(came.argmax())  # Later than in the first step where they are accumulated.
    mine, theirs = here.gradients[begin:steps], there.gradients[begin:steps]
    if one.run.skips and two.run.skips:
        # The loss scale was too large for both: such a step is skipped.
        bad = ~(np.isfinite(mine).all((1, 2)) | np.isfinite(theirs).all((1, 2)))
        mine, theirs = (np.where(bad[:, None, None], 0, g) for g in (mine, theirs))
    elif bad_step := _infinite(mine, theirs):
        infinite[GRADIENTS] = begin + bad_step
        mine, theirs = mine[: bad_step - 1], theirs[: bad_step - 1]
    norms = np.maximum(_norms(mine), _norms(theirs))
    least = _SMALL * np.linalg.norm(norms, axis=1, keepdims=True)
    parts = _ratio(_norms(mine - theirs), np.maximum(norms, least))
    parts[(calls[0] != calls[1])[begin:][: len(parts)]] = math.inf
    limits = _limits(_GRADIENT_MAX, times)
    yield from _in_steps(GRADIENTS, "of", parts, limits, names, begin + 1)


def _changes(
    one: Recorded, two: Recorded, times: int, infinite: dict[str, int]
) -> Iterator[Compared]:
    """What steps have changed of weights; of the trained ones all count together."""
    here, there = one.arrays, two.arrays
    steps = min(len(here.changes), len(there.changes))
    is_trained = np.array(one.run.trained, bool)
    limits = _limits(_CHANGE_MAX, times)
    for what, chosen in ((WEIGHTS, is_trained), (UNTRAINED, ~is_trained)):
        if not chosen.any():
            continue
        mine, theirs = (each.changes[:steps, chosen] for each in (here, there))
        if bad := _infinite(mine, theirs):
            infinite[what] = bad
            mine, theirs = mine[: bad - 1], theirs[: bad - 1]
        moved = np.maximum(_norms(mine), _norms(theirs))
        rounded = _EPSILON * (_norms(here.before[chosen]) + moved)
        apart = np.maximum(0, _norms(mine - theirs) - rounded)
        names = list(itertools.compress(one.run.names, chosen))
        # Of some trained ones the gradient may be 0 but for rounding, of which Adam makes a step.
        whole = (np.linalg.norm(norms, axis=1) for norms in (apart, moved))
        together = _ratio(*whole) if what == WEIGHTS else None
        yield from _in_steps(what, "after", _ratio(apart, moved), limits, names, 1, together)


def _outputs(
    here: Arrays, there: Arrays, times: int, infinite: dict[str, int]
) -> Iterator[Compared]:
    step = len(here.changes) + 1
    one, two = here.outputs, there.outputs
    if _infinite(one[None], two[None]):
        infinite[OUTPUTS] = step - 1
        return
    if len(one) != len(two):
        yield Compared(OUTPUTS, math.inf, step, f"of which there are {len(one)} and {len(two)}")
        return
    parts = _ratio(_norms(one - two), np.maximum(_norms(one), _norms(two)))[None]
    names = [f"output {number}" for number in range(1, len(one) + 1)]
    yield _compared(OUTPUTS, parts, (min(_MAX, times * _OUTPUT_MAX),), names, step=step)


def _factor(one: Arrays, two: Arrays, times: int) -> tuple[float | None, tuple[int, int]]:
    """By what the first run's gradients are the second's, of the first step that has any."""
    steps = min(len(one.gradients), len(two.gradients))
    both = one.calls[:steps].any(1) & two.calls[:steps].any(1)
    for each in (one, two):
        both &= np.isfinite(each.gradients[:steps]).all((1, 2))
    if not both.any():
        return None, (0, 0)
    step = int(both.argmax())
    mine, theirs = one.gradients[step], two.gradients[step]
    norms = np.maximum(_norms(mine), _norms(theirs))
    apart = _norms(mine - theirs)
    has_any = norms > _SMALL * np.linalg.norm(norms)
    far = has_any & (apart > min(_MAX, times * _GRADIENT_MAX[0]) * norms)
    if np.count_nonzero(mine[far]) <= _FEW:
        return None, (0, 0)
    square = float((mine[far] ** 2).sum())
    factor = float((mine[far] * theirs[far]).sum()) / max(square, _TINY)
    left = _norms(theirs[far] - factor * mine[far]) / np.maximum(_norms(theirs[far]), _TINY)
    most = min(SAME_FACTOR, _EXPLAINED * float((apart[far] / norms[far]).max()))
    if not factor or left.max() > most:
        return None, (0, 0)
    return factor, (int(far.sum()), int(has_any.sum()))


def _clip(records: Sequence[Recorded]) -> str:
    """Where each rank's own gradients are cut off: at the largest norm, which is met repeatedly."""
    shapes = {record.arrays.own.shape[2] for record in records}
    if len(shapes) != 1:
        return ""
    # One row for each step of each rank: all pooled, since the limit is the same everywhere.
    rows = np.concatenate([r.arrays.own.reshape(-1, *r.arrays.own.shape[2:]) for r in records])
    rows = rows[np.isfinite(rows).all((1, 2)) & (rows[:, :, 0] > 0).any(1)]
    if len(rows) < 2:
        return ""
    every = {
        "all gradients of a step have together": np.linalg.norm(rows[:, :, 0], axis=1)[:, None],
        "a variable's gradient has": rows[:, :, 0],
        "an element of a gradient has": rows[:, :, 1],
    }
    for what, values in every.items():
        most = values.max(0)
        met = (values >= most * (1 - _SAME_NORM)).sum(0)
        # By chance one is the largest.
        usual = np.flatnonzero((met > 1) & (met >= len(rows) / 4) & (most > 0))
        # A variable's gradient may be constant, as that of a bias in a linear loss: no evidence.
        if len(usual) > values.shape[1] / 2:
            return f"the largest that {what}, {most[usual[0]]:.4g}, is met again and again"
    return ""


def _in_steps(
    what: str,
    when: str,
    parts: np.ndarray,
    limits: Sequence[float],
    names: Sequence[str],
    begin: int,
    together: np.ndarray | None = None,
) -> Iterator[Compared]:
    """That of the first step, which is `begin`, and of later ones."""
    for at, end in ((0, 1), (1, len(parts))):
        some, whole = parts[at:end], None if together is None else together[at:end]
        if len(some):
            first, last = begin + at, begin + at + len(some) - 1
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            span = limits[min(at, 1) :]
            yield _compared(f"{what} {when} {steps}", some, span, names, first, whole)


def _compared(
    what: str,
    parts: np.ndarray,
    limits: Sequence[float],
    names: Sequence[str],
    step: int = 1,
    together: np.ndarray | None = None,
) -> Compared:
    """Relative differences of these names in steps from `step` on; the last limit goes on.

    Where all count `together`, those say whether a step differs.
    """
    decisive = parts.max(1, initial=0.0) if together is None else together
    ends = np.array([limits[min(n, len(limits) - 1)] for n in range(len(parts))])
    by, far = float(decisive.max(initial=0.0)), np.flatnonzero(~(decisive <= ends))
    if not far.size:
        return Compared(what, by)
    row = parts[far[0]]
    place = int((~(row <= ends[far[0]])).argmax())
    return Compared(what, by, step + int(far[0]), names[place], float(row[place]))


def _limits(limits: Sequence[float], times: int) -> list[float]:
    return [limit if times == 1 else min(_MAX, times * limit) for limit in limits]


def _infinite(one: np.ndarray, two: np.ndarray) -> int:
    """The first step, from 1 on, in which both are not finite; 0: none."""
    bad = [~np.isfinite(each).all((1, 2)) for each in (one, two)]
    both = np.flatnonzero(bad[0] & bad[1])
    return int(both[0]) + 1 if both.size else 0


def _norms(sketches: np.ndarray) -> np.ndarray:
    norms: np.ndarray = np.sqrt((sketches**2).sum(-1))
    return norms


def _ratio(apart: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The relative difference; infinite where one is not finite."""
    ratio = apart / np.maximum(size, _TINY)
    found: np.ndarray = np.where(np.isnan(ratio), np.inf, ratio)
    return found
