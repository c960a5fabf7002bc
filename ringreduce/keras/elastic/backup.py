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

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.optimizer.state import StrategyState
from ringreduce.keras.progress import progress_of
from ringreduce.vocabulary.errors import ConfigError


def back_up(callbacks: Iterable[Any], model: keras.Model, epoch: int, steps: int) -> str:
    """Save what `callbacks` restore, after that many steps of `epoch`; return what to do then."""
    said = "Nothing was backed up: pass backup_dir to rr.fit for that."
    for backup in backups(callbacks):
        save(backup, model, epoch, steps)
        said = f"Start the job again: it goes on from this step, with {backup.backup_dir}."
    return said


def save(backup: Any, model: keras.Model, epoch: int, steps: int = 0) -> None:
    """Replace what `backup` restores; at any moment a whole backup is there."""
    weights, place = private.files_of_backup(backup)
    tf.io.gfile.makedirs(backup.backup_dir)
    for each in (weights, place) if backup.double_checkpoint else ():
        if tf.io.gfile.exists(each):
            tf.io.gfile.copy(each, f"{each}.bkp", overwrite=True)
    new = f"{backup.backup_dir}/new.weights.h5"
    said = {"place": np.array([epoch, steps])}
    with _beside(model, StrategyState(lambda: said, said.update)):
        model.save_weights(new, overwrite=True)
    tf.io.gfile.rename(new, weights, overwrite=True)
    with tf.io.gfile.GFile(f"{place}.new", "w") as file:
        file.write(json.dumps({"epoch": epoch, "batch": 0}))
    tf.io.gfile.rename(f"{place}.new", place, overwrite=True)


def restored(callbacks: Iterable[Any], model: keras.Model, restore: Callable[[], None]) -> Any:
    """Call `restore`; then the epoch that training goes on with, and how many steps it has made."""
    loaded: dict[str, Any] = {}
    with _beside(model, StrategyState(dict, loaded.update)):
        restore()
    for backup in backups(callbacks):
        if loaded:
            return map(int, loaded["place"])
        has_weights, has_place = map(tf.io.gfile.exists, private.files_of_backup(backup))
        if has_place and not has_weights:
            return None, 0  # Keras goes by what is left of a backup that was being deleted.
    return private.initial_epoch_of(model), 0


@contextlib.contextmanager
def _beside(model: keras.Model, state: StrategyState) -> Iterator[None]:
    """Have Keras save `state` with the weights of `model`, or load it."""
    vars(model)["_ringreduce_place"] = state
    try:
        yield
    finally:
        del vars(model)["_ringreduce_place"]


def skip(model: Any, steps: int, ring: Communicator) -> None:
    """Have `model` read so many steps and not make them; called when training has begun."""
    progress = progress_of(model)
    if progress is None:
        raise ConfigError(
            f"goes on after step {steps} of an epoch, where rr.fit has backed up",
            **ring.config.who,
            remedy="Train by rr.fit, which makes no step again.",
        )
    progress.unread = steps


def backups(callbacks: Iterable[Any]) -> list[Any]:
    """Find the callbacks that back up."""
    plain = [getattr(callback, "callback", callback) for callback in callbacks]
    kind = keras.callbacks.BackupAndRestore
    return [callback for callback in plain if isinstance(callback, kind)]
