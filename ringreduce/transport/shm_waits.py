"""What a call in shared memory does when another rank of the host is late: wait on, or which error.

The C library returns RR_WAITING when the time of one wait is over. Collectives and messages decide
here alike whether that rank is slow, lost, or has aborted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from ringreduce.pure.notification import abort_error, goodbye_error
from ringreduce.pure.patience import Patience
from ringreduce.transport.cores import are_crowded
from ringreduce.transport.others import Others, PeerPatience
from ringreduce.transport.segment import Segment
from ringreduce.transport.stalls import Interruption, Stall, WaitSpans, timeout_error
from ringreduce.transport.unix import Mesh
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import PeerLostError, RingReduceError
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


class Waiting(Protocol):
    """A call that is not done yet."""

    def resume(self) -> int:
        """Continue it; return a status."""

    def state(self) -> tuple[int, int]:
        """A number that grows while it advances, and the index of the rank that it waits for."""

    def is_late(self, index: int) -> bool:
        """Whether it still waits for that rank."""

    def where(self, index: int) -> dict[str, Any]:
        """The fields of an error about that rank."""


class HostRanks:
    """The ranks of this host, whose `members` are their ranks in the job; `index` is this one's."""

    def __init__(
        self,
        members: Sequence[int],
        index: int,
        segments: Sequence[Segment],
        mesh: Mesh,
        patience: Patience,
    ) -> None:
        self.members, self.index = tuple(members), index
        self.segments = tuple(segments)
        self.wait_limits = wait_limits(len(members))
        self._mesh, self._patience = mesh, patience

    def patience_with(self, index: int, others: Others) -> Patience:
        """For how long a message of that rank may wait."""
        return PeerPatience(self._patience, others, self.members[index])

    def finish(
        self,
        status: int,
        call: Waiting,
        interruption: Interruption,
        patience: Patience | None = None,
        waits: WaitSpans | None = None,
    ) -> int:
        """Continue `call` until its status is another than WAITING; return that.

        It waits as long as `patience` allows; None: as the calls of collectives. `waits` records
        for which ranks.

        Raises:
            PeerTimeoutError: a rank made no progress within the time limit.
            PeerLostError, MismatchError, ...: a rank died, aborted, or closed its communicator.
        """
        stall = Stall(self._patience if patience is None else patience)
        waits = waits or WaitSpans(0.0)
        try:
            while status == WAITING:
                progress, peer = call.state()
                waits.look(self.members[peer], progress)
                if interruption.is_set:
                    raise interruption.error(**call.where(self.index))
                limit = stall.look(progress)
                if stall.lost is not None:
                    raise self._lost(stall.lost, call)
                if limit is not None:
                    due = f"rank {self.members[peer]} on the same host"
                    raise timeout_error(due, stall.waited_s, limit, **call.where(peer))
                stall.lost = next((i for i in self._mesh.gone() if call.is_late(i)), None)
                status = call.resume()
            return status
        finally:
            waits.end()

    def _lost(self, index: int, call: Waiting) -> RingReduceError:
        """The error of a lost rank: an abort of any rank, else its own goodbye, comes first."""
        for other, segment in enumerate(self.segments):
            if payload := segment.reason():
                return abort_error(payload, **call.where(other))
        peer = self.members[index]
        if (goodbye := self._mesh.gone()[index]) is not None:
            return goodbye_error(goodbye, **call.where(index))
        return PeerLostError(
            f"lost rank {peer} on the same host: it died",
            **call.where(index),
            remedy=f"Read rank {peer}'s log first.",
        )
