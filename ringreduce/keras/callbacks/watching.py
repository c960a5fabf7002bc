"""Which callbacks look at single batches: where none does, several steps run in one call."""

from collections.abc import Iterable
from typing import Any

import keras

from ringreduce.keras.private import is_of_keras

BEGINS = "on_train_batch_begin", "on_batch_begin"
HOOKS = (*BEGINS, "on_train_batch_end", "on_batch_end")
# Of Keras: they save after epochs, or, by `save_freq`, after batches. Keras 3.12 has no Orbax.
_NAMES = "ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint"
_SAVERS = tuple(saver for name in _NAMES if (saver := getattr(keras.callbacks, name, None)))


def all_of(callbacks: Any) -> list[Any]:
    """`callbacks`, and those that they call."""
    flat: list[Any] = []
    for callback in keras.tree.flatten(callbacks):
        flat += [callback, *all_of(getattr(callback, "members", []))]
    return flat


def that_look(callbacks: Iterable[Any]) -> list[str]:
    """The names of the classes of those whose hooks must be called for each batch."""
    names = (type(callback).__name__ for callback in callbacks if _looks(callback))
    return list(dict.fromkeys(names))


def that_see_batches(callbacks: Iterable[Any], hooks: Iterable[str] = HOOKS) -> bool:
    """Whether one of them has a hook for single batches that is neither Keras's nor ours."""
    return any(not is_of_keras(getattr(callback, name)) for callback in callbacks for name in hooks)


def that_begin_epochs(callbacks: Iterable[Any]) -> bool:
    """Whether one of them has something to do when an epoch begins, and is the user's."""
    return any(not is_of_keras(callback.on_epoch_begin) for callback in callbacks)


def _looks(callback: Any) -> bool:
    if hasattr(callback, "looks_at_batches"):  # One of ours, which takes several steps as one.
        return bool(callback.looks_at_batches)
    hooks = [getattr(callback, name) for name in HOOKS]
    if _is_harmless(callback):  # Which says so of Keras's own hooks: a subclass may have others.
        hooks = [hook for hook in hooks if not hook.__module__.startswith("keras.")]
    return not all(getattr(hook, "_is_default", False) for hook in hooks)


def _is_harmless(callback: Any) -> bool:
    """Whether it is one of Keras's, used so that several steps are to it as one."""
    if isinstance(callback, keras.callbacks.TensorBoard):
        batches = callback._start_batch or callback._stop_batch or callback.write_steps_per_second
        return callback.update_freq == "epoch" and not batches
    if isinstance(callback, _SAVERS):
        return callback.save_freq in ("epoch", False)
    return isinstance(callback, keras.callbacks.ProgbarLogger)
