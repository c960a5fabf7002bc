"""Refuses what would train N models apart, or the same one N times, and names the line."""

import logging
import sys
import weakref
from pathlib import Path
from typing import Any

from ringreduce.keras.checks.users_line import users_frame
from ringreduce.keras.optimizers_in import all_within
from ringreduce.keras.wrapper import Wrapper
from ringreduce.unchanged.job import job
from ringreduce.unchanged.packages import WITHOUT, refuse

_log = logging.getLogger(__name__)
# Optimizers that are distributed, or in one that is.
_known: weakref.WeakSet[Any] = weakref.WeakSet()
has_trained = False  # whether the program has called `fit`


def place() -> str:
    """The user's line that calls this, as train.py:12."""
    frame = users_frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def require_distributed(optimizer: Any) -> None:
    """ConfigError on several ranks for an optimizer that averages nothing, unless within one."""
    if job().size == 1 or optimizer in _known:
        return
    # A MultiOptimizer may have made those in it since.
    for wrapper in list(Wrapper.made):
        _known.update(all_within(wrapper))
    if optimizer not in _known:
        refuse(
            f"applies gradients by {optimizer.name} in {place()}, outside of Model.fit or in a "
            "callback of another one",
            f"{WITHOUT} write import ringreduce.keras as rr, rr.init(), and optimizer = "
            "rr.DistributedOptimizer(optimizer); and give each rank its rows, rr.shard(data).",
        )


def refuse_strategy(strategy: Any) -> None:
    """ConfigError on several ranks for a strategy of tf.distribute that the program has made."""
    name = type(strategy).__name__
    if "Default" not in name:
        refuse(f"uses tf.distribute.{name} in {place()}", "Leave the strategy out.")


def warn_of_no_training() -> None:
    """At exit, unless by an exception: N ranks may have done the same work."""
    if job().size > 1 and job().rank == 0 and getattr(sys, "last_value", None) is None:
        _log.warning(
            "[%d/%d] the program has not called Model.fit, so each rank has done all of its work. "
            "Start it by itself, without ringreduce; or let it train by Model.fit.",
            *job().who.values(),
        )
