"""Keeps files whole that several ranks of a host save at once, by ``model.save`` on every rank.

Each writes a file of its own beside the one that was asked for, and renames that.
"""

import contextlib
import os
import weakref
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.mistakes import warn_at_users_line

_prepared: weakref.WeakSet[Any] = weakref.WeakSet()


def save_whole_files(model: Any, ring: Communicator) -> None:
    """From now on ``model.save`` and ``model.save_weights`` replace a file in one step."""
    if ring.size == 1 or model in _prepared:
        return
    _prepared.add(model)
    for name in ("save", "save_weights"):
        setattr(model, name, _Saving(model, name, ring))


class _Saving:
    def __init__(self, model: Any, name: str, ring: Communicator) -> None:
        self._model, self._name, self._rank = weakref.ref(model), name, ring.rank
        self._warns = ring.rank > 0

    def __call__(self, filepath: Any, *arguments: Any, **options: Any) -> Any:
        model = self._model()
        save, path = getattr(type(model), self._name), str(filepath)
        if self._warns:
            self._warns = False
            warn_at_users_line(
                f"rank {self._rank} saves {path} too. If the ranks share that file, let rank 0 "
                f"alone write it: rr.on_rank_zero(lambda: model.{self._name}(...)), or callbacks "
                "within rr.fit or rr.callbacks.Together.",
                UserWarning,
            )
        overwrite = arguments[0] if arguments else options.get("overwrite", True)
        is_file = path.endswith((".keras", ".h5")) and options.get("zipped") is not False
        if not overwrite or not is_file or "://" in path or options.get("max_shard_size"):
            return save(model, filepath, *arguments, **options)
        folder, name = os.path.split(path)
        own = os.path.join(folder, f".{os.getpid()}-{name}")
        try:
            save(model, own, *arguments, **options)
            os.replace(own, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(own)
        return None
