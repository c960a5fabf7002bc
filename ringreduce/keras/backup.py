"""Backs up in the middle of an epoch, for `BackupAndRestore`, and goes on from there.

Keras's callback keeps the number of the epoch with the weights; beside it stands how many steps of
that epoch have been made. When training begins again these are read and not made.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from ringreduce.keras import private


class Place(keras.callbacks.Callback):
    """Knows where training is; `count` says how many steps have been made."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self._count, self._epoch, self._before = count, 0, 0

    @property
    def now(self) -> tuple[int, int]:
        """The epoch that training goes on with, and the number of its steps that have been made."""
        steps = self._count() - self._before
        return (self._epoch + 1, 0) if steps == self.params["steps"] else (self._epoch, steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where it begins."""
        self._epoch, self._before = epoch, self._count()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the same; steps before it may have been skipped."""
        self._before = self._count() - batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Go on with the next one."""
        self.on_epoch_begin(epoch + 1)


def back_up(callbacks: Iterable[Any], model: Any, epoch: int, steps: int) -> str:
    """Save what `callbacks` restore, after that many steps of `epoch`; return what to do then."""
    said = "Nothing was backed up: pass backup_dir to rr.fit for that."
    for one in _backups(callbacks):
        weights, place = private.files_of_backup(one)
        tf.io.gfile.makedirs(one.backup_dir)
        model.save_weights(weights, overwrite=True)
        with tf.io.gfile.GFile(place, "w") as file:
            file.write(json.dumps({"epoch": epoch, "batch": 0, "steps": steps}))
        said = f"Start the job again: it goes on from this step, with {one.backup_dir}."
    return said


def steps_made(callbacks: Iterable[Any]) -> int:
    """How many steps had been made of the epoch that one of `callbacks` has gone back to."""
    for one in _backups(callbacks):
        _, place = private.files_of_backup(one)
        if tf.io.gfile.exists(place):
            with tf.io.gfile.GFile(place) as file:
                return int(json.loads(file.read()).get("steps", 0))
    return 0


def skip(model: Any, steps: int) -> None:
    """Have `model` read so many steps and not make them; called when training has begun."""
    run, left, unread = model.train_function, steps // model.steps_per_execution, steps

    def skipping(iterator: Any) -> Any:
        nonlocal left, unread
        for _ in range(unread):
            next(iterator)
        unread = 0
        if not left:
            model.train_function = run
            return run(iterator)
        left -= 1
        return {}

    model.train_function = skipping


def _backups(callbacks: Iterable[Any]) -> list[Any]:
    plain = [getattr(one, "callback", one) for one in callbacks]
    return [one for one in plain if isinstance(one, keras.callbacks.BackupAndRestore)]
