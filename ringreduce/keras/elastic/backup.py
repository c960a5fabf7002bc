"""Backs up for `BackupAndRestore`, in the middle of an epoch too, and goes on from there.

Keras's callback writes weights, then the number of the epoch into a second file. As two files are
not replaced at once, the place (epoch, and how many of its steps have been made) stands with the
weights too, and counts there. A training that begins again reads those steps and makes none.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.optimizer.state import StrategyState
from ringreduce.keras.progress import fields_of, progress_of
from ringreduce.vocabulary.errors import ConfigError

_METRIC = "metric_"  # and a number: what is stored of metrics


def back_up(
    callbacks: Iterable[Any],
    model: keras.Model,
    epoch: int,
    steps: int,
    metrics: Sequence[np.ndarray] = (),
) -> str:
    """Save what `callbacks` restore, after that many steps of `epoch`; return what to do then.

    `metrics`: what these have of all ranks' steps in this epoch.
    """
    said = "Nothing was backed up: pass backup_dir to rr.fit for that."
    for backup in backups(callbacks):
        save(backup, model, epoch, steps, metrics)
        said = f"Start the job again: it goes on from this step, with {backup.backup_dir}."
    return said


def save(
    backup: Any,
    model: keras.Model,
    epoch: int,
    steps: int = 0,
    metrics: Sequence[np.ndarray] = (),
) -> None:
    """Replace what `backup` restores; at any moment a whole backup is there.

    What callbacks know of the training is in it, where that is noted.
    """
    weights, place = private.files_of_backup(backup)
    tf.io.gfile.makedirs(backup.backup_dir)
    for each in (weights, place) if backup.double_checkpoint else ():
        if tf.io.gfile.exists(each):
            tf.io.gfile.copy(each, f"{each}.bkp", overwrite=True)
    new = f"{backup.backup_dir}/new.weights.h5"
    said = {"place": np.array([epoch, steps])}
    if steps and (progress := progress_of(model)) is not None:
        said["facts"] = np.frombuffer(json.dumps(dict(progress.facts())).encode(), np.uint8)
    if (fields := fields_of(model)) is not None:
        said["fields"] = fields.packed()
    for number, values in enumerate(metrics):
        said[f"{_METRIC}{number}"] = values
    try:
        with _beside(model, StrategyState(lambda: said, said.update)):
            model.save_weights(new, overwrite=True)
    except BaseException:
        with contextlib.suppress(Exception):
            tf.io.gfile.remove(new)  # A full disk needs the room.
        raise
    tf.io.gfile.rename(new, weights, overwrite=True)
    with tf.io.gfile.GFile(f"{place}.new", "w") as file:
        file.write(json.dumps({"epoch": epoch, "batch": 0}))
    tf.io.gfile.rename(f"{place}.new", place, overwrite=True)


class Restored(NamedTuple):
    """Where a training goes on, and what callbacks know of it, as `Fields` pack it."""

    epoch: int | None
    steps: int = 0
    fields: np.ndarray = np.empty(0, np.uint8)
    # On the rank that has read it, after steps of an epoch: what these followed from.
    facts: Mapping[str, str] = MappingProxyType({})
    # What metrics had of all ranks' steps, on that rank too; None: it is not in there.
    metrics: Sequence[np.ndarray] | None = None

    def unlike(self, model: keras.Model) -> list[str]:
        """Which of `facts` are others now, in words."""
        progress = progress_of(model)
        now = {} if progress is None or not self.facts else progress.facts()
        other = [name for name, fact in now.items() if self.facts.get(name, fact) != fact]
        return [
            "other data" if name == "data" else f"{name}={self.facts[name]} (now {now[name]})"
            for name in other
        ]

    def told(self, ring: Communicator) -> Restored:
        """That of rank 0, on all ranks. Collective."""
        facts = self.epoch, self.steps, len(self.fields), self.metrics is not None
        epoch, steps, nbytes, has_metrics = ring.broadcast_object([*facts])
        fields = np.array(self.fields) if ring.rank == 0 else np.empty(nbytes, np.uint8)
        if nbytes:
            ring.broadcast(fields)
        return Restored(
            epoch, steps, fields, self.facts, (self.metrics or []) if has_metrics else None
        )


def restored(callbacks: Iterable[Any], model: keras.Model, restore: Callable[[], None]) -> Restored:
    """Call `restore`, which may load weights; what it has found."""
    loaded: dict[str, Any] = {}
    with _beside(model, StrategyState(dict, loaded.update)):
        restore()
    for backup in backups(callbacks):
        if loaded:
            epoch, steps = map(int, loaded["place"])
            facts = bytes(loaded.get("facts", np.frombuffer(b"{}", np.uint8)))
            fields = loaded.get("fields", np.empty(0, np.uint8))
            count = sum(name.startswith(_METRIC) for name in loaded)
            metrics = [np.array(loaded[f"{_METRIC}{number}"]) for number in range(count)]
            return Restored(epoch, steps, fields, json.loads(facts), metrics or None)
        has_weights, has_place = map(tf.io.gfile.exists, private.files_of_backup(backup))
        if has_place and not has_weights:
            return Restored(None)  # Keras goes by what is left of one that was being deleted.
    return Restored(private.initial_epoch_of(model))


@contextlib.contextmanager
def _beside(model: keras.Model, state: StrategyState) -> Iterator[None]:
    """Have Keras save `state` with the weights of `model`, or load it."""
    vars(model)["_ringreduce_place"] = state
    try:
        yield
    finally:
        del vars(model)["_ringreduce_place"]


def skip(
    model: Any, steps: int, ring: Communicator, metrics: Sequence[np.ndarray] | None = None
) -> None:
    """Have `model` read so many steps and not make them; called when training has begun.

    `metrics`: what these had then.
    """
    progress = progress_of(model)
    if progress is None:
        raise ConfigError(
            f"goes on after step {steps} of an epoch, where rr.fit has backed up",
            **ring.config.who,
            remedy="Train by rr.fit, which makes no step again.",
        )
    progress.unread, progress.metrics = steps, metrics


def backups(callbacks: Iterable[Any]) -> list[Any]:
    """Find the callbacks that back up."""
    plain = [getattr(callback, "callback", callback) for callback in callbacks]
    kind = keras.callbacks.BackupAndRestore
    return [callback for callback in plain if isinstance(callback, kind)]
