"""The ranks of a host that share memory: how calls in C wait for them, what errors say of them."""

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringreduce.effects.native import fields, u32
from ringreduce.pure.wire import Header
from ringreduce.transport.diagnosis import lost_error
from ringreduce.transport.segment import Segment, made
from ringreduce.transport.small_calls import Kind, SmallCalls, are_possible
from ringreduce.transport.stalls import Waiting
from ringreduce.transport.unix import Mesh
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.cores import are_crowded
from ringreduce.vocabulary.errors import ProtocolError, RingReduceError
from ringreduce.vocabulary.times import milliseconds

# How long to wait in each way before the next (native/src/counters.c). With a core for each rank
# 200 to 4000 spins are equally fast; with fewer cores each spin delays the rank that is waited for
# (docs/performance.md).
_SPINS_ALONE, _SPINS_CROWDED, _YIELDS = 200, 20, 100

DONE, WAITING, MISMATCH, ABORTED, BROKEN = range(5)  # RR_DONE, ... of native/include/ringreduce.h


class WaitLimits(ctypes.Structure):
    """rr_wait_limits."""

    _fields_ = fields(spins=u32, yields=u32, sleep_ms=u32)


class HostRanks:
    """This `rank` and the others of its host, in a job of `size` ranks, and their `mapped` memory.

    Who has it keeps all memory mapped, and `group` valid: the C library's rr_shm of these ranks,
    with its rr_wait_limits for them at `limits`, and their segments at the addresses in `segments`.
    `members` are their ranks, in the order of the segments, and `index` is this rank's place there.
    Raises OSError if their memory does not fit together.
    """

    def __init__(
        self, mapped: Mapping[int, Segment], rank: int, size: int, mesh: Mesh, waiting: Waiting
    ) -> None:
        self.members, self.rank, self.size = tuple(mapped), rank, size
        self.index, count = self.members.index(rank), len(mapped)
        self.mapped = tuple(mapped.values())
        self.segments = (ctypes.c_void_p * count)(*[each.address for each in self.mapped])
        spins = _SPINS_CROWDED if are_crowded(count) else _SPINS_ALONE
        self._limits = WaitLimits(spins, _YIELDS, milliseconds(TIMES.shared_memory_poll_s))
        self.limits = ctypes.addressof(self._limits)
        self.mesh, self.waiting = mesh, waiting
        self.group = made(self, "shm", self.index, count, ctypes.addressof(self.segments))

    def small_calls(self, kind: Kind, end: int) -> SmallCalls | None:
        """Calls wholly in C at that end; None where there are none."""
        return SmallCalls(kind, end, self.limits) if are_possible() else None

    def named(self, peer: int) -> str:
        """How errors call a rank."""
        return f"rank {peer} on the same host"

    def where(self, peer: int, operation: str, sequence: int, step: str) -> dict[str, Any]:
        """The fields of an error about that rank."""
        call = {"operation": operation, "sequence": sequence, "step": step}
        return {"rank": self.rank, "size": self.size, "peer": peer, **call}

    def error(
        self, status: int, theirs: Header, ours: Header, where: dict[str, Any]
    ) -> RingReduceError:
        """The error for a status of the C library, in a call `ours` that has met `theirs`."""
        peer = where["peer"]
        if status == ABORTED:
            return self.waiting.await_cause() or lost_error(self.named(peer), **where)
        if status == MISMATCH:
            # Of two ranks that look at each other.
            headers = replace(theirs, rank=0), replace(ours, rank=0)
            return self.waiting.mismatch(*headers, (peer,), **where)
        return ProtocolError(f"found what cannot be in the memory of rank {peer}", **where)
