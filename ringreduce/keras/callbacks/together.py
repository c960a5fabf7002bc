"""Runs callbacks so that all ranks act alike, and on rank 0 alone those that write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private
from ringreduce.keras.callbacks.metric_average import MetricAverage
from ringreduce.keras.callbacks.one_sided import OneSided
from ringreduce.keras.callbacks.profile import Profile
from ringreduce.keras.callbacks.rank_zero import (
    WRITERS,
    Forwarding,
    OnRankZero,
    acts_once,
    checked,
    drop_rows,
    every_rank,
)
from ringreduce.keras.callbacks.replicas import broadcast_state, shared_state, verify_model
from ringreduce.keras.checks.models import (
    refuse_other_ring,
    refuse_plain_since,
    warn_of_plain_optimizer,
)
from ringreduce.keras.checks.seeds import fold_seeds
from ringreduce.keras.checks.warnings import warn_of_other_steps
from ringreduce.keras.elastic.backup import backups, restored, save, skip
from ringreduce.keras.elastic.fields import Fields, plain_fields
from ringreduce.keras.model.averages import untrained
from ringreduce.keras.model.trial_in_fit import try_in_fit
from ringreduce.keras.optimizers_in import build_optimizer_here, is_settled, settle, wrappers_in
from ringreduce.keras.progress import note_fields, progress_of
from ringreduce.keras.repeating import repeated
from ringreduce.tensorflow.held import Held
from ringreduce.vocabulary.config import profile_wanted
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp

_log = logging.getLogger(__name__)

# Hooks in which callbacks see what a step has led to, and may change it.
_ENDS = ("on_train_batch_end", "on_epoch_end", "on_test_begin")


class StopTogether(keras.callbacks.Callback):
    """Stops training on all ranks after the same batch, when any rank wants to stop.

    Without it a rank that sets ``model.stop_training`` leaves alone, and the others' next step
    fails. Put it after the callbacks that may stop training (EarlyStopping, TerminateOnNaN).
    `Together` does that itself.

    Collective, after every batch (with ``steps_per_execution`` as often as Keras reports one) and
    epoch: 16 bytes each, tens of microseconds within a host. Where ranks step alone (`LocalSGD`) it
    asks after their meetings alone; in `rr.fit`, if no callback looks at batches, after epochs, and
    before them if one of the user's has something to do there.
    """

    looks_at_batches = False
    # Set by `rr.fit`: whether all ranks make the same calls, and whether some may want to stop when
    # an epoch begins.
    meets_after_calls, meets_before_epochs = True, False

    def __init__(
        self, communicator: Communicator | None = None, *, meets_after_epochs: bool = True
    ) -> None:
        super().__init__()
        self._communicator = self._ring = communicator
        self._meets_after_epochs = meets_after_epochs
        self._wants = False
        # What callbacks before this one have changed is told in the exchange after a batch.
        self.one_sided: OneSided | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._ring = every_rank(self)
        if self.meets_before_epochs:
            self._agree()

    def on_train_begin(self, logs: Any = None) -> None:
        self.meets_after_calls, self.meets_before_epochs = True, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.meets_after_calls:
            return
        if getattr(self.model.optimizer, "has_met", True):
            self._agree(self.one_sided)
        elif self.model.stop_training:
            self._wants, self.model.stop_training = True, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._meets_after_epochs:
            self._agree()
        elif self._wants:
            self._wants, self.model.stop_training = False, True

    def _agree(self, one_sided: OneSided | None = None) -> None:
        ring = self._ring or default_communicator()
        if ring.size > 1:
            has_changed = one_sided is not None and one_sided.has_changed()
            own = np.array([bool(self.model.stop_training or self._wants), has_changed], np.int64)
            wants, have_changed = repeated(
                ring, lambda: ring.all_reduce(own.copy(), ReduceOp.MAX).tolist()
            )
            self._wants = False
            if wants:
                self.model.stop_training = True
            if one_sided is not None:
                one_sided.hear(has_changed=bool(have_changed))


class Together(Forwarding):
    """The recommended way to use any callbacks: it runs them so that all ranks act alike.

    It calls them in the order given, and does what the list below says::

        model.fit(data, callbacks=[rr.callbacks.Together([
            keras.callbacks.EarlyStopping(patience=3),
            keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        ])])

    - Before them the logs of an epoch become those of all ranks (`MetricAverage`), so that
      EarlyStopping, ReduceLROnPlateau and History see the same numbers everywhere.
    - After every batch and epoch, training stops on all ranks when any wants to (`StopTogether`),
      as with TerminateOnNaN, which sees only its own rank's loss.
    - Before each epoch random generators of the model that are in the same state on several ranks
      get other seeds (`fold_seeds`), so that dropout differs between ranks.
    - At the end of an epoch and before validation ranks that step alone (`LocalSGD`) meet.
    - After every epoch the learning rate is rank 0's everywhere, where it is a variable.
    - At the end of training the weights are compared, if a `DistributedOptimizer` has trained them
      (`VerifyReplicas`). Where a step would make one model of two (``shard_state=True``, strategies
      whose ranks step alone, elastic `rr.fit`) also before it, if a callback has changed some.
    - When training begins the step is tried on a few rows, as by `rr.fit`, if `fit` got arrays.
      ``check=False`` leaves that out, and the comparison of weights.
    - `Profile`, if there is one, comes before all others. ``ringreduce run --profile`` adds one,
      unless `communicator` is a group; `profile` does too.
    - ModelCheckpoint, BackupAndRestore, OrbaxCheckpoint, TensorBoard and CSVLogger act on rank 0
      only, and so do the callbacks of W&B, MLflow, Neptune, Comet, ClearML, Aim, DVCLive and the
      like; other ranks may leave them out, but in elastic `rr.fit`, where the next rank takes them
      over. Wrap others that write in `OnRankZero`.
    - What BackupAndRestore (or a callback in `OnRankZero`) restores when training begins goes to
      all ranks: weights, optimizer variables and the initial epoch. Only rank 0 needs the file. The
      model must be built before. A backup comes after all other callbacks, and has what these know
      too: their attributes that training has changed and that are numbers, texts, arrays, or lists
      and dicts of them, and the `History` of epochs before.
    - Where Keras's own callbacks have come to other values on some rank, all raise an error.

    An error that a callback raises on one rank ends training there as usual; the others' next step
    then fails and says that this rank has left. Callbacks that are given to `fit` after this one
    see averaged logs.

    Raises:
        ConfigError: something in `callbacks` is no Keras callback; when training begins, there is a
            BackupAndRestore and the model is not built on every rank; before a step, one of them
            has replaced a `DistributedOptimizer` by a plain one, as ``compile`` does.
        MismatchError: as `MetricAverage`; at the end of an epoch Keras's own callbacks have other
            values on some rank; at the end, or before a step that would hide it, ranks have
            different weights, learning rates, or states changed on some ranks only.
    """

    def __init__(
        self,
        callbacks: Any,
        communicator: Communicator | None = None,
        *,
        profile: bool = False,
        validate: Callable[[], dict[str, Any]] | None = None,
        is_global: bool = False,
        check: bool = True,
        compares: bool | None = None,
        may_restore: bool | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        # is_last: no other callbacks, but ours, come after these.
        self._is_last = is_last
        # may_restore: of rank 0, whose model is built on all ranks; None: they are asked.
        self._may_restore = may_restore
        self._communicator, self._check, self._has_trained = communicator, check, False
        # The model's, when a hook had last ended; which hook of which callback has changed it.
        self._optimizer: Any = None
        self._changed_in = ""
        self._is_distributed = False
        # compares: what callbacks change between steps too; by default with `check`.
        self._compares = check if compares is None else compares
        self._one_sided: OneSided | None = None
        self.callbacks = [checked(callback) for callback in keras.tree.flatten(callbacks)]
        for backup in backups(self.callbacks):
            private.save_backups_by(backup, self._save, self._goes_on_after)
        profiles = [c for c in self.callbacks if isinstance(c, Profile)]
        is_group = communicator is not None and communicator.parent is not None
        if not profiles and (profile or (profile_wanted() and not is_group)):
            profiles = [Profile(communicator)]
        others = [c for c in self.callbacks if not isinstance(c, Profile)]
        # Last, so that a backup has what the others know when an epoch has ended.
        others.sort(key=lambda callback: bool(backups([callback])))
        self.members = [
            # First, so that it measures none of what the others do at the end of an epoch.
            *profiles,
            averaging := MetricAverage(communicator, validate, is_global),
            *(OnRankZero(c, communicator) if acts_once(c) else c for c in others),
            stopping := StopTogether(communicator, meets_after_epochs=False),
        ]
        self._averaging, self._stopping = averaging, stopping
        self._meets_again = False  # before the epochs that follow
        # How many collectives callbacks have called when epochs began; None: nobody asks.
        self.calls_at_begin: int | None = None
        # What callbacks know, from the first epoch on; of a backup, until then.
        self._fields: Fields | None = None
        self._restored = np.empty(0, np.uint8)
        self._epoch, self._made = 0, 0  # of training; steps of it, as callbacks count them
        self._ended: tuple[int, Any] | None = None  # the epoch whose end callbacks see, its logs
        # Whether random generators were made to differ; by `rr.fit`, when training begins.
        self.has_own_seeds = False

    def run(self, hook: str, *arguments: Any, **options: Any) -> None:
        """Call a hook of each, in order; weights are equal where callbacks look at them."""
        if hook == "on_train_batch_end":
            self._has_trained, self._made = True, int(arguments[0]) + 1
        one_sided = self._one_sided
        if hook in ("on_epoch_end", "on_test_begin", "on_train_end"):
            if one_sided is not None and not is_settled(self.model):
                one_sided.compare()
            settle(self.model)
        noting: AbstractContextManager[None] = nullcontext()
        if one_sided is not None and hook in _ENDS:
            noting = one_sided.noting(is_batch=hook == "on_train_batch_end")
        counts = hook == "on_epoch_begin" and self.calls_at_begin is not None
        with noting:
            for member in self.members:
                before = self._calls() if counts else 0
                getattr(member, hook)(*arguments, **options)
                if self.calls_at_begin is not None and counts and member is not self._stopping:
                    self.calls_at_begin += self._calls() - before
                if self._optimizer is not None and self._optimizer is not self.model.optimizer:
                    self._optimizer = self.model.optimizer
                    name = type(getattr(member, "callback", member)).__name__
                    self._changed_in = f"the callback {name}, in {hook},"
        if self._changed_in and hook == "on_train_batch_begin":
            self._look_at_optimizer()
        if one_sided is not None and hook == "on_train_batch_begin":
            one_sided.compare()

    def _calls(self) -> int:
        return (self._communicator or default_communicator()).statistics().collectives

    def _look_at_optimizer(self) -> None:
        """Raise unless the optimizer that the model has got since will average gradients too."""
        ring = self._communicator or default_communicator()
        where, self._changed_in = self._changed_in, ""
        if self._is_distributed:
            refuse_plain_since(self.model, where, ring)
        refuse_other_ring(self.model, where, ring)

    def on_train_begin(self, logs: Any = None) -> None:
        """Call the callbacks, then give all ranks what rank 0 has restored."""
        ring = self._communicator or default_communicator()
        self._one_sided = self._stopping.one_sided = None
        self.has_own_seeds = False
        refuse_other_ring(self.model, "rr.callbacks.Together", ring)
        warn_of_plain_optimizer(self.model, "rr.callbacks.Together", ring)
        self._optimizer, self._changed_in = self.model.optimizer, ""
        self._is_distributed = bool(wrappers_in(self.model))
        every = every_rank(self)
        restores = self._all_are_ready_to_restore(every)
        if restores:
            # Else BackupAndRestore builds it, on rank 0 alone, where all would be needed.
            build_optimizer_here(self.model)
        begin = partial(super().on_train_begin, logs)
        found = restored(self.callbacks, self.model, begin)
        if restores:
            found = found.told(every)
            broadcast_state(self.model, 0, ring)
        epoch, steps, self._restored, _, metrics = found
        self._fields = None
        private.set_initial_epoch(self.model, epoch)
        if steps:
            if every.rank == 0:
                text = "[%d/%d] goes on after step %d of epoch %d, and reads those before again"
                _log.warning(text, *every.config.who.values(), steps, (epoch or 0) + 1)
                if unlike := found.unlike(self.model):
                    warn_of_other_steps(unlike, steps, (epoch or 0) + 1)
            skip(self.model, steps, every, metrics)
        if self._check and ring.size > 1 and self._is_shared(ring):
            try_in_fit(self.model, ring)
        if self._compares and self._is_shared(ring):
            self._one_sided = OneSided(self.model, self.members, ring)
            if self._is_last:
                self._stopping.one_sided = self._one_sided

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Make ranks draw different random numbers, then call the callbacks."""
        self._epoch, self._made, self._ended = epoch, 0, None
        if self._fields is None:
            self._begin_fields()
        if not self.has_own_seeds:
            # Here, since a restored checkpoint makes generators equal again. Some layers create
            # theirs only in the first epoch: they follow when that ends.
            self.has_own_seeds = True
            ring = self._communicator or default_communicator()
            repeated(ring, lambda: fold_seeds(self.model, ring))
        progress = progress_of(self.model)
        goes_on = progress is not None and progress.unread > 0
        begun = Held(self._changed_by_training() if goes_on else [])
        super().on_epoch_begin(epoch, logs)
        self._stopping.meets_before_epochs |= self._meets_again
        self._meets_again = False
        if goes_on and self._fields is not None:
            # The epoch had begun before its backup, which has what has come of that.
            begun.put_back()
            if len(self._restored):
                self._fields.put(self._restored)

    def _changed_by_training(self) -> list[Any]:
        return [*shared_state(self.model, self.model.weights), *untrained(self.model)]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks, then agree on what they have done."""
        self._epoch, self._made = epoch + 1, 0
        fields = self._fields or self._begin_fields()
        self._ended = epoch, {} if logs is None else logs
        super().on_epoch_end(epoch, logs)
        self._ended = None
        self._averaging.meetings.after(self._forwarding(), fields)

    def on_train_end(self, logs: Any = None) -> None:
        """Call the callbacks, then compare what optimizers have kept equal among these ranks."""
        if self._fields is None and len(self._restored):
            self._begin_fields()  # No epoch was left to train.
        super().on_train_end(logs)
        note_fields(self.model, None)
        self._one_sided = self._stopping.one_sided = None
        ring = self._communicator or default_communicator()
        if self._check and self._has_trained and self._is_shared(ring):
            verify_model(self.model, ring)

    def told_to_newcomers(self) -> tuple[np.ndarray, list[bool]]:
        """What callbacks know, packed, and the state of what compares weights; for `join`."""
        fields = self._fields or self._begin_fields()
        one_sided = self._one_sided
        return fields.packed(warns=False), [False, False] if one_sided is None else one_sided.state

    def join(self, packed: np.ndarray, state: Sequence[bool], *, is_within: bool) -> None:
        """Go on, as a newcomer that has all weights, where others are; `is_within` an epoch.

        `packed` counts from the begin of the epoch on, which callbacks hear of next.
        """
        self._restored = packed
        if self._one_sided is not None:
            self._one_sided.join(*state)
        if is_within:  # The others have met when it began.
            meets, self._stopping.meets_before_epochs = self._stopping.meets_before_epochs, False
            self._meets_again = meets

    def _begin_fields(self) -> Fields:
        """Note what callbacks know, now that all have begun; and give them what a backup has."""
        plain = [getattr(callback, "callback", callback) for callback in self.callbacks]
        # Others' recorders go on by means of their own.
        kept = [c for c in plain if isinstance(c, WRITERS) or not acts_once(c)]
        once = [member.callback for member in self._forwarding()]
        self._fields = fields = Fields([c for c in kept if not backups([c])], self.model, once)
        if len(self._restored):
            fields.put(self._restored)
            for member in self._forwarding():
                member.state = plain_fields(member.callback)
                # The job may have been lost between that row and the backup.
                if isinstance(member.callback, keras.callbacks.CSVLogger) and member.is_acting:
                    drop_rows(member.callback, self._epoch)
        note_fields(self.model, fields)
        return fields

    def _forwarding(self) -> list[OnRankZero]:
        return [member for member in self.members if isinstance(member, OnRankZero)]

    def _save(self, backup: Any, model: keras.Model, _: int) -> None:
        """Back up where training is; in the middle of an epoch if our loop can go on there."""
        if self._fields is not None:
            self._fields.ending = self._ended  # Not where ranks are too few before the others act.
        save(backup, model, self._epoch, self._made if progress_of(model) is not None else 0)
        if self._fields is not None:
            self._fields.ending = None

    def _goes_on_after(self, batch: int | None) -> bool:
        """Whether training can go on from there by what the callbacks know.

        Within an epoch our loop can; after the last batch its end is still to come, and has logs.
        """
        if batch is None:
            return progress_of(self.model) is not None
        return progress_of(self.model) is None or batch + 1 != self.params.get("steps")

    def _is_shared(self, ring: Communicator) -> bool:
        """Whether optimizers keep weights equal among the ranks of `ring`."""
        wrappers = wrappers_in(self.model)
        rings = [wrapper.communicator or default_communicator() for wrapper in wrappers]
        return bool(rings) and all(other.members == ring.members for other in rings)

    def _all_are_ready_to_restore(self, ring: Communicator) -> bool:
        """Whether rank 0 may restore something, and the model is built on all ranks."""
        if ring.size == 1:
            return False
        backs_up = any(isinstance(c, keras.callbacks.BackupAndRestore) for c in self.callbacks)
        if backs_up and getattr(self.model.optimizer, "options", {}).get("local_variables"):
            raise ConfigError(
                "would back up rank 0's local variables alone: the other ranks' would begin anew "
                "when the job is started again",
                **ring.config.who,
                remedy="Make them with rr.parts.PartLayer.add_part: all ranks save them.",
            )
        if self._may_restore is not None:
            return self._may_restore
        # Rank 0 decides: others may have left out what acts on rank 0 only.
        asked = backs_up, may_restore(self.callbacks)
        flags = [bool(self.model.built)] + [ring.rank == 0 and x for x in asked]
        built, backs_up, restores = ring.all_reduce(np.array(flags, np.int64), ReduceOp.SUM)
        if backs_up and built < ring.size:
            raise ConfigError(
                f"cannot restore: the model is built on {built} ranks only",
                **ring.config.who,
                remedy="With BackupAndRestore, build the model before fit, with model.build() or "
                "a keras.Input.",
            )
        return bool(restores and built == ring.size)


def may_restore(callbacks: Sequence[Any]) -> bool:
    """Whether one of them may restore something when training begins."""
    kinds = keras.callbacks.BackupAndRestore, OnRankZero
    return any(isinstance(callback, kinds) for callback in callbacks)


def given_callbacks(callbacks: Any, backup_dir: Any = None) -> list[Any]:
    """The user's callbacks, also those already in a `Together`, and the backup."""
    flat: list[Any] = []
    for callback in keras.tree.flatten([] if callbacks is None else callbacks):
        flat += callback.callbacks if isinstance(callback, Together) else [callback]
    if backup_dir is not None:
        flat.append(keras.callbacks.BackupAndRestore(backup_dir))
    return flat
