"""Backs up for `BackupAndRestore`, in the middle of an epoch too, and goes on from there.

Keras's callback writes weights, then the number of the epoch into a second file. As two files are
not replaced at once, the place (epoch, and how many of its steps have been made) stands with the
weights too, and counts there. A training that begins again reads those steps and makes none.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.keras import private
from ringreduce.keras.strategies import StrategyState


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
        self._epoch, self._before = epoch, self._count()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the same; steps before it may have been skipped."""
        self._before = self._count() - batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.on_epoch_begin(epoch + 1)


def back_up(callbacks: Iterable[Any], model: Any, epoch: int, steps: int) -> str:
    """Save what `callbacks` restore, after that many steps of `epoch`; return what to do then."""
    said = "Nothing was backed up: pass backup_dir to rr.fit for that."
    for one in backups(callbacks):
        save(one, model, epoch, steps)
        said = f"Start the job again: it goes on from this step, with {one.backup_dir}."
    return said


def save(one: Any, model: Any, epoch: int, steps: int = 0) -> None:
    """Replace what `one` restores; at any moment a whole backup is there."""
    weights, place = private.files_of_backup(one)
    tf.io.gfile.makedirs(one.backup_dir)
    for each in (weights, place) if one.double_checkpoint else ():
        if tf.io.gfile.exists(each):
            tf.io.gfile.copy(each, f"{each}.bkp", overwrite=True)
    new = f"{one.backup_dir}/new.weights.h5"
    said = {"place": np.array([epoch, steps])}
    with _beside(model, StrategyState(lambda: said, said.update)):
        model.save_weights(new, overwrite=True)
    tf.io.gfile.rename(new, weights, overwrite=True)
    with tf.io.gfile.GFile(f"{place}.new", "w") as file:
        file.write(json.dumps({"epoch": epoch, "batch": 0}))
    tf.io.gfile.rename(f"{place}.new", place, overwrite=True)


def restored(callbacks: Iterable[Any], model: Any, restore: Callable[[], None]) -> Any:
    """Call `restore`; then the epoch that training goes on with, and how many steps it has made."""
    found: dict[str, Any] = {}
    with _beside(model, StrategyState(dict, found.update)):
        restore()
    for one in backups(callbacks):
        if found:
            return map(int, found["place"])
        has_weights, has_place = map(tf.io.gfile.exists, private.files_of_backup(one))
        if has_place and not has_weights:
            return None, 0  # Keras goes by what is left of a backup that was being deleted.
    return private.initial_epoch_of(model), 0


@contextlib.contextmanager
def _beside(model: Any, state: StrategyState) -> Iterator[None]:
    """Have Keras save `state` with the weights of `model`, or load it."""
    vars(model)["_ringreduce_place"] = state
    try:
        yield
    finally:
        del vars(model)["_ringreduce_place"]


def skip(model: Any, steps: int) -> None:
    """Have `model` read so many steps and not make them; called when training has begun."""
    if hasattr(model.train_function, "unread"):
        model.train_function.unread = steps
        return
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


def backups(callbacks: Iterable[Any]) -> list[Any]:
    """Those of `callbacks` that back up."""
    plain = [getattr(one, "callback", one) for one in callbacks]
    return [one for one in plain if isinstance(one, keras.callbacks.BackupAndRestore)]
