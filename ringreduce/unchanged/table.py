"""Replacements in Keras and TensorFlow, for a program that nobody has changed.

Within a replaced call the original functions run: ours call Keras's, and callbacks of rank 0 are
its own. So they do in a process that a rank has started.
"""

import atexit
import builtins
import functools
import inspect
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import init
from ringreduce.communicator.rank_zero import on_rank_zero
from ringreduce.keras import private
from ringreduce.keras.callbacks.together import given_callbacks
from ringreduce.keras.data import fingerprint
from ringreduce.keras.optimizer.distributed import DistributedOptimizer
from ringreduce.keras.step import own_step
from ringreduce.keras.training.evaluate import OutputsError, evaluate, predict
from ringreduce.keras.training.fit import fit
from ringreduce.keras.training.overridden import keras_s
from ringreduce.keras.wrapper import Wrapper
from ringreduce.unchanged import guard, written
from ringreduce.unchanged.job import job
from ringreduce.vocabulary.config import recording_wanted
from ringreduce.vocabulary.errors import MismatchError

# Gets the original function, and the arguments of a call.
_Replacement = Callable[..., Any]
# Names of the file in functions that save, unless it is a CheckpointManager's directory.
_FILES = ("filepath", "file_prefix", "export_dir")


class _Local(threading.local):
    is_inside = False  # whether this thread runs a replaced call


_local = _Local()
_process = os.getpid()
_is_tried_out = recording_wanted() is not None
_calls = 0
_seed: Any = None  # TensorFlow's, as the program has set it


def install() -> None:
    """Replace everything, under all names that Keras and TensorFlow have for it."""
    for name, ours in (("fit", _fit), ("evaluate", _evaluate), ("predict", _predict)):
        _replace(keras.Model, name, ours)
    for owner, names in (
        (keras.Model, ("save", "save_weights", "export")),
        (keras.export.ExportArchive, ("write_out",)),
        (tf.train.Checkpoint, ("save", "write")),
        (tf.train.CheckpointManager, ("save",)),
    ):
        for name in names:
            _replace(owner, name, _write_once)
    for function in (keras.saving.save_model, keras.saving.save_weights, tf.saved_model.save):
        _replace_everywhere(function, _write_once)
    _replace_everywhere(keras.utils.get_file, _download_once)
    _replace(builtins, "input", _ask_once)
    _replace(tf.random, "set_seed", _note_seed)
    _check_first(keras.optimizers.Optimizer, "apply", guard.require_distributed)
    _check_first(tf.distribute.Strategy, "scope", guard.refuse_strategy)
    fingerprint.compares_all_inputs = True
    atexit.register(_at_exit)
    if job().size > 1:
        written.watch(lambda: job().rank == 0 and _local.is_inside)


def _replace(owner: Any, name: str, ours: _Replacement, *, within: bool = False) -> None:
    setattr(owner, name, _replacement(getattr(owner, name), ours, within))


def _replace_everywhere(function: Any, ours: _Replacement) -> None:
    """Replace `function` in all modules of its package, which import it by name."""
    replacement = _replacement(function, ours)
    for module in [m for n, m in sys.modules.items() if n.startswith(("keras", "tensorflow"))]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, replacement)


def _replacement(original: Any, ours: _Replacement, within: bool = False) -> Any:
    """A function that calls `ours`; inside of another replaced call only if `within`."""

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        before = _local.is_inside
        if (before and not within) or os.getpid() != _process:
            return original(*arguments, **options)
        _local.is_inside = True
        try:
            return ours(original, *arguments, **options)
        finally:
            _local.is_inside = before

    call.replaces = original  # type: ignore[attr-defined]
    call.writes_once = lambda: not _local.is_inside  # type: ignore[attr-defined]
    return call


def _check_first(owner: Any, name: str, check: Callable[[Any], None]) -> None:
    def checked(original: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        check(self)
        return original(self, *arguments, **options)

    _replace(owner, name, checked, within=True)


# --- Training -----------------------------------------------------------------------------------


def _fit(original: Any, model: keras.Model, *arguments: Any, **options: Any) -> Any:
    if not model.compiled:
        return original(model, *arguments, **options)  # Raises Keras's own error.
    bound = inspect.signature(original).bind(model, *arguments, **options).arguments
    ring = _meet("Model.fit")
    guard.has_trained = True
    if ring.size == 1 and private.strategy_of(model) is not None:
        return original(model, *arguments, **options)  # On several ranks its scope was refused.
    _distribute(model)
    with keras_s(bound.pop("self"), "fit", original):
        # The order of rows follows from TensorFlow's seed, as Keras's, and is another in each call.
        seed = zlib.crc32(f"{_seed} {_calls}".encode())
        # After the program's, which may compile the model anew.
        bound["callbacks"] = [*given_callbacks(bound.get("callbacks")), _Distributing()]
        return fit(model, **bound, seed=seed, communicator=ring)


class _Distributing(keras.callbacks.Callback):
    """Has optimizers that callbacks give the model average gradients, before the next step."""

    looks_at_batches = False
    _known: Any = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer is not self._known:
            _distribute(self.model)
            before, self._known = self._known, self.model.optimizer
            # Its step was tried with another one, and has no loss of Keras's that may be new.
            adds_up = isinstance(before, Wrapper) and before.options["gradients"] == "sum"
            if adds_up and own_step(self.model) is not None:
                self._known.add_up_gradients()


def _note_seed(original: Any, seed: Any) -> None:
    global _seed
    _seed = seed
    original(seed)


def _evaluate(original: Any, model: keras.Model, *arguments: Any, **options: Any) -> Any:
    if not model.compiled:
        return original(model, *arguments, **options)
    bound = inspect.signature(original).bind(model, *arguments, **options).arguments
    if bound.get("kwargs") or bound.get("callbacks") is not None:
        return original(model, *arguments, **options)  # Callbacks see all batches, on each rank.
    given = {"verbose": "auto", **bound}
    ring = _meet("Model.evaluate")
    with keras_s(given.pop("self"), "evaluate", original):
        return evaluate(model, **given, communicator=ring)


def _predict(original: Any, model: keras.Model, *arguments: Any, **options: Any) -> Any:
    bound = inspect.signature(original).bind(model, *arguments, **options).arguments
    if bound.pop("callbacks", None) is not None:
        return original(model, *arguments, **options)
    given = {"verbose": "auto", **bound}
    ring = _meet("Model.predict")
    with keras_s(given.pop("self"), "predict", original):
        try:
            return predict(model, **given, communicator=ring)
        except OutputsError:
            if isinstance(given["x"], Iterator):
                raise  # It has been read.
            return original(model, *arguments, **options)


def _distribute(model: keras.Model) -> None:
    """Have all optimizers of `model` average gradients: attributes, and in lists and tables."""
    made: dict[int, Any] = {}

    def wrapped(optimizer: Any) -> Any:
        if not isinstance(optimizer, keras.optimizers.Optimizer) or isinstance(optimizer, Wrapper):
            return optimizer
        return made.setdefault(id(optimizer), DistributedOptimizer(optimizer))

    for name, value in list(vars(model).items()):
        if wrapped(value) is not value:
            setattr(model, name, wrapped(value))
        elif isinstance(value, (list, dict)):
            places = range(len(value)) if isinstance(value, list) else list(value)
            for place in places:
                if wrapped(value[place]) is not value[place]:
                    value[place] = wrapped(value[place])


def _meet(what: str) -> Communicator:
    """Join the ring, and compare with the other ranks where the program is. Collective."""
    global _calls
    _calls += 1
    ring = init()
    if ring.size == 1:
        return ring
    told = [_calls, what, guard.place()]
    every = ring.all_gather_object([told, written.found(ring.rank)])
    written.note(name for _, names in every for name in names)
    for rank, (where, _) in zip(ring.members, every, strict=True):
        if where != every[0][0]:
            number, name, line = where
            other = "in its call {} of these, {} in {}".format(*every[0][0])
            raise MismatchError(
                f"found rank {rank} in its call {number} of these, {name} in {line}, while rank "
                f"{ring.members[0]} is {other}",
                **ring.config.who,
                peer=rank,
                operation="comparison of programs",
                remedy="All ranks must take the same way through the program: look for what "
                "depends on files, on time or on random numbers without a seed.",
            )
    return ring


# --- Files and the terminal ---------------------------------------------------------------------


def _write_once(original: Any, *arguments: Any, **options: Any) -> Any:
    """Rank 0 writes; the others wait, and then find the whole file.

    Where ranks name files of their own, as in a folder of ``tempfile``, or a buffer, each writes.
    """
    if _is_tried_out:
        return None  # What is only tried out overwrites nothing.
    ring = _meet(original.__qualname__)
    bound = inspect.signature(original).bind(*arguments, **options).arguments
    names = ring.all_gather_object(_name_of_file(bound, arguments[0]))
    if None in names or len(set(names)) > 1:
        return original(*arguments, **options)

    def write() -> str | None:
        path = original(*arguments, **options)
        return path if isinstance(path, str) else None

    return on_rank_zero(write, communicator=ring)


def _name_of_file(bound: Mapping[str, Any], saved: Any) -> str | None:
    """The file or folder that a call writes; None: a buffer."""
    found = next((bound[name] for name in _FILES if name in bound), None)
    path = getattr(saved, "directory", None) if found is None else found
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else None


def _download_once(original: Any, *arguments: Any, **options: Any) -> Any:
    with written.alone_on_host():
        return original(*arguments, **options)


def _ask_once(original: Any, prompt: Any = "", /) -> Any:
    return on_rank_zero(lambda: original(prompt), communicator=_meet("input"))


def _at_exit() -> None:
    if not guard.has_trained:
        guard.warn_of_no_training()
    written.warn()
