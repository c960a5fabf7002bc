"""Warns of data that every rank uses whole, in ``model.fit``."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.users_line import warn_at_users_line


class DataWarning(UserWarning):
    """All ranks may be training on the same data."""


# Communicators for which `rr.shard`, `rr.join` or `rr.fit` has divided data.
_divided: weakref.WeakSet[Communicator] = weakref.WeakSet()
_warned: weakref.WeakSet[Communicator] = weakref.WeakSet()


def note_sharding(communicator: Communicator) -> None:
    """Note that this rank has its part of some data."""
    _divided.add(communicator)


def model_in_fit() -> Any:
    """The model whose ``fit`` calls this function, through any others; None outside of `fit`."""
    frame = sys._getframe()
    while frame is not None:
        # Keras has no other way to find out, and no callback need be there.
        if frame.f_code.co_name == "fit" and isinstance(frame.f_locals.get("self"), keras.Model):
            return frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def warn_of_whole_data(model: Any, communicator: Communicator) -> None:
    """Warn on rank 0, once, unless data was divided; `model` is being trained by its `fit`."""
    ring = communicator
    if ring.size == 1 or ring.rank != 0 or ring in _warned:
        return
    # A job's groups share its settings. Data may be divided among other ranks than train together.
    if any(one.config is ring.config and not one.closed for one in _divided):
        return
    _warned.add(ring)
    warn_at_users_line(
        f"nothing has divided the data that {model.name}.fit trains on, so all {ring.size} ranks "
        "may be training on all of it. Call rr.fit(model, ...) with the same arguments, whose "
        "batches are global; or give fit rr.shard(data). If each rank reads data of its own "
        'already, ignore this: warnings.simplefilter("ignore", rr.DataWarning).',
        DataWarning,
    )
