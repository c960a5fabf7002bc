"""`ReportCheckpoint`: epochs reported to Ray Train, and continued from after a failure."""

import contextlib
import os
import tempfile
import weakref
from typing import Any

import keras
import ray.train

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private
from ringreduce.keras.optimizers_in import build_optimizer_here
from ringreduce.vocabulary.errors import ConfigError

FILE = "model.keras"
_EPOCHS = "epochs"
# Rings whose ranks have reported: their latest checkpoint is no longer that of another attempt.
_reported: weakref.WeakSet[Communicator] = weakref.WeakSet()


class ReportCheckpoint(keras.callbacks.Callback):
    """Reports each epoch's metrics to Ray Train, with a checkpoint that training continues from.

    When Ray has started the workers again, weights, optimizer and the number of the epoch are
    those of the last checkpoint, and training goes on after it: with `rr.fit` it ends with the
    weights of an undisturbed run, as with its `backup_dir`. A checkpoint is the file
    ``model.keras``, which rank 0 writes; `keras.models.load_model` loads it.

    For one ``fit`` of a training function, within `rr.fit` or `rr.callbacks.Together`, on all
    ranks.

    Args:
        every: epochs from one checkpoint to the next; metrics are reported after each epoch.

    Raises:
        ConfigError: when training begins, the model is not built, or another ``fit`` of this
            training function has reported; for two, call `ray.train.report` yourself.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        if every < 1:
            raise ConfigError(f"every is {every!r}; accepted: 1 or more")
        self._every = every

    def on_train_begin(self, logs: Any = None) -> None:
        """Continue from the checkpoint of an earlier attempt, if there is one."""
        ring = default_communicator()
        if ring in _reported:
            raise ConfigError(
                "ReportCheckpoint was used in an earlier fit of this training function, and after "
                "a failure nothing says which of them to continue",
                **ring.config.who,
                remedy="Use it in one of them, and call ray.train.report in the other.",
            )
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return
        if not self.model.built:
            text = "cannot continue from a checkpoint: the model is not built"
            remedy = "Build it before fit, with model.build() or a keras.Input."
            raise ConfigError(text, **ring.config.who, remedy=remedy)
        build_optimizer_here(self.model)
        with checkpoint.as_directory() as folder:
            self.model.load_weights(os.path.join(folder, FILE))
        private.set_initial_epoch(self.model, int(checkpoint.get_metadata()[_EPOCHS]))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report; all ranks wait until rank 0 has saved."""
        ring = default_communicator()
        _reported.add(ring)
        with contextlib.ExitStack() as stack:
            checkpoint = None
            if ring.rank == 0 and (epoch + 1) % self._every == 0:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                self.model.save(os.path.join(folder, FILE))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
                checkpoint.set_metadata({_EPOCHS: epoch + 1})
            ray.train.report(dict(logs or {}), checkpoint=checkpoint)
