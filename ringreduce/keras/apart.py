"""Warns, when the program ends, of ranks that have trained apart from each other."""

from __future__ import annotations

import gc
import logging
import sys

import keras

from ringreduce.communicator.process import default_communicator, is_initialized

_log = logging.getLogger(__name__)
# The one that forms the ring.
_BARRIERS = 1


def warn_of_ranks_apart() -> None:
    """At exit, log on rank 0 if it has trained a model and nothing was exchanged.

    Unless an exception ends the program.
    """
    if not is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    ring = default_communicator()
    if ring.size == 1 or ring.rank != 0:
        return
    done = ring.statistics()
    has_exchanged = done.collectives > _BARRIERS or done.bytes_sent or done.bytes_received
    if not has_exchanged and _has_trained():
        _log.warning(
            "[%d/%d] the ranks have exchanged nothing, so each has trained by itself. Wrap the "
            "optimizer, rr.DistributedOptimizer(optimizer), or the tape.",
            *ring.config.who.values(),
        )


def _has_trained() -> bool:
    """Whether an optimizer of this process has made a step; Keras keeps no list of them."""
    found = [each for each in gc.get_objects() if isinstance(each, keras.optimizers.Optimizer)]
    return any(each.built and int(each.iterations) > 0 for each in found)
