"""The ring over ZeroMQ: drives the compiled loops from a call's first frame to its end.

One thread at a time uses a link (the communicator holds a lock); `interrupt`, `traffic` and `flow`
may be called from any thread.

Memory: libzmq borrows a call's buffer until `run` returns, unless frames are sealed. When `run`
fails, libzmq may still hold pieces of it, so the link keeps the array alive until its context is
closed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ringreduce.effects.events import Events
from ringreduce.pure import wire
from ringreduce.pure.liveness import Flow
from ringreduce.pure.membership import Membership
from ringreduce.pure.notification import encode_abort
from ringreduce.pure.patience import Patience
from ringreduce.pure.spans import SpanKind
from ringreduce.transport import exchange, frames, libzmq, loop, sodium
from ringreduce.transport.calls import Call, ExchangeCall, RingCall, Traffic
from ringreduce.transport.connections import Connections
from ringreduce.transport.diagnosis import Diagnosis
from ringreduce.transport.flow import FlowMeter
from ringreduce.transport.listening import Bind
from ringreduce.transport.records import DONE, DRAINING, WAITING, LinkRecord
from ringreduce.transport.security import Security
from ringreduce.transport.stalls import Interruption, Stall, WaitSpans
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ClosedError, RingReduceError

# Shorter calls end within some tenths of a millisecond; noting their steps would delay them.
_UNTIMED_BYTES = 1 << 16

_Loop = Callable[[int, int, int], int]


class ZmqLink:
    """One-way channels over ZeroMQ: to the next ranks, and from the previous ones.

    It listens on `bind` before the ranks have met, for a ring of `members_max` of them; `connect`
    then names its members and closes the sockets not needed.

    Args:
        segment_bytes: payload of a full frame, equal on all ranks.
        patience: how long a call may wait.
        streams: connections to the next rank that share its segments, equal on all ranks.
        security: this rank, and who may connect.

    Attributes:
        address: where the sockets listen, for the other ranks' `connect`.

    Raises:
        NativeError: libzmq cannot be called from compiled code.
        RendezvousError: the address cannot be bound.
    """

    def __init__(
        self,
        *,
        bind: Bind,
        segment_bytes: int,
        patience: Patience,
        streams: int = 1,
        security: Security,
        members_max: int | None = None,
    ) -> None:
        libzmq.load()
        sodium.load()  # The linker needs it, whether frames are sealed or not.
        libzmq.keep_large_blocks()
        self._connections = Connections(
            bind=bind,
            frame_bytes_max=frames.SEALED_OVERHEAD_BYTES
            + max(segment_bytes, exchange.EXCHANGE_BYTES_MAX),
            streams=streams,
            security=security,
            members_max=security.size if members_max is None else members_max,
        )
        self.address = self._connections.address
        self._scratch = np.empty(segment_bytes if security.seals else 0, np.uint8)
        self._record = LinkRecord(
            channels=ctypes.addressof(self._connections.records),
            channel_count=len(self._connections.records),
            streams=streams,
            segment_bytes=segment_bytes,
            is_sealed=security.seals,
            scratch=self._scratch.ctypes.data,
        )
        self._record_address = ctypes.addressof(self._record)
        self._patience = patience
        self._interruption = Interruption()
        self._events: Events | None = None
        self._waits = WaitSpans(TIMES.poll_s)
        self._step_ends = np.empty(0)
        self._diagnosis = Diagnosis(
            self._connections, self._record, patience.timeout_s, self._interruption
        )
        self._meter = FlowMeter(self._connections, self._record)
        self._has_failed, self._group = False, 0
        # Buffers of failed calls and control frames, kept until close.
        self._lent: list[np.ndarray] = []

    def connect(
        self,
        *,
        job: int,
        addresses: Mapping[int, str],
        membership: Membership,
        ranks_here: int,
    ) -> None:
        """Connect to the ranks ahead, whose sockets are bound already.

        Args:
            job: 64 bits that only this ring's members know; frames without them are foreign.
            addresses: the `address` of each member's link, by rank.
            membership: the ranks of this ring, in its order, and the group that it belongs to.
            ranks_here: how many ranks of the job share the cores of this host.

        Raises:
            RendezvousError: an address is not that of a link like this one.
        """
        record = self._record
        record.job, record.epoch = job, membership.epoch
        record.yields = frames.yields(ranks_here)
        # Loaded only now: in shared memory alone nothing compiled is needed.
        record.release = libzmq.release_callback().address
        record.free = libzmq.free_callback().address
        self._group = membership.group
        self._connections.connect(addresses, membership.members)

    def record(self, events: Events) -> None:
        """Record in `events` the steps of long calls, and which ranks calls wait for."""
        self._events = self._waits.events = events

    def lock(self) -> None:
        """Refuse all further connections; call it once all ranks have taken part in a call."""
        if not self._connections.is_closed and not self._has_failed and self._connections.outgoing:
            self._connections.lock()

    def read_events(self) -> None:
        """Process the events of all connections."""
        self._connections.read_events()

    def interrupt(self, cause: RingReduceError | None = None) -> None:
        """Make a `run` or `exchange` in another thread raise when it next checks the clock."""
        self._interruption.set(cause)

    def traffic(self) -> Traffic:
        """What has crossed the link so far."""
        record = self._record
        return Traffic(record.frames, record.bytes_sent, record.bytes_received)

    def flow(self) -> Flow:
        """Progress of the present call; the loop may be changing the numbers meanwhile."""
        return self._meter.flow()

    def run(self, call: RingCall, buffer: np.ndarray, sequence: int) -> None:
        """Run `call` on `buffer`, contiguous; the caller owns it again afterwards.

        Raises:
            PeerTimeoutError: there was no progress for longer than `Patience` allows.
            PeerLostError: a neighbour's connection ended, or another rank reported that.
            MismatchError: the previous rank sent a frame of another call.
            CorruptionError: a sealed frame has changed on the way, or is not the next one.
            ProtocolError: what arrived is not a frame of this ring.

        After any exception the link is broken: `abort`, then `close`.
        """
        self._drive(call, loop.run, buffer, sequence)

    def exchange(self, call: ExchangeCall, rows: np.ndarray, sequence: int) -> None:
        """Run `call` on `rows`, uint8 of shape (size, row_bytes), contiguous, row 0 filled.

        Afterwards row j is row 0 of the rank j positions before this one. Raises as `run` does.
        """
        self._drive(call, exchange.run, rows, sequence)

    def _drive(self, call: Call, run: _Loop, memory: np.ndarray, sequence: int) -> None:
        """Run a compiled loop to its end, or raise the error that stopped it."""
        call.number(sequence)
        record = self._record
        record.step = record.segment = record.started = record.channel = 0
        known = self._connections
        try:
            if not known.outgoing or self._has_failed:
                raise ClosedError(
                    "has no connection to the next rank", rank=known.rank, size=known.world_size
                )
            if not call.steps:
                # The root of a broadcast receives nothing, so it must check for the next rank here.
                known.read_events()
                if known.lost_outgoing((1,)):
                    raise self._diagnosis.lost(call)
            addresses = self._record_address, call.address, memory.__array_interface__["data"][0]
            began_s = self._time_steps(call, memory.nbytes)
            status = run(*addresses)
            if status != DONE:
                self._resume(status, run, addresses, call)
            if record.step_ends:
                self._record_steps(call, began_s)
        except BaseException:
            self._has_failed = True
            # libzmq may still read this memory.
            self._lent.append(memory)
            raise

    def _time_steps(self, call: Call, nbytes: int) -> float:
        """Have the loop note when steps end, if the call is long; return the time."""
        if self._events is None or nbytes <= _UNTIMED_BYTES or not isinstance(call, RingCall):
            self._record.step_ends = 0
            return 0.0
        if self._step_ends.size < call.steps:
            self._step_ends = np.empty(call.steps)
        self._record.step_ends = self._step_ends.ctypes.data
        return time.monotonic()

    def _record_steps(self, call: Call, began_s: float) -> None:
        assert self._events is not None
        for step, ended_s in enumerate(self._step_ends[: call.steps].tolist()):
            self._events.part(SpanKind.STEP, began_s, ended_s, other=step)
            began_s = ended_s

    def _resume(self, status: int, run: _Loop, addresses: tuple[int, int, int], call: Call) -> None:
        """Continue a call that its loop has not completed at the first attempt."""
        diagnosis, stall = self._diagnosis, Stall(self._patience)
        self._meter.begin(call.steps, call.segments(self._record.segment_bytes))
        try:
            while status != DONE:
                if status not in (WAITING, DRAINING):
                    raise diagnosis.error(status, call)
                if self._interruption.is_set:
                    rank = self._connections.rank
                    raise self._interruption.error(**diagnosis.where(call, rank))
                self._meter.note(is_waiting=status == WAITING)
                released = sum(each.released for each in self._connections.records)
                progress = self._record.frames, released
                self._waits.look(diagnosis.waits_for(status), progress)
                limit = stall.look(progress)
                if stall.lost is not None:
                    raise diagnosis.lost(call)
                if limit is not None:
                    raise diagnosis.timed_out(status, call, stall.waited_s, limit)
                stall.lost = diagnosis.lost_neighbour(call, stall.waited_s)
                status = run(*addresses)
        finally:
            self._meter.end()
            self._waits.end()

    def abort(self, cause: RingReduceError) -> None:
        """Notify the ranks ahead why this one gives up; they forward it.

        Segments of the failed call are sent first, in order, while their memory is intact.
        """
        self._has_failed = True
        # Skip the rank where the cause originated: the notification has gone all the way round.
        channels = [
            channel
            for channel, pushing in enumerate(self._connections.outgoing)
            if pushing.peer != cause.origin
        ]
        payload = encode_abort(cause, self._connections.rank)
        self._send_control(wire.Kind.ABORT, payload, channels, TIMES.abort_linger_s)
        for channel, pushing in enumerate(self._connections.outgoing):
            if self._connections.borrows(channel):
                # The caller may now overwrite the buffer, and the neighbour must not receive that.
                pushing.close()

    def _send_control(
        self, kind: wire.Kind, payload: bytes, channels: Sequence[int], linger_s: float
    ) -> None:
        """Send a frame about the ring itself on `channels`, and wait until it has been written.

        All streams get it, since a rank ahead may wait on any. The sockets may be closed next, so
        this waits until the frame has left this process, but for no answer. A neighbour that is
        stopped or far away costs at most `linger_s`, a lost one nothing.
        """
        known = self._connections
        job = self._record.job
        header = wire.Header(
            kind=kind,
            job=job,
            rank=known.place,
            group=self._group,
            epoch=int(self._record.epoch),
            nbytes=len(payload),
        )
        frame = np.frombuffer(wire.encode(header).tobytes() + payload, np.uint8)
        self._lent.append(frame)
        deadline = time.monotonic() + linger_s
        posted = []
        for channel in channels:
            pushing = known.outgoing[channel]
            pushing.read_events()
            if pushing.is_lost or not pushing.is_open:
                continue
            address = frame.__array_interface__["data"][0]
            if frames.post(self._record_address, channel, address, frame.size) == DONE:
                posted.append(channel)
        for channel in posted:
            pushing = known.outgoing[channel]
            while known.borrows(channel) and not pushing.is_lost and time.monotonic() < deadline:
                pushing.read_events(wait_ms=1)

    def close(self, goodbye: bytes = b"") -> None:
        """Say goodbye to the ranks ahead and free everything; at most about a second."""
        if self._connections.is_closed:
            return
        self._connections.stop_admitting()
        if not self._has_failed:  # Else an abort was sent.
            channels = range(len(self._connections.outgoing))
            self._send_control(wire.Kind.GOODBYE, goodbye, channels, TIMES.linger_s)
        self._connections.close()
        self._lent.clear()
