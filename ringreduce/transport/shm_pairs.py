"""Messages between two ranks of one host in shared memory; native/src/pairs.c does the work.

Each direction of each pair is used by one thread at a time; they, and the collectives, do not wait
for each other. `close` and `traffic` may be called from any thread. A channel, 130 KiB in the
sender's segment, lives from the first message of a direction until the segment is freed. A message
of up to 32 KiB is copied there; a larger one passes through in pieces, or is read where it is when
it lies in registered memory.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from typing import Any

import numpy as np

from ringreduce.effects.native import fields, u32, u64
from ringreduce.pure import wire
from ringreduce.pure.wire import Header
from ringreduce.transport.link_calls import Traffic
from ringreduce.transport.segment import Heap, address_of, functions, made
from ringreduce.transport.shm_ranks import ABORTED, DONE, WAITING, HostRanks
from ringreduce.transport.small_calls import Kind as SmallKind
from ringreduce.transport.stalls import StalledCall, State, finish
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ArrayError, RingReduceError

_SHARED_INT_MAX = 256  # Python has one object for each of the numbers up to this one


class _Facts(ctypes.Structure):
    _fields_ = fields(sequence=u64, theirs=u64 * 8, progress=u64, aborted=u32, unused=u32)


class ShmPairs:
    """This rank's channels to and from the others of its host."""

    def __init__(self, ranks: HostRanks, heap: Heap) -> None:
        self._ranks: HostRanks | None = ranks
        self._heap: Heap | None = heap
        self._waiting, self._size = ranks.waiting, ranks.size
        # Guards the ends; the sender's memory is opened by one thread at a time.
        self._lock = threading.RLock()
        self._ends: dict[tuple[int, bool], ShmEnd] = {}  # by place, and whether it sends

    def transfer(self, place: int, header: Header, flat: np.ndarray, *, sends: bool) -> None:
        """Send `flat`, contiguous, to the rank at `place` of this host, or receive a message of it.

        Returns when the caller may change it: a message of up to 32 KiB may still be on its way, a
        larger one has been received. `header` has kind, dtype, count, signature and the sender's
        rank; a header object that is used again costs less. Raises as `ShmLink.run`; ArrayError if
        there is no memory to send, and nothing was sent. After any other exception `abort` the
        link, then `close`.
        """
        end = self._ends.get((place, sends)) or self._opened(place, sends)
        end.run(header, flat)

    def _opened(self, place: int, is_sending: bool) -> ShmEnd:
        with self._lock:
            ranks, heap = self._ranks, self._heap
            if ranks is None or heap is None:
                raise self._waiting.error(size=self._size)
            offset = heap.reserve(functions()["pair_channel_bytes"]()) if is_sending else None
            if is_sending and offset is None:
                if self._waiting.is_interrupted:
                    # The ring has failed, and its memory is out of the others' reach.
                    raise self._waiting.error(size=self._size)
                text = f"has no shared memory left to send to rank {ranks.members[place]}"
                remedy = "Free registered arrays (Communicator.empty), or give the job more memory."
                raise ArrayError(text, rank=ranks.rank, size=self._size, remedy=remedy)
            end = self._ends[place, is_sending] = ShmEnd(ranks, place, offset)
            return end

    def end(self, place: int, *, is_sending: bool) -> ShmEnd | None:
        """This rank's end of a direction, once there was a message; None before."""
        return self._ends.get((place, is_sending))

    def traffic(self) -> Traffic:
        """The bytes of all messages that were sent and received so far."""
        with self._lock:
            ends = [(is_sending, end.nbytes) for (_, is_sending), end in self._ends.items()]
        return Traffic(0, *(sum(n for sends, n in ends if sends is way) for way in (True, False)))

    def close(self) -> None:
        """End the calls of other threads; memory goes with the last of them."""
        if not self._waiting.is_interrupted:
            self._waiting.interrupt()
        with self._lock:
            self._ranks = self._heap = None
            for end in self._ends.values():
                end.close()
            self._ends.clear()


class ShmEnd(StalledCall):
    """This rank's end of one direction, from the rank at `place`, or to it.

    `channel` is where in this rank's heap it sends; None: it receives.
    """

    def __init__(self, ranks: HostRanks, place: int, channel: int | None) -> None:
        is_sending = channel is not None
        self._ranks, self._peer, self._is_sending = ranks, ranks.members[place], is_sending
        self._operation = "send" if is_sending else "recv"
        self._call = functions()["pair_send" if is_sending else "pair_receive"]
        self._nbytes = 0
        sender, receiver = (ranks.index, place) if is_sending else (place, ranks.index)
        segments = ctypes.addressof(ranks.segments)
        self._pair = made(self, "pair", len(ranks.members), segments, sender, receiver)
        if channel is not None:
            functions()["pair_open"](self._pair, channel)
        self._facts = _Facts()
        self._header: Header | None = None
        kind = SmallKind.SEND if is_sending else SmallKind.RECEIVE
        # Runs messages wholly in C, by array and tag, where it can.
        self.small = ranks.small_calls(kind, self._pair)

    @property
    def nbytes(self) -> int:
        return self._nbytes + (0 if self.small is None else self.small.nbytes)

    def teach(self, header: Header, array: np.ndarray, tag: int) -> None:
        """Have `small` send or receive arrays like this one with `tag`. Not while a call runs."""
        # A number that Python makes anew each time would not be found again.
        if self.small is not None and tag <= _SHARED_INT_MAX and array.flags.carray:
            words = wire.encode(header)
            self.small.teach(array, tag, words.ctypes.data, words)

    def close(self) -> None:
        """Have no message begin in C any more."""
        if self.small is not None:
            self.small.close()

    def run(self, header: Header, flat: np.ndarray) -> None:
        if header is not self._header:
            self._header, self._words = header, wire.encode(header)
            self._words_address = self._words.ctypes.data
        data, nbytes = address_of(flat), flat.nbytes
        self._arguments = self._pair, self._words_address, data, nbytes, self._ranks.limits
        if not self.resume():
            check_s = TIMES.shared_memory_poll_s
            finish(self, self._ranks.waiting, check_s, sends=self._is_sending)
        self._nbytes += nbytes

    def resume(self) -> bool:
        status: int = self._call(*self._arguments)
        if status not in (DONE, WAITING):
            raise self._error(status)
        return status == DONE

    def state(self) -> State:
        """Return what both ends have done, and the other one."""
        return State(int(self._look().progress), self._peer, self.named(self._peer))

    def named(self, peer: int) -> str:
        return self._ranks.named(peer)

    def lost(self, waited_s: float) -> int | None:
        """The other rank, if its process has ended: only that is waited for."""
        return self._peer if self._peer in self._ranks.mesh.gone() else None

    def where(self, peer: int) -> dict[str, Any]:
        step = "" if self._header is None else f"tag {self._header.signature}"
        return self._ranks.where(peer, self._operation, int(self._look().sequence), step)

    def _look(self) -> _Facts:
        functions()["pair_look"](self._pair, ctypes.addressof(self._facts))
        return self._facts

    def _error(self, status: int) -> RingReduceError:
        facts = self._look()
        peer = self._ranks.members[facts.aborted] if status == ABORTED else self._peer
        assert self._header is not None
        sequence, nbytes = int(facts.sequence), self._arguments[3]
        ours = replace(self._header, sequence=sequence, nbytes=nbytes)
        return self._ranks.error(status, wire.decode(facts.theirs), ours, self.where(peer))
