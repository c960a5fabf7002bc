"""Has a training's step tried before it is made, tells all ranks of it, and warns of what follows.

Rank 0 tries it, since all have the same data; where each has its own, all do. The ranks wait for
the verdict, so none knows something else. What few rows cannot show is said by
`ringreduce.keras.mistakes.differences` beside it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict, replace
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.arrays import Arrays, are_arrays
from ringreduce.keras.data_fingerprint import compare_codes
from ringreduce.keras.join import build
from ringreduce.keras.metric_trial import note_names_in_steps, try_metrics
from ringreduce.keras.mistakes import data_in_fit, differences, warn_of_parity
from ringreduce.keras.plan import Feed
from ringreduce.keras.repeating import told_by_ranks
from ringreduce.keras.step import own_step
from ringreduce.keras.trial import Verdict, try_step
from ringreduce.keras.wrappable import wrappers_in
from ringreduce.pure.parity import Fit
from ringreduce.vocabulary.types import ReduceOp
from ringreduce.vocabulary.words import for_rr

_log = logging.getLogger(__name__)

_ADD_UP = 'pass gradients="sum" to rr.DistributedOptimizer, or gradients="mean" if they are right'
_OF_STEP = (
    "gather what it compares by rr.all_gather, divide by its own rows, tf.shape(x)[0], or weight "
    "the step by what counts, rr.step_weight"
)
_OF_LOSS = "let it return a value for each sample; mask by sample_weight"
_OF_OUTPUT = "let a row's output depend on that row alone, or train on one rank"


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

    @property
    def needs_rows(self) -> bool:
        """Whether an element of the data must be read before `run`."""
        return self._feed.first is None

    def run(self) -> None:
        """Try the step, or learn what rank 0 has found, and warn. Collective."""
        model, ring, rows = self._model, self._ring, self._feed.first
        verdict = self._agreed(rows) if self._tries else Verdict(why="it was not asked for")
        note_names_in_steps(model, verdict.apart, verdict.sums)
        known = differences(model, knows_losses=not verdict.why)
        said = known if self._says_known else []
        warn_of_parity([*said, *_findings(model, verdict, known)], ring)
        if rows is not None:
            # For validation, whose batches are not divided.
            try_metrics(model, rows, ring)
            if self._compares:
                compare_codes(rows, ring)

    def _agreed(self, rows: Any) -> Verdict:
        """What rank 0 has found, or the gravest of what all ranks have on data of their own."""
        ring = self._ring
        verdict = Verdict(why="it is tried on rank 0")
        if ring.rank == 0 or self._has_own_data:
            verdict = self._tried(rows)
        told = [Verdict(**each) for each in told_by_ranks(ring, asdict(verdict)).values()]
        verdict = _gravest(told if self._has_own_data else told[:1])
        if verdict.why:
            _log.info("[%d/%d] the step was not tried: %s", *ring.config.who.values(), verdict.why)
        return verdict

    def _tried(self, rows: Any) -> Verdict:
        if rows is None:
            return Verdict(why="no rows are at hand before the first step")
        ops = [wrapper.options["op"] for wrapper in wrappers_in(self._model)]
        if ReduceOp.SUM in ops:
            return Verdict(why='op="sum" asks for other gradients')
        return try_step(self._model, rows, self._ring)


def _gravest(verdicts: list[Verdict]) -> Verdict:
    """Of what ranks have found on their own rows."""
    order = [Fit.NOT_FINITE, Fit.NEITHER, Fit.SUM, Fit.MEAN, Fit.NOTHING]
    first = min(verdicts, key=lambda verdict: order.index(Fit(verdict.fit)))
    sums = {name for verdict in verdicts for name in verdict.sums}
    apart = {name for verdict in verdicts for name in verdict.apart}
    return replace(first, sums=tuple(sorted(sums)), apart=tuple(sorted(apart)))


def _findings(model: keras.Model, verdict: Verdict, known: list[str]) -> list[str]:
    """What is to be warned of, with a remedy each."""
    fit, rows, where = Fit(verdict.fit), verdict.rows, verdict.where
    asked = {wrapper.options["gradients"] for wrapper in wrappers_in(model)}
    is_loss, is_output = where.startswith("the loss"), where.startswith("the model")
    if fit is Fit.NOT_FINITE:
        return [
            f"{where} is not finite for a part of {rows} rows, though it is for all of them: a "
            "rank with such rows makes every weight NaN (divide by at least 1)"
        ]
    if fit is Fit.NEITHER and is_loss and any("mask" in text for text in known):
        return []  # Which says why.
    if fit is Fit.NEITHER:
        remedy = _OF_LOSS if is_loss else _OF_OUTPUT if is_output else for_rr(_OF_STEP)
        what = f"{where} is no mean over samples: the gradients" if is_loss else where
        what = f"{where}, so the gradients" if is_output else what
        return [
            f"{what} of {rows} rows differ from the mean of those of two parts of them, as ranks "
            f"take it, by {verdict.missed:.0%} ({remedy})"
        ]
    if fit is Fit.SUM and asked == {"tried"}:
        what = "its train_step" if own_step(model) is not None else "its loss"
        return [
            f"the gradients of {what} are sums over rows, or divided by what is the same for any "
            f"rows: those of {rows} rows are the sum of two parts', so their mean is too small "
            f"({for_rr(_ADD_UP)})"
        ]
    if fit is Fit.MEAN and "sum" in asked:
        return [
            'gradients="sum" was asked for, and those of its step are means over rows: added up '
            "they are too large (leave it out)"
        ]
    return []


class AfterFirst(keras.callbacks.Callback):
    """Runs a trial when the first batch has passed: for a `fit` that is not ours."""

    looks_at_batches = False

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial: Trial | None = trial

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.run()


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
    Trial(model, feed, ring, has_own_data=True, tries=True, says_known=False).run()
