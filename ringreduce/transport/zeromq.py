"""The ring over ZeroMQ: two sockets, the clock, and what to do when the loop stops.

Each rank binds a PULL socket for the previous rank and connects a PUSH socket to the next
one. The compiled loop (`ringreduce.transport.loop`) does the work; this file decides what
the loop leaves open: whether the neighbour is merely slow, gone, or of another opinion.

Threads: one of libzmq's for I/O in each link's own context; it ends in `close`. A link is
used by one thread at a time (the communicator holds a lock).

Memory: a call's buffer is lent to libzmq until `run` returns. When `run` fails, libzmq may
still hold pieces of it; the link keeps the array alive until its context is gone.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from ringreduce import errors, wire
from ringreduce.errors import (
    ClosedError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    RendezvousError,
    RingReduceError,
)
from ringreduce.schedule import FORWARD
from ringreduce.transport import libzmq, loop
from ringreduce.transport.base import RingCall, Traffic

__all__ = ["RECEIVE_QUEUE_FRAMES", "ZmqLink"]

# Frames that may wait at a receiver. Two keep the wire busy while one is reduced; up to 16
# make no difference beyond noise (docs/performance.md) and cost memory.
RECEIVE_QUEUE_FRAMES = 4
# How long the loop waits for a frame before it asks the clock, the monitors and Python's
# signal handlers: short enough for Ctrl-C and a lost peer, long enough to cost nothing.
_SLICE_MS = 50
_RECONNECT_MS = 24 * 3600 * 1000
# While the ring forms, a connection that has not come yet cannot be told from one that never
# will. Silence of this length then counts against a neighbour that has left a trace of leaving.
_FORMING_QUIET_S = 3.0
# A goodbye, an abort and the segments before it get this long to leave.
_LINGER_S = 1.0
# An abort carries one error's text; more than this is cut off.
_CONTROL_BYTES_MAX = 16384


class _Cause(msgspec.Struct):
    """Payload of an ABORT frame: an error, and the rank that met it first."""

    error: str
    origin: int
    text: str
    peer: int | None


class ZmqLink:
    """A `Link` over two ZeroMQ sockets; see the module for who owns what.

    Args:
        rank, size: place in the ring.
        bind: address to listen on, such as ``tcp://127.0.0.1:*``.
        segment_bytes: payload of a full frame, equal on all ranks.
        timeout_s: longest wait without any progress.

    Raises:
        NativeError: libzmq cannot be called from compiled code.
        RendezvousError: the address cannot be bound.
    """

    def __init__(
        self, *, rank: int, size: int, bind: str, segment_bytes: int, timeout_s: float
    ) -> None:
        libzmq.load()
        libzmq.keep_large_blocks()
        self._rank, self._size = rank, size
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._segment_bytes = segment_bytes
        self._timeout_s = timeout_s
        self._job = self._sequence = 0

        self._context = zmq.Context(io_threads=1)
        self._receiver = self._context.socket(zmq.PULL)
        # Watched from the start, so that no connection comes or goes unseen.
        seen = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._previous_events = self._receiver.get_monitor_socket(int(seen))
        self._visitors: set[int] = set()  # connections to our port, by descriptor
        self._has_visitor_left = False
        self._receiver.set_hwm(RECEIVE_QUEUE_FRAMES)
        self._receiver.setsockopt(zmq.RCVTIMEO, _SLICE_MS)
        self._receiver.setsockopt(zmq.LINGER, 0)
        frame_bytes_max = wire.HEADER_BYTES + max(
            segment_bytes, loop.INLINE_BYTES_MAX, _CONTROL_BYTES_MAX
        )
        self._receiver.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
        self._receiver.setsockopt(zmq.IPV6, int("[" in bind))
        try:
            self._receiver.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RendezvousError(
                f"cannot listen on {bind}: {error.strerror}",
                rank=rank,
                size=size,
                remedy="The rendezvous host must be one of rank 0's own addresses.",
            ) from error
        self.address = self._receiver.getsockopt_string(zmq.LAST_ENDPOINT)
        self._sender: zmq.Socket[bytes] | None = None
        self._next_address = self._previous_address = ""

        self._state = np.zeros(loop.STATE_WORDS, np.int64)
        self._released = np.zeros(1, np.int64)
        self._message = np.zeros(128, np.uint8)
        self._received = np.zeros(wire.HEADER_WORDS, np.uint64)
        self._control = np.zeros(_CONTROL_BYTES_MAX, np.uint8)
        self._release = libzmq.count_release_address()
        # Buffers of failed calls and control frames, kept until close.
        self._lent: list[np.ndarray] = []

    def connect(self, *, job: int, next_address: str, previous_address: str) -> None:
        """Open the way to the next rank, which has bound its socket already.

        Args:
            job: 64 bits that only this ring's members know; frames without them are foreign.
            next_address: where the next rank listens.
            previous_address: where the previous rank listens; for error messages.
        """
        self._job = job
        self._next_address, self._previous_address = next_address, previous_address
        sender = self._context.socket(zmq.PUSH)
        sender.setsockopt(zmq.SNDHWM, 0)
        # A silent reconnect would lose the frames that were under way, so it comes never, or as
        # good as that. "Never" itself, -1, makes libzmq 4.3.5 wait for ever in zmq_ctx_term when
        # the neighbour died before the handshake and a frame was queued.
        sender.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        sender.setsockopt(zmq.IPV6, int("[" in next_address))
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._next_events = sender.get_monitor_socket(int(ended))
        sender.connect(next_address)
        self._sender = sender
        self._next_lost = False

    def traffic(self) -> Traffic:
        """What has crossed the link so far."""
        return Traffic(
            frames_received=int(self._state[loop.FRAMES]),
            bytes_sent=int(self._state[loop.BYTES_SENT]),
            bytes_received=int(self._state[loop.BYTES_RECEIVED]),
        )

    def run(self, call: RingCall, buffer: np.ndarray, sequence: int) -> None:
        """Run `call` on `buffer`; see `Link.run`."""
        self._sequence = sequence
        call.outgoing[3] = call.incoming[3] = sequence
        try:
            self._run(call, buffer)
        except BaseException:
            # libzmq may still read from it.
            self._lent.append(buffer)
            raise

    def _run(self, call: RingCall, buffer: np.ndarray) -> None:
        if self._sender is None:
            raise ClosedError("has no connection to the next rank", rank=self._rank)
        state = self._state
        state[: loop.BORROWED] = 0  # where the loop stands: step, segment, started
        arguments = (
            self._sender.underlying,
            self._receiver.underlying,
            buffer.view(np.uint8),
            call.bounds_array,
            call.schedule.first,
            call.chunks_array,
            call.actions_array,
            call.schedule.offset,
            call.outgoing,
            call.incoming,
            self._segment_bytes,
            call.itemsize,
            call.combine,
            call.finish,
            call.divisor,
            self._release,
            self._released,
            state,
            self._message,
            self._received,
            self._control,
        )
        if not call.schedule.chunks:
            # The root of a broadcast waits for nobody, so it must ask whether anybody is there.
            self._read_events()
            if self._next_lost:
                raise self._lost(call)
        status = loop.run(*arguments)
        if status != loop.DONE:
            self._finish(status, arguments, call)

    def _finish(self, status: int, arguments: tuple[Any, ...], call: RingCall) -> None:
        """Go on with a call whose first turn did not reach the end."""
        progress, since, doomed = self._progress(), time.monotonic(), False
        while status != loop.DONE:
            if status not in (loop.WAITING, loop.DRAINING):
                raise self._error(status, call)
            now = time.monotonic()
            if self._progress() != progress:
                progress, since, doomed = self._progress(), now, False
            elif doomed:
                raise self._lost(call)
            elif now - since >= self._timeout_s:
                raise self._timed_out(status, call, now - since)
            # One more turn after the news: what the peer sent before it left still counts.
            doomed = self._is_neighbour_lost(call, now - since)
            status = loop.run(*arguments)

    def _progress(self) -> tuple[int, int]:
        return int(self._state[loop.FRAMES]), int(self._released[0])

    def _is_neighbour_lost(self, call: RingCall, waited_s: float) -> bool:
        """Whether a neighbour that this call still needs has gone."""
        self._read_events()
        step = int(self._state[loop.STEP])
        receives = step < len(call.schedule.chunks)
        forwards = any(action & FORWARD for action in call.schedule.actions[step:])
        # With nothing more to send, a next rank that is gone may just have finished before us;
        # if it has not, the rank after it sees that and tells us. In the very first call that
        # rank may know as little as we do.
        forming = self._sequence == 0 and waited_s > _FORMING_QUIET_S
        return (receives and self._is_previous_lost(waited_s)) or (
            self._next_lost and (forwards or self._borrows() or forming)
        )

    def _read_events(self) -> None:
        """Take note of what has happened to our connections."""
        while self._previous_events.poll(0):
            event = parse_monitor_message(self._previous_events.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._visitors.add(event["value"])
            else:
                self._visitors.discard(event["value"])
                self._has_visitor_left = True
        while self._next_events.poll(0):
            self._next_events.recv_multipart()
            self._next_lost = True

    def _is_previous_lost(self, waited_s: float) -> bool:
        """Whether the connection that our frames come from has ended.

        Strangers come and go on the listening port, so it is known by its descriptor, which
        the first frame tells. Until then all there is to go by is an empty port.
        """
        if self._state[loop.FRAMES] > 0:
            return int(self._state[loop.SOURCE]) not in self._visitors
        return self._has_visitor_left and not self._visitors and waited_s > _FORMING_QUIET_S

    def _where(self, call: RingCall, peer: int | None) -> dict[str, Any]:
        """The fields every error of this call carries."""
        steps = len(call.schedule.chunks)
        step = min(int(self._state[loop.STEP]), max(0, steps - 1))
        return {
            "rank": self._rank,
            "size": self._size,
            "peer": peer,
            "operation": call.operation,
            "sequence": self._sequence,
            "step": call.schedule.describe_step(step),
        }

    def _timed_out(self, status: int, call: RingCall, waited_s: float) -> RingReduceError:
        if status == loop.DRAINING:
            peer, doing = self._next, f"rank {self._next} ({self._next_address}) to take its data"
        else:
            nbytes = format_bytes(int(call.incoming[6]))
            peer = self._previous
            doing = f"{nbytes} from rank {self._previous} ({self._previous_address})"
        return PeerTimeoutError(
            f"waited {waited_s:.1f} s for {doing}",
            **self._where(call, peer),
            remedy=f"Read rank {peer}'s log first; raise RINGREDUCE_TIMEOUT_S "
            f"(now {self._timeout_s:g}) only if it is merely slow.",
        )

    def _lost(self, call: RingCall) -> RingReduceError:
        if (news := self._queued_news(call)) is not None:
            return news
        peer, address = (
            (self._next, self._next_address)
            if self._next_lost and not self._is_previous_lost(self._timeout_s)
            else (self._previous, self._previous_address)
        )
        return PeerLostError(
            f"lost the connection with rank {peer} ({address}): "
            "it died, or closed its communicator early",
            **self._where(call, peer),
            remedy=f"Read rank {peer}'s log first.",
        )

    def _error(self, status: int, call: RingCall) -> RingReduceError:
        received = wire.decode(self._received)
        where = self._where(call, self._previous)
        if status == loop.CONTROL:
            return self._told(received, call)
        if status == loop.MISMATCH:
            return MismatchError(wire.disagreement(received, wire.decode(call.incoming)), **where)
        if status == loop.UNSENDABLE:
            self._next_lost = True
            return self._lost(call)
        if status == loop.FAILED:
            text = zmq.strerror(int(self._state[loop.ERRNO]))
            return ProtocolError(f"got an error from libzmq: {text}", **where)
        if status == loop.MISSHAPEN:
            what = f"a frame that says {format_bytes(received.nbytes)} and has another length"
        elif received.magic == wire.MAGIC and received.version != wire.WIRE_VERSION:
            what = f"a frame of wire version {received.version}, not {wire.WIRE_VERSION}"
        elif received.magic == wire.MAGIC:
            what = "a frame of another job"
        else:
            what = "bytes that are no frame"
        return ProtocolError(
            f"received {what} on {self.address}",
            **where,
            remedy="Keep other programs and jobs away from this port.",
        )

    def _queued_news(self, call: RingCall) -> RingReduceError | None:
        """What another rank has said about the end of the ring, if that is still unread."""
        while True:
            try:
                frame = self._receiver.recv_multipart(zmq.DONTWAIT)[0]
            except zmq.ZMQError:
                return None
            if len(frame) < wire.HEADER_BYTES:
                continue
            header = wire.decode(np.frombuffer(frame, np.uint64, wire.HEADER_WORDS))
            ours = (header.magic, header.version, header.job) == (
                wire.MAGIC,
                wire.WIRE_VERSION,
                self._job,
            )
            if ours and header.kind >= wire.Kind.ABORT:
                payload = np.frombuffer(frame[wire.HEADER_BYTES :][:_CONTROL_BYTES_MAX], np.uint8)
                self._control[: payload.size] = payload
                self._state[loop.CONTROL_BYTES] = payload.size
                return self._told(header, call)

    def _told(self, header: wire.Header, call: RingCall) -> RingReduceError:
        """The error that a control frame stands for."""
        where = self._where(call, self._previous)
        if header.kind == wire.Kind.GOODBYE:
            return PeerLostError(
                f"was left by rank {self._previous}, which closed its communicator",
                **where,
                remedy=f"Ranks must make the same calls: read rank {self._previous}'s log first.",
            )
        try:
            payload = self._control[: self._state[loop.CONTROL_BYTES]].tobytes()
            cause = msgspec.msgpack.decode(payload, type=_Cause)
        except msgspec.MsgspecError as error:
            broken = ProtocolError("received an abort that cannot be read", **where)
            broken.__cause__ = error
            return broken
        kind = getattr(errors, cause.error, None) if cause.error in errors.__all__ else None
        where["peer"] = cause.peer
        report = f"was told by rank {cause.origin}: {cause.text.removesuffix('.')}"
        return (kind or ProtocolError)(report, **where, origin=cause.origin)

    def abort(self, cause: RingReduceError) -> None:
        """Tell the next rank why this one gives up; it passes the news on.

        Segments of the failed call leave first, in order, while their memory is still whole.
        """
        if self._sender is None:
            return
        origin = cause.origin
        if origin == self._next:
            return  # It came from there: the news has gone all the way round.
        text = str(cause) if origin is None else cause.message.partition(": ")[2]
        report = _Cause(
            error=type(cause).__name__,
            origin=self._rank if origin is None else origin,
            text=text[: _CONTROL_BYTES_MAX // 8],
            peer=cause.peer,
        )
        self._send_control(wire.Kind.ABORT, msgspec.msgpack.encode(report))
        if self._borrows():
            # The caller may now overwrite the buffer; the neighbour must not get to see that.
            self._sender.close(linger=0)
            self._sender = None

    def _send_control(self, kind: wire.Kind, payload: bytes) -> None:
        """Send a frame that speaks of the ring itself, and see it out of this process.

        Waits for that, not for an answer, since the socket may be closed next. A neighbour
        that is stopped or far away costs at most _LINGER_S; one that is gone, nothing.
        """
        assert self._sender is not None
        self._read_events()
        if self._next_lost:
            return
        header = wire.Header(
            kind=kind, job=self._job, rank=self._rank, sequence=0, nbytes=len(payload)
        )
        frame = np.frombuffer(wire.encode(header).tobytes() + payload, np.uint8)
        self._lent.append(frame)
        status = loop.post(
            *(self._sender.underlying, frame, self._release, self._released),
            *(self._state, self._message),
        )
        deadline = time.monotonic() + _LINGER_S
        while status == loop.DONE and self._borrows() and time.monotonic() < deadline:
            if self._next_events.poll(1):
                return  # Nobody is there any more.

    def _borrows(self) -> bool:
        """Whether libzmq still holds memory of ours that has to leave."""
        return bool(self._released[0] < self._state[loop.BORROWED])

    def close(self) -> None:
        """Say goodbye to the next rank and free everything; at most about a second."""
        if self._context.closed:
            return
        if self._sender is not None:
            if not self._lent:  # otherwise an abort has said more
                self._send_control(wire.Kind.GOODBYE, b"")
            self._sender.disable_monitor()
            self._sender.close(linger=0)
        self._receiver.disable_monitor()
        self._receiver.close(linger=0)
        self._context.destroy(linger=0)
        self._lent.clear()


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people: ``17 bytes``, ``1.0 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    units = ("bytes", "KiB", "MiB", "GiB")
    power = min(3, (nbytes.bit_length() - 1) // 10)
    return f"{nbytes / 1024**power:.1f} {units[power]}"
