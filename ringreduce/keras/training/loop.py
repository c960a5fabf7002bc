"""The epochs of a training, in the order in which Keras's `fit` makes them.

    reset metrics, on_epoch_begin,
    each call: on_train_batch_begin, steps, on_train_batch_end,
    validation with on_test_*, on_epoch_end

A call makes the steps that begin within 50 ms where no callback looks at single batches; callbacks
get the numbers of its first and last one, as with ``steps_per_execution``. Each rank goes by its
own clock: nothing that ranks exchange then comes between calls, but for the first, which makes one
step.
"""

import contextlib
import itertools
import math
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.keras import metric_states, private
from ringreduce.keras.callbacks.together import Together
from ringreduce.keras.callbacks.watching import all_of, that_begin_epochs, that_look
from ringreduce.keras.checks import seeds
from ringreduce.keras.checks.model_in_fit import in_fit
from ringreduce.keras.checks.users_line import DataWarning, warn_at_users_line
from ringreduce.keras.data.division import Feed
from ringreduce.keras.model.averages import Averages
from ringreduce.keras.model.building import build
from ringreduce.keras.model.trial_in_fit import Trial
from ringreduce.keras.progress import training
from ringreduce.keras.training.growing import Growing, Newcomer
from ringreduce.keras.training.looking import LooksInFit
from ringreduce.keras.training.ranks import Training
from ringreduce.keras.training.steps import MakesSteps, Steps
from ringreduce.tensorflow.private import is_deterministic
from ringreduce.vocabulary.errors import MismatchError

_CALL_S = 0.05


class Loop:
    """Trains `model` on the batches of `feed`.

    `exchanges`: steps exchange their weights, so that where data has no known length the ranks find
    out in a step that there is none left. `makes` makes the steps; by default the model's `Steps`.
    Before the first step the `trial`, if there is one, runs. After some steps there are `looks`.
    """

    def __init__(
        self,
        model: keras.Model,
        feed: Feed,
        who: Training,
        trial: Trial | None = None,
        *,
        exchanges: bool = False,
        makes: MakesSteps | None = None,
        looks: LooksInFit | None = None,
        growing: Growing | None = None,
    ) -> None:
        self._model, self._feed, self._who, self._trial = model, feed, who, trial
        self._exchanges, self._given, self._looks = exchanges, makes, looks
        self._growing = growing
        self._is_first = True  # whether no call was made
        self._is_prepared = False  # whether there were steps before
        # Whether ranks agree on who wants to stop before each epoch, and have before this one.
        self._begins, self._is_beginning = False, True

    def run(
        self,
        callbacks: Any,
        *,
        epochs: int,
        verbose: Any,
        validation: Feed | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_freq: Any = 1,
        adds_bar: bool = True,
    ) -> Any:
        """Train and return as ``model.fit`` does, with these of its arguments.

        Without `adds_bar` the bar is one of `callbacks`.
        """
        model = self._model
        epochs, steps_per_epoch = _limited(epochs, steps_per_epoch)
        self._asks_each = self._exchanges and int(self._feed.dataset.cardinality()) < 0
        self._passes = _Passes(self._feed, steps_per_epoch, model.steps_per_execution)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = keras.callbacks.CallbackList(
                callbacks,
                add_history=True,
                add_progbar=verbose != 0 and adds_bar,
                verbose=verbose,
                epochs=epochs,
                steps=self._passes.steps or self._passes.batches,
                model=model,
            )
        self._callbacks = callbacks
        self._makes = self._prepared()
        model.stop_training = False
        try:
            with in_fit(model), training(model, self._feed.facts) as self._progress:
                self._train(range(initial_epoch, epochs), validation, validation_freq)
        except MismatchError as error:
            if error.remedy is None and self._passes.batches is None and not self._exchanges:
                error.remedy = self._passes.remedy
            raise
        finally:
            self._makes.end()
        return model.history

    def _train(self, epochs: range, validation: Feed | None, validation_freq: Any) -> None:
        model, callbacks = self._model, self._callbacks
        logs: Any = None
        self._logs: Any = {}
        callbacks.on_train_begin()
        self._progress.looking = self._agree_who_looks()
        self._is_watched = bool(self._progress.looking)
        averages = Averages(model, self._who.data)
        begun = private.initial_epoch_of(model) or epochs.start
        if self._growing is not None:
            self._growing.begin(averages, lambda: iter(self._feed.dataset))
        first = private.initial_epoch_of(model) or epochs.start
        if first > epochs.start and self._passes.steps and not self._feed.has_places:
            self._warn_of_data_begun_anew(first)
        self._passes.take_seeds(first - epochs.start)
        if isinstance(self._growing, Newcomer):
            self._pass_by(range(begun, first), validation, validation_freq)
            self._growing.take_data()
        for epoch in range(first, epochs.stop):
            model.reset_metrics()
            self._feed.begin(epoch)
            callbacks.on_epoch_begin(epoch)
            averages.begin()
            logs = self._results_or(self._pass(epoch))
            averages.take_those_of_rank_0()
            if validation is not None and model._should_eval(epoch, validation_freq):
                how = {"callbacks": callbacks, "verbose": 0, "return_dict": True}
                results = model.evaluate(validation.dataset, **how)
                logs.update({f"val_{name}": value for name, value in results.items()})
            self._makes.begin_epoch(epoch + 1, self._passes.batches)
            self._feed.end()
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
            if self._looks is not None and epoch + 1 < epochs.stop:
                self._looks.after_epoch(epoch + 1)
        if self._looks is not None and epochs.stop > 0:
            self._looks.after_epoch(epochs.stop, is_last=True)
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs.stop > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=logs)

    def _pass_by(self, epochs: range, validation: Feed | None, validation_freq: Any) -> None:
        """Have the data of epochs that this newcomer has missed begun and ended as others have."""
        self._feed.pass_by(len(epochs))
        if validation is not None:
            freq = self._model._should_eval
            validation.pass_by(sum(freq(epoch, validation_freq) for epoch in epochs))

    def _prepared(self) -> MakesSteps:
        """What was given, or the model's traced steps; anew where it was compiled since."""
        model, feed = self._model, self._feed
        if self._given is not None:
            return self._given
        steps = model.train_function
        ranks = None if self._exchanges else self._who.data.size if feed.is_counted else 0
        how = ranks, feed.may_be_empty
        if not (isinstance(steps, Steps) and steps.are_for(*how)):
            if self._is_prepared and self._who.everyone.size > 1:
                build(model, feed.spec)  # Compiled by a callback, it has other metrics.
            steps = model.train_function = Steps(model, *how)
        self._is_prepared = True
        return steps

    def _agree_who_looks(self) -> list[str]:
        """The callbacks of any rank that look at single batches. Collective: one exchange.

        In it ranks tell each other too who wants to stop before the first step, and what their
        random generators begin with, which then differ.
        MismatchError if ranks have other numbers of batches, and do not tell each other in steps.
        """
        every, model = all_of(self._callbacks.callbacks), self._model
        looking, begins = that_look(every), that_begin_epochs(every)
        ring = self._who.everyone
        divides_alone = ring is self._who.data  # Elsewhere some ranks draw the same numbers.
        if ring.size > 1:
            batches = None if self._exchanges else self._passes.steps or self._passes.batches
            states = seeds.states_of(model) if divides_alone else []
            growing = self._growing
            reason = "" if growing is None else growing.reason
            own = batches, looking, begins, model.stop_training, seeds.seeds_of(states), reason
            told = list(zip(*ring.all_gather_object(own), strict=True))
            self._require_equal(told[0])
            looking, begins = list(dict.fromkeys(itertools.chain(*told[1]))), any(told[2])
            model.stop_training = any(told[3])
            seeds.make_unlike(states, told[4], ring.rank)
            if growing is not None:
                growing.hear(told[5])
        self._begins = begins and not looking
        for callback in every:
            if hasattr(callback, "meets_after_calls"):
                callback.meets_after_calls = bool(looking)
                callback.meets_before_epochs = self._begins
            if isinstance(callback, Together):
                callback.has_own_seeds = divides_alone
        return looking

    def _require_equal(self, batches: Sequence[int | None]) -> None:
        """Raise unless all ranks have as many in an epoch."""
        ring = self._who.everyone
        for rank, count in zip(ring.members, batches, strict=True):
            if count != batches[0]:
                raise MismatchError(
                    f"found {count or 'an unknown number of'} batches in an epoch of rank {rank}, "
                    f"and {batches[0] or 'an unknown number'} in that of rank {ring.members[0]}",
                    **ring.config.who,
                    peer=rank,
                    operation="comparison of data",
                    remedy="Give every rank the same data. Where each has its own, pass "
                    "per_rank_data=True.",
                )

    def _pass(self, epoch: int) -> Any:
        """Make the steps of an epoch; return the logs of the last that was made."""
        model, callbacks, passes = self._model, self._callbacks, self._passes
        passes.begin()
        self._makes.begin_epoch(epoch, passes.steps or passes.batches)
        # Callbacks that look at no batch may have wanted to before the epoch: on all ranks then.
        # What one has set since, such as a handler of signals, counts when ranks agree again.
        # When a newcomer begins an epoch the others may be in it, and agree after it.
        begins_alone = isinstance(self._growing, Newcomer) and self._is_beginning
        begins_alone &= not self._begins or self._progress.unread > 0
        is_agreed = self._is_beginning or self._begins or self._who.everyone.size == 1
        is_agreed &= not begins_alone
        is_stopping, self._is_beginning = model.stop_training and is_agreed, False
        self._progress.has_earlier_steps = False
        if self._progress.unread and not self._skip(epoch):
            return self._logs
        while most := passes.most(1 if is_stopping else self._suitable()):
            first = passes.place
            callbacks.on_train_batch_begin(first)
            done, logs = self._call(passes.iterator, most)
            if not done:
                passes.end(warns=True)
                break
            self._logs = logs
            callbacks.on_train_batch_end(passes.pass_by(done), logs)
            if self._looks is not None:
                self._looks.after_steps(epoch, passes.place - first, passes.place)
            if model.stop_training and (
                is_stopping or self._is_watched or self._who.everyone.size == 1
            ):
                break
        else:
            passes.finish()
        return self._logs

    def _results_or(self, logs: Any) -> Any:
        """The results of the metrics, unless a step of one's own logs under other names."""
        # What a call has computed, where no callback can have changed metrics since.
        is_known = self._makes.logs_are_results and not self._is_watched
        results = logs if is_known else self._model.get_metrics_result()
        if self._who.data.size > 1:
            self._progress.ended = metric_states.states_of(self._model, 1, results=results)
        return dict(results if isinstance(logs, dict) and logs.keys() == results.keys() else logs)

    def _tried(self, iterator: Any) -> Any:
        """Have the step tried; what the first step reads from."""
        trial, self._trial = self._trial, None
        assert trial is not None
        try:
            if trial.needs_rows:
                iterator = _ReadAhead(iterator)
        finally:
            # Also if this rank has no data: others wait for it.
            if trial.run(is_first=True):
                self._model.train_function = None
        return iterator

    def _suitable(self) -> int:
        """How many steps the next call should make at most."""
        singly = self._is_first or self._is_watched or self._asks_each
        if singly or self._model.run_eagerly or is_deterministic():
            return 1
        return sys.maxsize if self._looks is None else self._looks.left

    def _limit_s(self, most: int) -> float | None:
        """For how long a call may begin steps; None: `Steps.run` makes `most` one by one."""
        # In a deterministic TensorFlow a graph may not look at a clock.
        if is_deterministic() or (self._is_watched and most == 1):
            return None
        # An execution of several steps counts as a whole.
        return _CALL_S if self._passes.at_once == 1 else math.inf

    def _call(self, iterator: Any, most: int) -> tuple[int, Any]:
        """Make up to `most` steps; return how many, and the logs of the last."""
        self._makes, progress = self._prepared(), self._progress
        try:
            if self._trial is None:
                limits = most, self._limit_s(most)
            else:
                iterator, limits = self._tried(iterator), (1, None)
                self._makes = self._prepared()
            began = time.perf_counter()
            done, logs, reading_s = self._makes.run(iterator, *limits)
        except (StopIteration, tf.errors.OutOfRangeError):
            return 0, None  # As the exchange of weights says that no rank has any data.
        progress.called_s += time.perf_counter() - began
        progress.reading_s += reading_s
        self._is_first = False
        return done, logs

    def _skip(self, epoch: int) -> bool:
        """Read the batches whose steps a backup has; False: there are no more.

        Callbacks have heard of them before it.
        """
        progress, passes, metrics = self._progress, self._passes, self._progress.metrics
        self._logs, progress.has_earlier_steps = {}, metrics is not None
        if metrics is not None:
            build(
                self._model, self._feed.spec
            )  # Metrics, which one process makes in its first step.
            variables = metric_states.states_of(self._model, batches=1).variables
            if [np.shape(value) for value in metrics] == [tuple(v.shape) for v in variables]:
                for variable, value in zip(variables, metrics, strict=True):
                    variable.assign(value)
            self._logs = self._model.get_metrics_result()  # If no step is left.
        while progress.unread > 0 and (most := passes.most(progress.unread)):
            first, done = passes.place, 0
            with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                while done < most:
                    next(passes.iterator)
                    done += 1
            if not done:
                passes.end(warns=False)
                self._end_skipping(epoch)
                return False
            self._makes.skip(done)
            passes.pass_by(done)
            progress.unread -= passes.place - first
        self._end_skipping(epoch)
        return True

    def _warn_of_data_begun_anew(self, epoch: int) -> None:
        if self._who.is_first:
            warn_at_users_line(
                f"training goes on with epoch {epoch + 1} from a backup, and its data begin anew: "
                "epochs of steps_per_epoch go on where the one before has ended, which a backup "
                "does not have of a tf.data pipeline or a generator. Some samples are used sooner "
                "than without the stop, others later. Arrays and PyDatasets go on.",
                DataWarning,
            )

    def _end_skipping(self, epoch: int) -> None:
        """Warn on rank 0 if an epoch had fewer batches than a backup has steps of it."""
        progress, read = self._progress, self._passes.place
        if progress.unread > 0 and self._who.is_first and not self._model.stop_training:
            warn_at_users_line(
                f"training goes on from a backup after step {read + progress.unread} of epoch "
                f"{epoch + 1}, of which the data have only {read} batches now: that epoch makes no "
                "step, and the next begins. If they should be as they were, stop, and start the "
                "job with the same data, batch_size and steps_per_epoch.",
                DataWarning,
            )
        progress.unread, progress.metrics = 0, None


class _ReadAhead:
    """The next element of `iterator`, which has been read."""

    def __init__(self, iterator: Any) -> None:
        self.element_spec = iterator.element_spec
        self._element = next(iterator)

    def __next__(self) -> Any:
        return self._element


class _Passes:
    """Where an epoch reads, as in Keras's `fit`: one of `steps` goes on where the last one ended.

    With `at_once` above 1 calls count as that many steps, though the last may make fewer. Where the
    feed can, one iterator makes all passes: making one takes as long as many steps. It begins a
    pass when the first batch of it is asked for, and no earlier (hence `inject_prefetch` is off):
    a pass may depend on the epoch, which the feed is told before.
    """

    def __init__(self, feed: Feed, steps: int | None, at_once: int) -> None:
        self._dataset, self.steps, self.at_once = feed.dataset, steps, at_once
        self._repeated = _repeated(self._dataset) if feed.can_repeat else None
        self._source = feed.source
        count = int(self._dataset.cardinality())
        self.batches = count if count >= 0 else None
        self.iterator: Any = None
        self.place = self._seen = 0  # in the epoch; of the iterator

    def begin(self) -> None:
        """Begin an epoch."""
        count = int(self._dataset.cardinality())  # Arrays may have fewer in some epochs.
        self.batches = count if count >= 0 else None
        if self.iterator is None:
            self.iterator = iter(self._dataset if self._repeated is None else self._repeated)
        self.place = 0

    def take_seeds(self, epochs: int) -> None:
        """Take those of that many epochs, which a backup has: a shuffle goes on where it was."""
        if self._source is not None and self.steps is None:
            # One to read from, and where the end is known the one of `finish`.
            for _ in range(epochs * (1 if self.batches is None else 2)):
                iter(self._source)

    def most(self, suitable: int) -> int:
        """How many steps the next call may make, at most `suitable`; 0: the epoch has ended."""
        limit = self.steps or self.batches
        if limit is not None and self.place >= limit:
            return 0
        if self.batches is not None and self._seen >= self.batches:
            if self.steps:
                _warn_of_end()
            return 0
        is_whole = self.at_once > 1  # An execution, which ends early with the data alone.
        left = [self.at_once if is_whole else suitable]
        if limit is not None and not is_whole:
            left.append(limit - self.place)
        if self.batches is not None and not (is_whole and self._repeated is None):
            left.append(self.batches - self._seen)
        return min(left)

    def pass_by(self, done: int) -> int:
        """Note so many steps; return the number of the last."""
        counted = self.at_once if self.at_once > 1 else done
        self.place, self._seen = self.place + counted, self._seen + counted
        return self.place - 1

    @property
    def remedy(self) -> str:
        """The remedy of an error that unequal lengths of data may have caused."""
        how = "ended" if self.iterator is None else "had not ended"
        return (
            f"This rank's data, whose length TensorFlow does not know, {how} after {self.place} "
            "batches of the epoch: if other ranks have more or fewer, give all the same data, or "
            "pass per_rank_data=True where each has its own."
        )

    def end(self, *, warns: bool) -> None:
        """Note that there was no further element; with `warns` say so as Keras does."""
        if warns and (self.steps or private.WARNS_OF_ANY_END):
            _warn_of_end()
        self.iterator, self._seen = None, 0

    def finish(self) -> None:
        """End an epoch; where a pass has ended, the next begins another."""
        if self.batches is None or self._seen < self.batches:
            return
        self._seen = 0
        if self._repeated is None:
            self.iterator = None
        if self._source is not None:
            # Keras makes one more iterator, and goes on with it where an epoch has `steps`.
            after = iter(self._source if self.steps is None else self._dataset)
            self.iterator = self.iterator if self.steps is None else after


def _repeated(dataset: tf.data.Dataset) -> Any:
    """`dataset` without an end, which begins a pass when its first element is asked for."""
    lazy = tf.data.Options()
    lazy.experimental_optimization.inject_prefetch = False
    return dataset.repeat().with_options(lazy)


def _warn_of_end() -> None:
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset or "
        "generator can generate at least `steps_per_epoch * epochs` batches. You may need to use "
        "the `.repeat()` function when building your dataset.",
        stacklevel=2,
    )


def _limited(epochs: int, steps: int | None) -> tuple[int, int | None]:
    """Limit both as Keras is told for a trial run, as by ``keras.config.set_max_epochs``."""
    most_epochs, most_steps = keras.config.max_epochs(), keras.config.max_steps_per_epoch()
    if most_epochs and most_epochs < epochs:
        warnings.warn(f"Limiting epochs to {most_epochs}", stacklevel=2)
        epochs = most_epochs
    if most_steps and (not steps or most_steps < steps):
        warnings.warn(f"Limiting steps_per_epoch to {most_steps}", stacklevel=2)
        steps = most_steps
    return epochs, steps
