"""Replaces logs by those of all ranks together, before other callbacks read them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.callbacks.meeting import Ended, EpochMeetings
from ringreduce.keras.metric_states import MetricStates, states_of
from ringreduce.keras.progress import progress_of


class MetricAverage(keras.callbacks.Callback):
    """Makes the logs of an epoch those of all ranks' data, equal on every rank.

    Put it before callbacks that read logs: EarlyStopping, ReduceLROnPlateau, ModelCheckpoint;
    History always comes later. `Together` does that itself.

    The model's metrics, for training and validation, are computed from the sum of the ranks' states
    (total and count, say), as if one process had seen all batches. A rank whose validation data are
    empty gets the others' values. A number that a custom `train_step` logs beside metrics is
    averaged, each rank with equal weight. Other values, and logs of single batches, stay each
    rank's own. Collective, at the end of each epoch: one short exchange for any number of metrics;
    one or two more where ranks log under different names, have no validation data, or have metrics
    of one's own.

    Raises:
        MismatchError: the ranks log under different names, because only some validate or have a
            metric; or have trained with different learning rates. On all ranks.
    """

    looks_at_batches = False

    def __init__(
        self,
        communicator: Communicator | None = None,
        validate: Callable[[], dict[str, Any]] | None = None,
        is_global: bool = False,
    ) -> None:
        super().__init__()
        # As for `EpochMeetings`.
        self._communicator, self._validate = communicator, validate
        self._is_global = is_global
        self._members: Sequence[int] = ()
        self._latest: dict[str, Any] = {}
        self._meetings: EpochMeetings | None = None
        self._forget()

    def _forget(self) -> None:
        self._in_epoch, self._batches = False, 0
        # None until fit validates, and has validated.
        self._training: MetricStates | None = None
        self._validation: MetricStates | None = None

    @property
    def meetings(self) -> EpochMeetings:
        """Those of this training."""
        if self._meetings is None:
            ring, how = self._communicator or default_communicator(), self._validate
            self._meetings = EpochMeetings(
                self.model, ring, is_global=self._is_global, validate=how
            )
        return self._meetings

    # States are copied when they are complete, and travel only at the end of the epoch: another
    # callback may evaluate on one rank alone.

    def on_train_begin(self, logs: Any = None) -> None:
        self._latest, self._meetings = {}, None
        self._forget()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._forget()
        self._in_epoch = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1

    def on_test_begin(self, logs: Any = None) -> None:
        """Copy the training metrics, which Keras resets after this to validate."""
        self._members = (self._communicator or default_communicator()).members
        if self._in_epoch:
            self._training, self._batches = self._of_training(), 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._training is not None:
            self._batches += 1

    def on_test_end(self, logs: Any = None) -> None:
        if self._training is not None:
            self._validation = states_of(self.model, self._batches)

    def _of_training(self) -> MetricStates:
        progress = progress_of(self.model)
        has_earlier = progress is not None and progress.has_earlier_steps
        known = None if progress is None else progress.ended
        return states_of(self.model, self._batches or int(has_earlier), known)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        ring = self._communicator or default_communicator()
        if ring.size == 1:
            self._forget()
            return
        training = self._training or self._of_training()
        validated = None if self._validation is None else self._validation.batches
        ended = Ended(training, self._validation or MetricStates(), validated, self._members)
        self._forget()
        logs = {} if logs is None else logs
        self.meetings.before(logs, ended)
        self._latest = dict(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Replace the values here too: Keras passes those from before the last `on_epoch_end`."""
        if logs is not None:
            logs.update(self._latest)
