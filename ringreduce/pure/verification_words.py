"""What is said of two runs that were compared, and why they differ. Pure."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ringreduce.pure.parity import Fit
from ringreduce.pure.verification import (
    GRADIENTS,
    INITIAL,
    OUTPUTS,
    SAME_FACTOR,
    UNTRAINED,
    VARIABLES,
    WEIGHTS,
    Compared,
    Comparison,
    Run,
)
from ringreduce.vocabulary.words import for_rr

_SHOWN, _WHY_MAX = 3, 200
_FOUND = "The trial before the first step found: "
_TOLD_LITTLE = "told nothing: their gradients are 0, or not finite."
_DIVIDE = "by the rows at hand: tf.reduce_mean, or tf.shape(x)[0]."


def reasons(first: Run, other: Run, difference: Comparison, again: Comparison) -> Iterator[str]:
    """Why two runs differ as `difference`, the likeliest first.

    `again` compares the first with another one that has as many ranks.
    """
    if again.first is not None and again.first.what == "initial weights":
        yield (
            "The initial weights differ in each run. Seed them: keras.utils.set_random_seed(1) "
            "before the model is made."
        )
    elif again.first is not None:
        yield (
            f"Two runs with {first.who} differ too: something random has no seed, such as the "
            "order of data, dropout or augmentation. See keras.utils.set_random_seed(1) and "
            "shuffle(n, seed=1)."
        )
    elif difference.first is not None and difference.first.what == "initial weights":
        yield "The initial weights depend on the number of ranks. Seed them alike for any number."
    given = {**first.settings, **other.settings}
    texts = [(n, *(run.settings.get(n, "absent") for run in (first, other))) for n in given]
    for name, here, there in [text for text in texts if text[1] != text[2]][:_SHOWN]:
        yield f"{name} is {here} with {first.who} and {there} with {other.who}."
    if first.rows != other.rows:
        yield (
            f"A step has {first.rows} samples with {first.who} and {other.rows} with {other.who}: "
            "batches given to rr.fit are those of all ranks together."
        )
    yield from _of_numbers(first, other, difference)


def _of_numbers(first: Run, other: Run, difference: Comparison) -> Iterator[str]:
    """Why runs that begin alike, with the same settings, come to other numbers."""
    cause, found = difference.first, [_of_finding(text) for text in other.tried.findings]
    if cause is not None and cause.what == VARIABLES:
        yield "The program makes another model or optimizer with another number of ranks."
        return
    if difference.factor is not None:
        # Nothing else makes one gradient another times a number.
        yield from (f"{text}." for text in other.of_gradients)
        if not other.of_gradients:
            yield from _of_factor(first, other, difference.factor, found)
        return
    is_seen = GRADIENTS not in difference.unseen
    if is_seen and cause is not None and cause.what.startswith(WEIGHTS):
        yield (
            "The gradients are the same, and not what is made of them: the optimizer, a constraint "
            "or the step itself changes weights by something else, such as random numbers."
        )
        return
    kinds = GRADIENTS, WEIGHTS, UNTRAINED, INITIAL, OUTPUTS
    others = {part.what for part in difference.parts if part.step is not None}
    if is_seen and others and not any(what.startswith(kinds) for what in others):
        yield (
            f"Gradients and weights agree, and only what a step returns differs: "
            f"{', '.join(sorted(others))}. A number that is no metric is the mean of the ranks' "
            "values, weighted by their rows, or their sum where the trial has found that: it "
            "differs if it is made of several rows in another way. Let the model keep a metric, "
            "and return its result."
        )
        return
    if cause is not None and math.isfinite(cause.here) != math.isfinite(cause.there):
        yield (
            f"{cause.what} is not finite in one of the runs: "
            + for_rr(
                'check_numerics="raise" of rr.DistributedOptimizer names rank and variable. '
                "A rank may divide by a number that is 0 in its part of the rows.",
                "a rank may divide by a number that is 0 in its part of the rows.",
            )
        )
    clips = [f"{text}." for text in _of_clip(other, difference.clip)]
    if clips:  # Which says why the trial has found other gradients.
        found = [text for text in found if f"{_FOUND}the gradients of" not in text]
    of_gradients = [*clips, *(f"{text}." for text in other.of_gradients), *found]
    # Other gradients change what is returned only after the first step.
    is_before = cause is not None and cause.step == 1 and not cause.what.startswith(GRADIENTS)
    of_batches = [f"{text}." for text in other.of_batches]
    yield from (of_batches + of_gradients if is_before else of_gradients + of_batches)
    if other.is_loop:
        yield _of_rows(first, other)


def _of_rows(first: Run, other: Run) -> str:
    """What a loop must do with rows, which are not known."""
    return (
        f"The loop's steps may have other rows: {other.who} together must have those that "
        f"{first.who} has, as from rr.shard(data).batch(n // rr.size()). With batches of n on each "
        "rank, or a shuffle after rr.shard, the numbers differ though the step may be right."
    )


def _of_finding(text: str) -> str:
    """What a trial has found, as a sentence."""
    return f"{_FOUND}{text}."


def _of_trial(run: Run) -> str:
    """What is known of a step of which a trial has found nothing that explains a difference."""
    tried = run.tried
    if tried.found == Fit.MEAN.value:
        return (
            f"The trial of {tried.rows} rows before the first step found that their gradients are "
            "means over rows, as ranks need them. What so few rows need not show: a branch by step "
            "or epoch, a mask that none of them has, clipping that does not act on them, data that "
            "depend on the rank."
        )
    if tried.found:
        return f"The trial of {tried.rows} rows before the first step {_TOLD_LITTLE}"
    return f"The step was not tried on a few rows: {textwrap.shorten(tried.why, _WHY_MAX)}."


def _of_clip(run: Run, clip: str) -> Iterator[str]:
    """What a step of the program's own does to gradients, if the records show it."""
    if clip and run.own_step:
        does = f"calls {run.clips}, which clips" if run.clips else "clips, or scales,"
        yield (
            f"{run.own_step} {does} each rank's gradients before the optimizer averages them: "
            f"{clip} (leave it to the optimizer: clipnorm, clipvalue, global_clipnorm)"
        )


def _of_factor(first: Run, other: Run, factor: float, found: Sequence[str]) -> Iterator[str]:
    """Why gradients are others times a number."""
    step, ranks = other.own_step or "The loss", other.ranks / first.ranks
    fit = other.tried.found
    if _is_near(factor * ranks) and fit in ("", Fit.SUM.value, Fit.NOTHING.value):
        add_up = f"Pass {other.adds_up_by}, or divide "
        shown = f": the trial of {other.tried.rows} rows has shown it" * (fit == Fit.SUM.value)
        yield (
            f"{step} adds up over rows, and divides by a constant, by the rows of the whole batch, "
            "or by nothing, while each rank has its part of the rows, and the optimizer averages "
            f"over the ranks{shown}. {for_rr(add_up, 'Divide ')}{_DIVIDE}"
        )
    elif _is_near(factor * ranks) and fit == Fit.NEITHER.value:
        yield (
            f"{step} adds up over rows, and divides by a constant, by the rows of the whole batch, "
            f"or by nothing; but the trial of {other.tried.rows} rows found no plain sum, as where "
            "a penalty of weights is in it, which ranks must not add up. "
            f"Divide {_DIVIDE}"
        )
    elif found:
        yield from found
    elif _is_near(factor / ranks):
        yield (
            f"{step} adds up over the ranks, or multiplies by their number, what the optimizer "
            "averages. Leave that to the optimizer."
        )
    else:
        if other.is_loop:
            yield _of_rows(first, other)
        yield (
            f"{step} multiplies gradients by what depends on the number of ranks or of their rows."
        )
        if fit == Fit.MEAN.value:
            yield _of_trial(other)


def _is_near(ratio: float) -> bool:
    return abs(ratio - 1) <= SAME_FACTOR


def _how_much(factor: float, ranks: float) -> str:
    """``half of``, ``a third of``, ``2 times``, ``0.7 times``."""
    if _is_near(factor * ranks) and ranks > 1:
        names = {2: "half of", 3: "a third of", 4: "a quarter of"}
        return names.get(round(ranks), f"one part in {ranks:g} of")
    return f"{factor:.3g} times"


def verdict(
    runs: Sequence[Run], found: Sequence[Comparison], again: Comparison | None
) -> Iterator[str]:
    """Lines of text; `found` compares the first run with each of the others.

    `again` compares it with one that has as many ranks, if any differs.
    """
    different = [n for n, each in enumerate(found, 1) if not each.agrees]
    if again is not None:
        yield from _of_difference(runs, found, different, again)
        for name, why in _merged(each.unseen for each in found).items():
            yield f"Not seen: {name}: {why}."
    elif any(each.is_open for each in found):
        yield "This does not show that the numbers agree:"
        for name, step in _merged(each.infinite for each in found).items():
            yield f"  not finite: {name}, from step {step} on, with any number of ranks"
        for name, why in _merged(each.unseen for each in found).items():
            yield f"  not seen: {name}: {why}"
        yield "What was seen agrees, to these relative differences:"
    else:
        yield f"The numbers agree in {runs[0].steps} steps, to these relative differences:"
    if again is None:
        rows: dict[str, float] = {}
        # Of what is not finite from the first step on nothing was compared.
        seen = (p for each in found for p in each.parts if each.infinite.get(p.what) != 1)
        for part in seen:
            rows[part.what] = max(part.by, rows.get(part.what, 0.0))
        yield from (f"  {what:<42}{_part(by):>6}" for what, by in rows.items())
    for name, why in _merged(each.left_out for each in found).items():
        yield f"Not compared: {name}: {why}."
    fastest, slowest = (choose(runs, key=lambda run: run.speed) for choose in (max, min))
    ratio = fastest.speed / slowest.speed
    yield f"Fastest on this machine: {fastest.who}, {ratio:.2f} times as fast as {slowest.who}."


def _of_difference(
    runs: Sequence[Run], found: Sequence[Comparison], different: Sequence[int], again: Comparison
) -> Iterator[str]:
    first, other, own = runs[0], runs[different[0]], found[different[0] - 1]
    yield f"The numbers differ between {first.who} and {other.who}:"
    assert own.first is not None
    yield f"  first {_described(own.first)}"
    if own.factor is not None:
        count, total = own.scaled
        which = "all gradients" if count == total else f"{count} of {total} gradients"
        much = _how_much(own.factor, other.ranks / first.ranks)
        yield f"  {which} with {other.who} are {much} those with {first.who}"
    # Other gradients explain all that comes after them.
    parts = own.parts if own.factor is None else []
    later = [part for part in parts if part.step is not None and part is not own.first]
    for part in sorted(later, key=lambda part: part.step or 0)[:_SHOWN]:
        yield f"  then {_described(part)}"
    texts = list(reasons(first, other, own, again)) or [_unknown(other, own.first)]
    yield "The likely reason:" if len(texts) == 1 else "The likely reasons, likeliest first:"
    yield from (f"  {n}. {text}" for n, text in enumerate(texts, 1))
    if other.of_batches and other.tried.found == Fit.MEAN.value and own.factor is None:
        yield (
            f"A trial of {other.tried.rows} rows, without what depends on the batch or on chance "
            "in these layers, found that gradients are means over rows, as ranks need them."
        )
    for run in (runs[n] for n in different[1:]):
        yield f"The numbers differ between {first.who} and {run.who}, too."


def _unknown(run: Run, cause: Compared | None) -> str:
    """What to look at where nothing explains a difference."""
    begins = ""
    if cause is not None and (cause.step or 0) > 1:
        begins = f" The steps before step {cause.step} agree: see what begins there."
    if run.tried.found == Fit.MEAN.value:
        return _of_trial(run) + begins
    gathered = for_rr(" (rr.all_gather gives those of all)", "")
    return (
        f"{_of_trial(run)} See what is computed from several rows at once, of which each rank has "
        f"its part{gathered}, and what depends on the rank or on the number of ranks, such as the "
        f"data.{begins}"
    )


def _described(part: Compared) -> str:
    """What differs, and by how much."""
    if math.isfinite(part.here) or math.isfinite(part.there):
        return f"{part.what} of step {part.step}, which is {part.here:.6g} and {part.there:.6g}"
    by = f", by {_part(part.at)}" if math.isfinite(part.at) else ""
    return f"{part.what}{f': {part.name}' if part.name else ''}{by}"


def _merged(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for each in found:
        merged = {**each, **merged}
    return merged


HEADER = "ranks  threads  peak memory  ms/step  samples/s  first loss  last loss  differ"


def row(run: Run, comparison: Comparison | None = None) -> str:
    """A line of the table: a run, and how its losses differ from the first run's."""
    samples = f"{run.speed:,.0f}" if run.rows else "-"
    losses = run.losses
    first, last = (f"{losses[n]:.5g}" if losses else "-" for n in (0, -1))
    differ = "-" if comparison is None else _part(comparison.shown)
    memory = f"{max(run.memory) / (1 << 30):.2f} GiB"
    return (
        f"{run.ranks:>5}{run.threads:>9}{memory:>13}{run.step_s * 1e3:>9,.1f}{samples:>11}"
        f"{first:>12}{last:>11}{differ:>8}"
    )


def _part(ratio: float) -> str:
    """``12%``, ``0.3%``, or ``3e-05`` where it is little; ``-`` where it is not known."""
    if not math.isfinite(ratio):
        return "inf" if ratio > 0 else "-"
    if ratio < 0.001:
        return f"{ratio:.0e}" if ratio else "0"
    return f"{ratio:.0%}" if ratio >= 0.1 else f"{ratio:.1%}"
