"""Saves a model's files whole: each is written beside the one that was asked for, and renamed."""

import contextlib
import os
import weakref
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.checks.users_line import warn_at_users_line
from ringreduce.vocabulary.words import for_rr

_BY_KERAS = "save after fit, or by keras.callbacks.ModelCheckpoint, in place of another callback."


def save_whole_files(model: Any, ring: Communicator) -> None:
    """From now on ``model.save`` and ``model.save_weights`` replace a file in one step."""
    if ring.size == 1 or isinstance(vars(model).get("save"), _Saving):
        return
    for name in ("save", "save_weights"):
        setattr(model, name, _Saving(model, name, ring))


class _Saving:
    def __init__(self, model: Any, name: str, ring: Communicator) -> None:
        self._model, self._name, self._ring = weakref.ref(model), name, ring
        self._warns = True

    def __call__(self, filepath: Any, *arguments: Any, **options: Any) -> Any:
        model = self._model()
        save, path = getattr(type(model), self._name), str(filepath)
        if getattr(save, "writes_once", bool)():  # In unchanged programs, but for callbacks.
            return save(model, filepath, *arguments, **options)
        if self._warns and (rank := self._ring.rank) > 0:
            self._warns = False
            once = (
                f"rr.on_rank_zero(lambda: model.{self._name}(...)) on all ranks; around a callback "
                "of your own that saves, rr.callbacks.OnRankZero(callback)."
            )
            warn_at_users_line(
                f"rank {rank} saves {path} too. If the ranks share that file, let rank 0 alone "
                f"write it: {for_rr(once, _BY_KERAS)}",
                UserWarning,
            )
        overwrite = arguments[0] if arguments else options.get("overwrite", True)
        is_file = path.endswith((".keras", ".h5")) and options.get("zipped") is not False
        if not overwrite or not is_file or "://" in path or options.get("max_shard_size"):
            return save(model, filepath, *arguments, **options)
        folder, name = os.path.split(path)
        unfinished = os.path.join(folder, f".{os.getpid()}-{name}")
        try:
            save(model, unfinished, *arguments, **options)
            os.replace(unfinished, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(unfinished)
        return None
