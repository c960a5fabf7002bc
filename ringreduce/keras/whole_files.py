"""Keeps files whole that several ranks of a host save at once.

Programs end with ``model.save(path)`` on every rank. Keras writes into the file itself, so two
ranks would write into each other's. Each now writes a file of its own beside it and renames that.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.mistakes import warn_at_users_line

_prepared: weakref.WeakSet[Any] = weakref.WeakSet()


def save_whole_files(model: Any, communicator: Communicator) -> None:
    """From now on ``model.save`` and ``model.save_weights`` replace a file in one step.

    Ranks other than 0 warn once that they write it too.
    """
    if communicator.size == 1 or model in _prepared:
        return
    _prepared.add(model)
    for name in ("save", "save_weights"):
        setattr(model, name, _Saving(model, name, communicator))


class _Saving:
    def __init__(self, model: Any, name: str, communicator: Communicator) -> None:
        self._model, self._name, self._rank = weakref.ref(model), name, communicator.rank
        self._has_warned = False

    def __call__(self, filepath: Any, *arguments: Any, **options: Any) -> Any:
        model = self._model()
        save = getattr(type(model), self._name)
        path = str(filepath)
        self._warn(path)
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

    def _warn(self, path: str) -> None:
        if self._rank == 0 or self._has_warned:
            return
        self._has_warned = True
        warn_at_users_line(
            f"rank {self._rank} saves {path} too. If the ranks share that file, let rank 0 alone "
            f"write it: rr.on_rank_zero(lambda: model.{self._name}(...)), or callbacks within "
            "rr.fit or rr.callbacks.Together.",
            UserWarning,
        )
