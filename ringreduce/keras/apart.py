"""Warns, when the program ends, of ranks that have trained apart from each other."""

from __future__ import annotations

import logging
import sys

from ringreduce.communicator.process import default_communicator, is_initialized

_log = logging.getLogger(__name__)
# The one that forms the ring.
_BARRIERS = 1


def warn_of_ranks_apart() -> None:
    """At exit, log on rank 0 that nothing was exchanged, unless an exception ends the program."""
    if not is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    ring = default_communicator()
    if ring.size > 1 and ring.rank == 0 and ring.statistics().collectives <= _BARRIERS:
        _log.warning(
            "[%d/%d] the ranks have exchanged nothing, so each has trained by itself. Wrap the "
            "optimizer, rr.DistributedOptimizer(optimizer), or the tape.",
            *ring.config.who.values(),
        )
