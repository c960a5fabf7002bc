"""Has a training's step tried before it is made, tells all ranks of it, and warns of what follows.

Rank 0 tries it, since all have the same data; where each has its own, all do. The ranks wait for
the verdict, so none knows something else. What few rows cannot show is said by
`ringreduce.keras.checks.warnings.differences` beside it.

Gradients that are sums are a warning, since a program that knows ranks may divide by their number
already. One that nobody has changed does not know them: there the ranks' are added up.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.checks.model_in_fit import data_in_fit
from ringreduce.keras.checks.warnings import differences, warn_of_parity
from ringreduce.keras.data.arrays import Arrays, are_arrays
from ringreduce.keras.data.division import Feed
from ringreduce.keras.data.fingerprint import compare_codes
from ringreduce.keras.model.building import build
from ringreduce.keras.model.metric_trial import note_names_in_steps, try_metrics
from ringreduce.keras.model.own_ranks import names_of_ranks
from ringreduce.keras.model.trial import Verdict, try_step
from ringreduce.keras.optimizers_in import wrappers_in
from ringreduce.keras.repeating import told_by_ranks
from ringreduce.keras.step import own_step
from ringreduce.pure.parity import Fit, gravest
from ringreduce.vocabulary.types import ReduceOp
from ringreduce.vocabulary.words import for_rr, is_unchanged

_log = logging.getLogger(__name__)

_ADD_UP = 'pass gradients="sum" to rr.DistributedOptimizer, or gradients="mean" if they are right'
_DIVIDE = "let its loss be a mean over the rows that it gets, tf.shape(x)[0] of them"
_OF_STEP = (
    "gather what it compares by rr.all_gather, divide by its own rows, tf.shape(x)[0], or weight "
    "the step by what counts, rr.step_weight"
)
_OF_UNCHANGED = (
    f"{_DIVIDE}; what compares rows, or counts some of them only, takes rr.all_gather or "
    "rr.step_weight in a program with rr.fit, without --unchanged"
)
_NOT_TRIED = (
    ". If its gradients are no means over its rows, ranks train to something else than one "
    "process: compare them by ringreduce verify --unchanged."
)
_TOO_LATE = (
    "steps were made before one was tried: with steps_per_execution above 1, or an evaluate or "
    "make_train_function of its own, on a dataset or in a fit before"
)
_OF_LOSS = "let it return a value for each sample; mask by sample_weight"
_OF_ADDED = "let it be a mean over rows, or what no row changes"
_OF_AVERAGE = (
    'combine what it is computed from, rr.all_reduce(values, op="mean"), or use '
    "rr.SyncBatchNormalization"
)
_OF_OUTPUT = "let a row's output depend on that row alone, or train on one rank"

_SHOWN = 0.01  # A smaller difference is shown with a decimal.


class Trial:
    """Tries the step of `model` on the first rows of `feed`, once, unless it `tries` nothing.

    `ring`: the ranks that train it. With `has_own_data` each rank tries its own rows; else all have
    the same, whose words are compared if it `compares`. `says_known`: it warns as well of what is
    known to differ, whatever the rows.
    """

    def __init__(
        self,
        model: keras.Model,
        feed: Feed,
        ring: Communicator,
        *,
        has_own_data: bool,
        tries: bool,
        compares: bool = False,
        says_known: bool = True,
    ) -> None:
        self._model, self._feed, self._ring = model, feed, ring
        self._has_own_data, self._tries, self._says_known = has_own_data, tries, says_known
        self._compares = compares and not has_own_data
        # For `ringreduce verify`, once it has run; `known` is what the making of the model tells.
        self.verdict = Verdict(why="no step was made")
        self.findings: list[str] = []
        self.known: list[str] = []

    @property
    def needs_rows(self) -> bool:
        """Whether an element of the data must be read before `run`."""
        return self._feed.first is None

    def run(self, *, is_first: bool) -> bool:
        """Try the step, or learn what rank 0 has found, and warn. Collective.

        Args:
            is_first: whether no step was made, or its function is made anew: without any, nothing
                can be added up.

        Returns:
            Whether the ranks' gradients combine in another way from now on.
        """
        model, ring, rows = self._model, self._ring, self._feed.first
        verdict = self._agreed(rows) if self._tries else Verdict(why="it was not asked for")
        note_names_in_steps(model, verdict.apart, verdict.sums)
        known = differences(model, knows_losses=not verdict.why)
        changed = []
        if is_unchanged() and is_first and not verdict.ranks:
            changed = _added_up(model, verdict)
            added = [wrapper for wrapper in changed if wrapper.options["gradients"] == "sum"]
            if added and ring.rank == 0:
                text = "[%d/%d] %s are sums over rows: the ranks' are added up"
                _log.warning(text, *ring.config.who.values(), _what(model, added))
        findings = _findings(model, verdict, known)
        self.verdict, self.known, self.findings = verdict, known, findings
        warn_of_parity([*(known if self._says_known else []), *findings], ring)
        if rows is not None:
            # For validation, whose batches are not divided.
            try_metrics(model, rows, ring)
            if self._compares:
                compare_codes(rows, ring)
        return bool(changed)

    def _agreed(self, rows: Any) -> Verdict:
        """What rank 0 has found, or the gravest of what all ranks have on data of their own."""
        ring = self._ring
        verdict = Verdict(why="it is tried on rank 0")
        if ring.rank == 0 or self._has_own_data:
            verdict = self._tried(rows)
        told = [Verdict(**each) for each in told_by_ranks(ring, asdict(verdict)).values()]
        verdict = _gravest(told if self._has_own_data else told[:1])
        if verdict.why:
            # An unchanged program's own step may sum over rows, which nothing adds up then.
            is_silent = not is_unchanged() or own_step(self._model) is None or ring.rank != 0
            text = "[%d/%d] the step was not tried: %s" + for_rr("", _NOT_TRIED)
            level = logging.INFO if is_silent else logging.WARNING
            _log.log(level, text, *ring.config.who.values(), verdict.why)
        return verdict

    def _tried(self, rows: Any) -> Verdict:
        if rows is None:
            return Verdict(why="no rows are at hand before the first step")
        ops = [wrapper.options["op"] for wrapper in wrappers_in(self._model)]
        if ReduceOp.SUM in ops:
            return Verdict(why='op="sum" asks for other gradients')
        verdict = try_step(self._model, rows, self._ring)
        is_summed = is_unchanged() and Fit.SUM.value in verdict.fits
        return replace(verdict, ranks=names_of_ranks() if is_summed else "")


def _gravest(verdicts: list[Verdict]) -> Verdict:
    """Of what ranks have found on their own rows."""
    fit = gravest(Fit(verdict.fit) for verdict in verdicts)
    first = next(verdict for verdict in verdicts if Fit(verdict.fit) is fit)
    fits = zip(*(verdict.fits for verdict in verdicts if verdict.fits), strict=True)
    return replace(
        first,
        sums=tuple(sorted({name for verdict in verdicts for name in verdict.sums})),
        apart=tuple(sorted({name for verdict in verdicts for name in verdict.apart})),
        of_rows=tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.of_rows)),
        fits=tuple(gravest(map(Fit, of_one)).value for of_one in fits),
    )


def _added_up(model: keras.Model, verdict: Verdict) -> list[Any]:
    """Have the optimizers whose gradients are sums add up the ranks'; those that did not before.

    Those whose gradients are means take the mean, also where a training before has found sums.
    """
    changed = []
    if Fit(verdict.fit) in (Fit.SUM, Fit.MEAN):
        for wrapper, fit in zip(wrappers_in(model), verdict.fits, strict=True):
            adds_up = wrapper.options["gradients"] == "sum"
            if Fit(fit) in (Fit.SUM, Fit.MEAN) and adds_up != (Fit(fit) is Fit.SUM):
                wrapper.add_up_gradients(not adds_up)
                changed.append(wrapper)
    return changed


def _what(model: keras.Model, wrappers: Sequence[Any]) -> str:
    """Names the gradients that these optimizers get of a step."""
    where = "its train_step" if own_step(model) is not None else "its loss"
    if len(wrappers) == len(wrappers_in(model)):
        return f"the gradients of {where}"
    attributes = {id(value): name for name, value in vars(model).items()}
    names = ", ".join(attributes.get(id(wrapper), wrapper.name) for wrapper in wrappers)
    return f"the gradients that {names} gets of {where}"


def _findings(model: keras.Model, verdict: Verdict, known: list[str]) -> list[str]:
    """What is to be warned of, with a remedy each."""
    findings = _of_gradients(model, verdict, known)
    if verdict.of_rows:
        more = f" and {len(verdict.of_rows) - 3} more" if len(verdict.of_rows) > 3 else ""
        findings.append(
            f"each rank sets {', '.join(verdict.of_rows[:3])}{more} by its own rows, and all get "
            f"rank 0's at the end of an epoch ({for_rr(_OF_AVERAGE)})"
        )
    return findings


def _of_gradients(model: keras.Model, verdict: Verdict, known: list[str]) -> list[str]:
    fit, rows, where = Fit(verdict.fit), verdict.rows, verdict.where
    pairs = list(zip(wrappers_in(model), map(Fit, verdict.fits), strict=bool(verdict.fits)))
    asked = [(wrapper, own, wrapper.options["gradients"]) for wrapper, own in pairs]
    is_loss = where.startswith("the loss")
    if fit is Fit.NOT_FINITE:
        return [
            f"{where} is not finite for a part of {rows} rows, though it is for all of them: a "
            "rank with such rows makes every weight NaN (divide by at least 1)"
        ]
    if fit is Fit.NEITHER and is_loss and any("mask" in text for text in known):
        return []  # Which says why.
    if fit is Fit.NEITHER:
        what, remedy = where, for_rr(_OF_STEP, _OF_UNCHANGED)
        if is_loss or where.startswith("what layers"):
            what = f"{where} is no mean over samples: the gradients"
            remedy = _OF_LOSS if is_loss else _OF_ADDED
        elif where.startswith("the model"):
            what, remedy = f"{where}, so the gradients", _OF_OUTPUT
        missed = f"{verdict.missed:.0%}" if verdict.missed >= _SHOWN else f"{verdict.missed:.1%}"
        return [
            f"{what} of {rows} rows differ from the mean of those of two parts of them, as ranks "
            f"take it, by {missed} ({remedy})"
        ]
    found = []
    if sums := [wrapper for wrapper, own, how in asked if own is Fit.SUM and how == "tried"]:
        why = f"{verdict.ranks}, so that it may count them already" if verdict.ranks else _TOO_LATE
        unchanged = f"they are not added up, since {why}; {_DIVIDE}"
        found.append(
            f"{_what(model, sums)} are sums over rows, or divided by what is the same for any "
            f"rows: those of {rows} rows are the sum of two parts', so their mean is too small "
            f"({for_rr(_ADD_UP, unchanged)})"
        )
    if means := [wrapper for wrapper, own, how in asked if own is Fit.MEAN and how == "sum"]:
        remedy = for_rr("leave it out", _DIVIDE)
        found.append(
            f'gradients="sum" was asked for, and {_what(model, means)} are means over rows: added '
            f"up they are too large ({remedy})"
        )
    return found


class AfterFirst(keras.callbacks.Callback):
    """Runs a trial in a `fit` that is not ours: before its first step, or once that has read data.

    Then it comes too late to add up gradients.
    """

    looks_at_batches = False

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial: Trial | None = trial

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._trial is not None and not self._trial.needs_rows:
            self._run(is_first=not any(wrapper.has_begun for wrapper in wrappers_in(self.model)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._run(is_first=False)

    def _run(self, *, is_first: bool) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.run(is_first=is_first)


def try_in_fit(model: keras.Model, ring: Communicator) -> None:
    """Run the trial of a training by ``model.fit`` of Keras, which calls this. Collective.

    Each rank has data of its own; their rows are at hand if they are arrays.
    """
    feed = Feed()
    data = data_in_fit(model)
    if data is not None and are_arrays(data[0]) and model.built:
        with contextlib.suppress(Exception):  # Keras says what is wrong with them.
            arrays = Arrays(*data)
            build(model, arrays.spec)
            feed.first = arrays.first()
    Trial(model, feed, ring, has_own_data=True, tries=True, says_known=False).run(is_first=False)
