"""The user's callbacks, kept in step on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.callbacks.broadcast import broadcast_state
from ringreduce.keras.callbacks.forwarding import Forwarding, OnRankZero, checked
from ringreduce.keras.callbacks.learning_rate import agree_on_learning_rate
from ringreduce.keras.callbacks.metric_average import MetricAverage
from ringreduce.keras.callbacks.stopping import StopTogether
from ringreduce.keras.seeds import fold_seeds
from ringreduce.keras.wrappable import build_optimizer_here, warn_of_plain_optimizer
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp

__all__ = ["Together"]

# Orbax is optional in Keras.
_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger")
) + tuple(filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]))


class Together(Forwarding):
    """Runs callbacks so that all ranks act alike; the recommended way to use any of them.

    model.fit(data, callbacks=[rr.callbacks.Together([
        keras.callbacks.EarlyStopping(patience=3),
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
    ])])

    Around the callbacks, which are called in the order given:

    - Before them the logs of an epoch become those of all ranks (`MetricAverage`), so that
      EarlyStopping, ReduceLROnPlateau and History see the same numbers everywhere.
    - After every batch and epoch, training stops on all ranks when any wants to
      (`StopTogether`): TerminateOnNaN, which sees only its own rank's loss, ends them all.
    - Random generators of the model that are in the same state on several ranks get other
      seeds before each epoch (`fold_seeds`), so that dropout differs between ranks.
    - After every epoch the learning rate is rank 0's everywhere, where it is a variable.
    - ModelCheckpoint, BackupAndRestore, OrbaxCheckpoint, TensorBoard and CSVLogger act on rank 0
      only; wrap others that write in `OnRankZero`.
    - What BackupAndRestore (or a callback in `OnRankZero`) finds when training begins goes to
      all ranks: weights, optimizer variables and the epoch to begin with. The file need be on
      rank 0 only. The model must be built before.

    An error that a callback raises on one rank ends training there as usual; the others' next
    step then fails and says that this rank has left. Callbacks that are given to `fit` beside
    this one see averaged logs if they come after it.

    Args:
        callbacks: one, or a list; the same on all ranks, except for those that act on rank 0
            only, which other ranks may leave out.
        communicator: whose ranks; the process's default by default.

    Raises:
        ConfigError: something in `callbacks` is no Keras callback; when training begins, there
            is a BackupAndRestore and the model is not built on every rank.
        MismatchError: as `MetricAverage`.
    """

    def __init__(self, callbacks: Any, communicator: Communicator | None = None) -> None:
        super().__init__()
        self._communicator = communicator
        self.callbacks = [checked(callback) for callback in keras.tree.flatten(callbacks)]
        self._members = [
            MetricAverage(communicator),
            *(
                OnRankZero(c, communicator) if isinstance(c, _WRITERS) else c
                for c in self.callbacks
            ),
            StopTogether(communicator),
        ]

    def members(self) -> Sequence[Any]:
        """The callbacks that act on this rank, in order."""
        return self._members

    def on_train_begin(self, logs: Any = None) -> None:
        """Let the callbacks begin, then give all ranks what they have found on rank 0."""
        ring = self._communicator or default_communicator()
        warn_of_plain_optimizer(self.model, "rr.callbacks.Together", ring)
        restores = self._all_are_ready_to_restore(ring)
        if restores:
            # Else BackupAndRestore does it, on rank 0 alone, where all would be needed.
            build_optimizer_here(self.model)
        super().on_train_begin(logs)
        if restores:
            epoch = self.model._initial_epoch
            found = np.array([-1 if epoch is None else epoch], np.int64)
            ring.broadcast(found)
            self.model._initial_epoch = None if found[0] < 0 else int(found[0])
            broadcast_state(self.model, 0, ring)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See to it that ranks draw other random numbers, then call the callbacks."""
        # Here, since a restored checkpoint has made them alike again, and some layers make their
        # generators in the first epoch only.
        fold_seeds(self.model, self._communicator)
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks, then give all ranks rank 0's learning rate."""
        super().on_epoch_end(epoch, logs)
        agree_on_learning_rate(self.model, self._communicator or default_communicator())

    def _all_are_ready_to_restore(self, ring: Communicator) -> bool:
        """Whether rank 0 has something that may restore, and all have where to put it."""
        if ring.size == 1:
            return False
        backs_up = any(isinstance(c, keras.callbacks.BackupAndRestore) for c in self.callbacks)
        may_restore = backs_up or any(isinstance(c, OnRankZero) for c in self.callbacks)
        # Rank 0 says what is done: others may have left out what acts on rank 0 only.
        own = [bool(self.model.built)] + [ring.rank == 0 and x for x in (backs_up, may_restore)]
        built, backs_up, may_restore = ring.all_reduce(np.array(own, np.int64), ReduceOp.SUM)
        if backs_up and built < ring.size:
            raise ConfigError(
                f"cannot restore: the model is built on {built} ranks only",
                rank=ring.rank,
                size=ring.size,
                remedy="With BackupAndRestore, build the model before fit, with model.build() or "
                "a keras.Input.",
            )
        return bool(may_restore and built == ring.size)
