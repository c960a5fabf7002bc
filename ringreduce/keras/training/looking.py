"""The looks of `rr.fit`: after steps, after epochs, and what a job that stops there backs up.

Of some data and strategies an epoch has no point from which all could go on: these look at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import keras
import numpy as np

from ringreduce.communicator.rank_zero import on_rank_zero
from ringreduce.effects.notice import EndsInOrder, Notice, reason_of
from ringreduce.keras import metric_states
from ringreduce.keras.elastic.backup import back_up
from ringreduce.keras.elastic.leaving import Looks
from ringreduce.keras.optimizers_in import wrappers_in
from ringreduce.keras.repeating import repeated
from ringreduce.keras.training.ranks import Training
from ringreduce.vocabulary.config import leave_code

_MANY = 1 << 62


class Grows(Protocol):
    """What takes newcomers into a training; collective but for `count`."""

    def count(self) -> int:
        """How many could come in now, as this rank knows."""

    def may_grow(self, *, within_epoch: bool) -> bool:
        """Whether they can join where training is, equally on all ranks."""

    def grow(self, epoch: int, steps: int, count: int) -> None:
        """Take them in after that many steps of `epoch`, and `count` of the training."""


class LooksInFit:
    """Those of a training of `model`, which `callbacks` back up, where one of them can.

    `stops_in_epochs`: whether training can go on after any step. In an elastic job `minimum` ranks
    go on without those that leave, after `part` of these.
    """

    def __init__(
        self,
        model: keras.Model,
        who: Training,
        notice: Notice,
        callbacks: Sequence[Any],
        *,
        stops_in_epochs: bool,
        minimum: int | None = None,
        part: Callable[[Mapping[int, str]], None] | None = None,
    ) -> None:
        self._model, self._who, self._callbacks = model, who, callbacks
        self._notice = notice
        self._stops_in_epochs = stops_in_epochs
        # In an elastic job ranks may leave though all could not stop there.
        self._is_in_epochs = stops_in_epochs or minimum is not None
        ways = self._back_up, minimum, part, self._hand_over, self._count_newcomers
        self._looks = Looks(who.everyone, notice, *ways)
        # What takes newcomers in; None: none come.
        self.growing: Grows | None = None
        self._count = 0  # of steps that were made
        self._place = 0, 0  # the epoch with which a backup would go on, and steps of that

    @property
    def left(self) -> int:
        """How many steps the next call may make at most."""
        return self._looks.left(self._count) if self._is_in_epochs else _MANY

    def after_steps(self, epoch: int, made: int, place: int) -> None:
        """Look, if that is due, after `made` more steps; the epoch has had `place`."""
        self._count += made
        if self._is_in_epochs and self._looks.is_due(self._count):
            self._place = epoch, place
            going = self._looks.look(self._count)
            if not going:
                self._grow(within_epoch=True)
                return
            if self._looks.goes_on(going) or (self._stops_in_epochs and self._can_stop()):
                self._looks.act(going, f"after step {place} of epoch {epoch + 1}")
            elif self._stops_in_epochs:
                self._looks.again(self._count)

    def _can_stop(self) -> bool:
        """Whether no gradients wait for later steps, of which a backup has nothing."""
        return not any(wrapper.holds_gradients for wrapper in wrappers_in(self._model))

    def after_epoch(self, epoch: int, *, is_last: bool = False) -> None:
        """Look after an epoch, before that of number `epoch`, where that is needed."""
        grows = self.growing is not None and not is_last
        if is_last or grows or not self._stops_in_epochs:
            self._place = epoch, 0
            if going := self._looks.look(self._count, is_last=True):
                self._looks.act(
                    going, "after the last epoch" if is_last else f"after epoch {epoch}"
                )
            elif grows:
                self._grow(within_epoch=False)

    def _count_newcomers(self) -> int:
        return 0 if self.growing is None else self.growing.count()

    def _grow(self, *, within_epoch: bool) -> None:
        """Take in the newcomers that the look has found, if they can come in here."""
        growing = self.growing
        if growing is None or not self._looks.newcomers:
            return
        if growing.may_grow(within_epoch=within_epoch):
            growing.grow(*self._place, self._count)
            self._looks.join(self._count)

    def require_untold(self) -> None:
        """Raise EndsInOrder if this rank, a newcomer that waits, was told to go."""
        if reason_of(self._notice):
            self._notice.is_met = True
            raise EndsInOrder(leave_code())

    def join(self, count: int) -> None:
        """Look, as a newcomer, when all others do, who have made `count` steps."""
        self._count = count
        self._looks.join(count)

    def _hand_over(self, going: Mapping[int, str]) -> None:
        """Have the first rank that stays count in metrics what all have seen in this epoch."""
        model, ring, steps = self._model, self._who.data, self._place[1]
        if not steps:
            return

        def together() -> list[bytes]:
            return [value.tobytes() for value in metric_states.values_of_all(model, steps, ring)]

        values = repeated(ring, together)
        variables = metric_states.states_of(model, steps).variables
        first = next((rank for rank in ring.members if rank not in going), None)
        if ring.config.rank != first:
            own = [(v, v.numpy()) for v in variables if v.aggregation == "none"]
            model.reset_metrics()
            for variable, kept in own:
                variable.assign(kept)
            return
        for variable, value in zip(variables, values, strict=True):
            like = variable.numpy()
            variable.assign(np.frombuffer(value, like.dtype).reshape(like.shape))

    def _back_up(self) -> str:
        """Back up on rank 0, with what all ranks have; how the job goes on then."""
        who, (epoch, steps) = self._who, self._place

        def together() -> str:
            metrics: list[np.ndarray] = []
            if steps:
                metrics = metric_states.values_of_all(self._model, steps, who.data)
            save = partial(self._backed_up, epoch, steps, metrics)
            return on_rank_zero(save, communicator=who.everyone)

        said: str = repeated(who.everyone, together)
        return said

    def _backed_up(self, epoch: int, steps: int, metrics: list[np.ndarray]) -> str:
        try:
            return back_up(self._callbacks, self._model, epoch, steps, metrics)
        except Exception as error:  # Of the disk, or of a model that cannot be saved.
            return (
                f"It could not be backed up ({type(error).__name__}: {error}): the backup before, "
                "if there is one, stays."
            )
