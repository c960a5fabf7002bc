"""The ranks of a host that share memory, and how calls in C wait for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ringreduce.pure.timeouts import Timeouts
from ringreduce.transport.cores import are_crowded
from ringreduce.transport.segment import Segment
from ringreduce.transport.unix import Mesh
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.times import milliseconds

# How long to wait in each way before the next (native/src/counters.c). With a core for each rank
# 200 to 4000 spins are equally fast; with fewer cores each spin delays the rank that is waited for
# (docs/performance.md).
_SPINS_ALONE, _YIELDS_ALONE = 200, 100
_SPINS_CROWDED, _YIELDS_CROWDED = 20, 100

# RR_DONE, ... of native/include/ringreduce.h.
DONE, WAITING, MISMATCH, ABORTED, BROKEN = range(5)


class WaitLimits(ctypes.Structure):
    """rr_wait_limits."""

    _fields_ = (
        ("spins", ctypes.c_uint32),
        ("yields", ctypes.c_uint32),
        ("sleep_ms", ctypes.c_uint32),
    )


def wait_limits(ranks: int) -> WaitLimits:
    """How to wait when `ranks` share the cores that this process may use."""
    crowded = are_crowded(ranks)
    spins, yields = (_SPINS_CROWDED, _YIELDS_CROWDED) if crowded else (_SPINS_ALONE, _YIELDS_ALONE)
    return WaitLimits(spins, yields, milliseconds(TIMES.shared_memory_poll_s))


class HostRanks:
    """The ranks of this host, whose `members` are their ranks in the job; `index` is this one's.

    Attributes:
        timeouts: how long the calls of collectives may wait.
        mesh: which of them are lost.
    """

    def __init__(
        self,
        members: Sequence[int],
        index: int,
        segments: Sequence[Segment],
        mesh: Mesh,
        timeouts: Timeouts,
    ) -> None:
        self.members, self.index = tuple(members), index
        self.segments = tuple(segments)
        self.wait_limits = wait_limits(len(members))
        self.mesh, self.timeouts = mesh, timeouts

    def name(self, peer: int) -> str:
        """How errors call a rank."""
        return f"rank {peer} on the same host"
