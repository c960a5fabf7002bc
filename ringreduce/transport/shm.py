"""The link between the ranks of one host in shared memory: this rank's part, deadlines, losses.

native/src/shm.c does the work; it returns when a rank is late, and this file decides whether that
rank is slow, lost, stopped, or in another call. Threads: none. Memory: every rank maps every
other's segment; the caller owns its arrays again when `run` returns.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ringreduce.commands.launch.standings import Standings
from ringreduce.effects.native import fields, pointer, u32, u64
from ringreduce.pure import wire
from ringreduce.pure.schedule import Action
from ringreduce.pure.wire import Header, Kind, encode
from ringreduce.transport.link_calls import Traffic
from ringreduce.transport.segment import Heap, Segment, address_of, functions, heap_bytes
from ringreduce.transport.shm_pairs import ShmPairs
from ringreduce.transport.shm_ranks import DONE, WAITING, HostRanks
from ringreduce.transport.small_calls import Kind as SmallKind
from ringreduce.transport.small_calls import SmallCalls
from ringreduce.transport.stalls import StalledCall, State, Waiting, finish
from ringreduce.transport.unix import Mesh, memory_domain
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ProtocolError, RingReduceError

_log = logging.getLogger(__name__)

# Of each half of a segment's staging. Both fit the second-level cache, and each half costs one wait
# for all ranks. Measured from 256 KiB to 8 MiB (docs/performance.md).
STAGING_BYTES = 512 << 10


class _Call(ctypes.Structure):
    _fields_ = fields(header=u64 * 8, action=u32, dtype=u32, op=u32, divisor=u32, bounds=pointer)


class _Facts(ctypes.Structure):
    _fields_ = (
        *fields(sequence=u64, peer=u32, step=u32, steps=u32, theirs=u64 * 8),
        *fields(progress=u64, bytes_sent=u64, bytes_received=u64),
    )


class Neighbour(NamedTuple):
    """Another rank of this host, as seen without an answer from it."""

    standing: Standings  # how far it has come; that can be read when it has ended
    process: tuple[int, int] | None  # as `unix.end_process` takes it; None: not seen from here


class HostCall:
    """One kind of call, made once and reused for every call of that kind.

    `header` is what must be equal on all ranks, except rank and sequence. `bounds` are the starts
    of the chunks, in elements, and the end of the last; there is one chunk for each rank of the
    host. For ALL_TO_ALL they are the counts, shape (size, size). `dtype` and `op` are what is
    computed, if that differs from what `header` says.
    """

    def __init__(
        self,
        header: Header,
        action: Action,
        bounds: Sequence[int] | np.ndarray,
        *,
        divisor: int = 1,
        dtype: int | None = None,
        op: int | None = None,
    ) -> None:
        self.header = header
        self._bounds = np.array(bounds, np.uint64)
        self._call = _Call(
            header=tuple(encode(header).tolist()),
            action=action,
            dtype=header.dtype if dtype is None else dtype,
            op=header.op if op is None else op,
            divisor=divisor,
            bounds=self._bounds.ctypes.data,
        )
        self.address = ctypes.addressof(self._call)


class ShmLink(StalledCall):
    """One rank's link to the ranks of its host, made before they meet, to announce `name`.

    Raises NativeError if there is no native library, OSError if no memory or no socket is
    available.
    """

    def __init__(self, *, waiting: Waiting) -> None:
        self._waiting = waiting
        size = heap_bytes()
        self._heap: Heap | None = Heap(Segment.create(STAGING_BYTES, size))
        self._mesh = Mesh()
        # Ranks can share memory when their names are equal up to the slash.
        self.name = f"{memory_domain()}.{STAGING_BYTES}.{size}/{self._mesh.name}"
        self.pairs: ShmPairs | None = None  # messages between two ranks, once this is connected
        # Collectives that are run wholly in C, once this is connected.
        self.small: SmallCalls | None = None
        self._connected: HostRanks | None = None
        self._facts = _Facts()
        self._traffic = Traffic(0, 0, 0)

    def connect(
        self,
        names: Mapping[int, str],
        *,
        rank: int,
        size: int,
        job: int,
        standing: int,
        check: Callable[[], None],
    ) -> dict[int, Neighbour]:
        """Map the segments of this host's ranks, whose `names`, by rank, they have announced.

        Returns who they are. `size` is the job's, `job` the random number of this ring, `standing`
        the file of this rank's standing. While it waits it calls `check`, which may raise.
        Raises RendezvousError if one of them cannot be reached, ProtocolError if one passed
        something that is no segment of ours.
        """
        assert self._heap is not None
        own = self._heap.segment
        self._who: dict[str, Any] = {"rank": rank, "size": size}
        self._exchange = functions()["shm_exchange"]
        descriptors = self._mesh.connect(
            {each: name.rpartition("/")[2] for each, name in names.items()},
            rank=rank,
            size=size,
            job=job,
            descriptor=own.descriptor,
            standing=standing,
            timeout_s=self._waiting.timeouts.timeout_s,
            check=check,
        )
        # Of this rank one mapping only, so that registered arrays are recognised by address.
        segments, peer = dict.fromkeys(names, own), None
        standings, left = self._mesh.take_standings(), dict[int, Standings]()
        try:
            for peer in sorted(standings):
                left[peer] = Standings(standings.pop(peer))
                left[peer].read()
            for peer in sorted(descriptors):
                segments[peer] = Segment(descriptors.pop(peer))
            peer = None
            ranks = HostRanks(segments, rank, size, self._mesh, self._waiting)
            self._connected = ranks
        except OSError as error:
            for rest in (*descriptors.values(), *standings.values()):
                os.close(rest)
            whose = "this host's ranks" if peer is None else f"rank {peer}"
            text = f"cannot use the memory of {whose}: {error.strerror}"
            raise ProtocolError(text, **self._who, peer=peer) from error
        self.pairs = ShmPairs(ranks, self._heap)
        self.small = ranks.small_calls(SmallKind.COLLECTIVE, ranks.group)
        if self.small is not None:
            self.small.record(self._waiting.events, Kind.ALL_REDUCE.label)
        processes = self._mesh.processes
        return {each: Neighbour(left[each], processes.get(each)) for each in left}

    def empty(self, nbytes: int) -> np.ndarray | None:
        heap = self._heap
        return None if heap is None else heap.empty(nbytes)

    def offset_of(self, array: np.ndarray | None) -> int:
        """Return where in this rank's heap a registered array begins; -1 for none."""
        own = self._ranks.mapped[self._ranks.index]
        return -1 if array is None else address_of(array) - own.heap

    def view(self, index: int, offset: int, nbytes: int) -> np.ndarray:
        """Return an array of bytes in the heap of the host's rank `index`, which has the memory."""
        return self._ranks.mapped[index].view(offset, nbytes)

    def run(self, call: HostCall, source: np.ndarray, target: np.ndarray | None = None) -> None:
        """Run `call` on `source`, contiguous; an all-to-all from there into `target`.

        Raises as `finish`; MismatchError if a rank is in another call, ProtocolError if its memory
        has invalid contents. After any exception the link is broken: `abort`, then `close`.
        """
        ranks, address = self._ranks, address_of(source)
        into = address if target is None else address_of(target)
        self._call = call
        self._arguments = ranks.group, call.address, address, into, ranks.limits
        if not self.resume():
            finish(self, self._waiting, check_s=TIMES.shared_memory_poll_s)

    @property
    def _ranks(self) -> HostRanks:
        assert self._connected is not None
        return self._connected

    def _look(self) -> _Facts:
        functions()["shm_look"](self._ranks.group, ctypes.addressof(self._facts))
        return self._facts

    def abort(self) -> None:
        """Give up, and wake the ranks that wait for this one; the watcher tells them why.

        Registered arrays become private: a rank that was stopped while it wrote into them may
        continue.
        """
        if self._connected is not None:
            functions()["shm_abort"](self._connected.group)
            if self._heap is not None and (left := self._heap.detach()):
                _log.warning(
                    "[%d/%d] has no memory to take %d bytes of registered arrays out of the other "
                    "ranks' reach; a rank that was stopped may still write into them",
                    *(*self._who.values(), left),
                )

    def traffic(self) -> Traffic:
        """Return what was written to and read from shared memory so far; from any thread."""
        ranks = self._connected  # Which stays as it is, whoever closes the link meanwhile.
        if ranks is not None and self.pairs is not None:
            # Not into `_facts`, which a `run` in another thread may be reading.
            facts, messages = _Facts(), self.pairs.traffic()
            functions()["shm_look"](ranks.group, ctypes.addressof(facts))
            self._traffic = Traffic(
                int(facts.progress),
                int(facts.bytes_sent) + messages.bytes_sent,
                int(facts.bytes_received) + messages.bytes_received,
            )
        return self._traffic

    def close(self) -> None:
        """Leave; memory is freed with the last registered array."""
        self._mesh.close()
        if self.small is not None:
            self.small.close()
        self.traffic()
        if self.pairs is not None:
            self.pairs.close()
        # The link itself may live much longer.
        self._heap = self._connected = None

    # --- The present call, while another rank holds it up ---------------------------------------

    def resume(self) -> bool:
        status: int = self._exchange(*self._arguments)
        if status not in (DONE, WAITING):
            raise self._error(status)
        return status == DONE

    def state(self) -> State:
        """The steps of all ranks, and the rank that was late."""
        facts = self._look()
        peer = self._ranks.members[facts.peer]
        return State(int(facts.progress), peer, self.named(peer))

    def named(self, peer: int) -> str:
        return self._ranks.named(peer)

    def lost(self, waited_s: float) -> int | None:
        """A rank whose process has ended and that has not finished the step."""
        arrived = functions()["shm_has_arrived"]
        group, members = self._ranks.group, self._ranks.members
        late = (rank for rank in self._mesh.gone() if not arrived(group, members.index(rank)))
        return next(late, None)

    def where(self, peer: int) -> dict[str, Any]:
        facts, step = self._look(), "meeting in shared memory"
        if facts.steps:
            # All steps may be done, while the end of the call is still waited for.
            step = f"segment {min(facts.step + 1, facts.steps)} of {facts.steps} in shared memory"
        operation = Kind(self._call.header.kind).label
        return self._ranks.where(peer, operation, int(facts.sequence), step)

    def _error(self, status: int) -> RingReduceError:
        facts = self._look()
        peer = self._ranks.members[facts.peer]
        ours = replace(self._call.header, sequence=int(facts.sequence))
        return self._ranks.error(status, wire.decode(facts.theirs), ours, self.where(peer))
