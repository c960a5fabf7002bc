"""Why a call over ZeroMQ is stuck: the error to raise, with the rank to blame and its own cause."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import zmq

from ringreduce.pure import wire
from ringreduce.pure.notification import abort_error, goodbye_error
from ringreduce.pure.patience import Limit
from ringreduce.transport import frames, records
from ringreduce.transport.calls import Call, ExchangeCall
from ringreduce.transport.connections import Connections
from ringreduce.transport.records import LinkRecord
from ringreduce.transport.stalls import Interruption, mismatch_error, timeout_error
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import (
    ClosedError,
    CorruptionError,
    PeerLostError,
    ProtocolError,
    RingReduceError,
)
from ringreduce.vocabulary.times import milliseconds


class Diagnosis:
    """Finds the errors of one link; `interruption` ends the wait for an explanation."""

    def __init__(
        self,
        connections: Connections,
        record: LinkRecord,
        timeout_s: float,
        interruption: Interruption,
    ) -> None:
        self._connections, self._record = connections, record
        self._timeout_s, self._interruption = timeout_s, interruption

    def where(self, call: Call, peer: int | None) -> dict[str, Any]:
        """The fields that every error of this call has."""
        step = min(self._record.step, max(0, call.steps - 1))
        return {
            "rank": self._connections.rank,
            "size": self._connections.world_size,
            "peer": peer,
            "operation": call.operation,
            "sequence": call.sequence,
            "step": call.describe_step(step),
        }

    def waits_for(self, status: int) -> int:
        """The rank that a call which is not done waits for."""
        if status == records.DRAINING:
            return self._connections.outgoing[0].peer
        return self._source()[0]

    def lost_neighbour(self, call: Call, waited_s: float) -> int | None:
        """A lost neighbour that this call still needs; None if none is known."""
        known = self._connections
        known.read_events()
        step, started = self._record.step, self._record.started
        channel = self._record.channel
        if step < call.steps and known.is_source_lost(channel, waited_s):
            return known.behind(channel)[0]
        # With nothing left to send, a lost rank ahead may just have finished before this one; if
        # it died, the rank that waits for it notices and notifies all. Except where that rank also
        # waits for this one (an exchange), or, in the first call, cannot know yet either.
        if waited_s > TIMES.quiet_s and (call.sequence == 0 or isinstance(call, ExchangeCall)):
            return next((peer for peer, _ in known.gone()), None)
        borrows = any(known.borrows(channel) for channel in range(len(known.outgoing)))
        needed = call.sends_to(step, started) + ((1,) if borrows else ())
        return next((pushing.peer for pushing in known.lost_outgoing(needed)), None)

    def timed_out(self, status: int, call: Call, waited_s: float, limit: Limit) -> RingReduceError:
        """The error of a call that has made no progress up to `limit`."""
        if status == records.DRAINING:
            ahead = self._connections.outgoing[0]
            peer, due = ahead.peer, f"rank {ahead.peer} ({ahead.address}) to take its data"
        else:
            nbytes = format_bytes(int(call.expected(self._record.step)[6]))
            peer, address = self._source()
            due = f"{nbytes} from rank {peer} ({address})"
        return timeout_error(due, waited_s, limit, **self.where(call, peer))

    def lost(self, call: Call) -> RingReduceError:
        """The error of a call with a lost neighbour: its own reason, if it gave one."""
        if (said := self._unread_notification(call)) is not None:
            return said
        gone = self._connections.gone()
        peer, address = self._source()
        if gone and not self._connections.is_source_lost(self._record.channel, self._timeout_s):
            peer, address = gone[0]
        return PeerLostError(
            f"lost the connection with rank {peer} ({address}): "
            "it died, or closed its communicator early",
            **self.where(call, peer),
            remedy=f"Read rank {peer}'s log first.",
        )

    def error(self, status: int, call: Call) -> RingReduceError:
        """The error for a status that a loop has returned."""
        record = self._record
        received = wire.decode(record.received)
        peer, _ = self._source()
        where = self.where(call, peer)
        if status == records.CONTROL:
            return self._notified(where)
        if status == records.MISMATCH:
            expected = wire.decode(call.expected(record.step))
            if wire.will_be_explained(received, expected):
                explained = self._await_notification(call)
                if explained is not None:
                    return explained
            return mismatch_error(received, expected, self._name, **where)
        if status == records.UNSENDABLE:
            self._connections.outgoing[record.channel].is_lost = True
            return self.lost(call)
        here = self._connections.incoming[record.channel].address
        return frame_error(status, record, *self._source(), here, where)

    def _source(self) -> tuple[int, str]:
        """The rank that the channel used last receives from, and the address where it listens."""
        return self._connections.behind(self._record.channel)

    def _name(self, place: int) -> str:
        """Name, for errors, of the rank with index `place` in this ring, as in a header."""
        if place < len(self._connections.members):
            return f"rank {self._connections.members[place]}"
        return f"a rank at place {place}, which is beyond this ring,"

    def _await_notification(self, call: Call) -> RingReduceError | None:
        """The error of an abort or goodbye on the channel used last, if it soon arrives."""
        deadline = time.monotonic() + TIMES.explanation_s
        socket = self._connections.incoming[self._record.channel].socket
        while (left_s := deadline - time.monotonic()) > 0 and not self._interruption.is_set:
            socket.poll(milliseconds(min(TIMES.poll_s, left_s)))
            if (said := self._unread_notification(call)) is not None:
                return said
        return None

    def _unread_notification(self, call: Call) -> RingReduceError | None:
        """The error of an abort or goodbye that has arrived and is still unread."""
        deadline = time.monotonic() + TIMES.explanation_s
        for channel in range(len(self._connections.incoming)):
            status = records.DONE
            # A peer that keeps sending must not keep this rank from its own error.
            while status == records.DONE and time.monotonic() < deadline:
                status = frames.skip(ctypes.addressof(self._record), channel)
            if status == records.CONTROL:
                peer, _ = self._connections.behind(channel)
                return self._notified(self.where(call, peer))
        return None

    def _notified(self, where: dict[str, Any]) -> RingReduceError:
        """The error that the abort or goodbye in the link's record stands for."""
        kind = wire.decode(self._record.received).kind
        read = goodbye_error if kind == wire.Kind.GOODBYE else abort_error
        return read(bytes(self._record.control[: self._record.control_bytes]), **where)


def frame_error(
    status: int, record: LinkRecord, peer: int, address: str, here: str, where: dict[str, Any]
) -> RingReduceError:
    """The error for a frame that cannot be sent or read.

    It is from rank `peer`, which listens on `address`, to this one, which listens `here`.
    """
    if status == records.CORRUPT:
        return CorruptionError(
            f"received a frame from rank {peer} ({address}) that does not open with the key of "
            "this connection: it, or one before it, was changed, lost or repeated on the way; "
            "nothing of it was used",
            **where,
            remedy="Start again from the last checkpoint. Should it come back, test the memory and "
            f"the network of the hosts of ranks {peer} and {where['rank']}, and what lies between.",
        )
    if status == records.KEY_ENDED:
        return ClosedError(
            "may seal no more frames with the key of this connection",
            **where,
            remedy="Form a new communicator.",
        )
    if status == records.FAILED:
        text = zmq.strerror(record.errno)
        return ProtocolError(f"got an error from libzmq: {text}", **where)
    received = wire.decode(record.received)
    if status == records.MISSHAPEN:
        what = f"a frame that says {format_bytes(received.nbytes)} and has another length"
    elif received.magic == wire.MAGIC and received.version != wire.WIRE_VERSION:
        what = f"a frame of wire version {received.version}, not {wire.WIRE_VERSION}"
    elif received.magic == wire.MAGIC:
        what = "a frame of another job"
    else:
        what = "bytes that are no frame"
    return ProtocolError(
        f"received {what} on {here}",
        **where,
        remedy="Keep other programs and jobs away from this port.",
    )


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people: ``17 bytes``, ``1.0 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    units = ("bytes", "KiB", "MiB", "GiB")
    power = min(3, (nbytes.bit_length() - 1) // 10)
    return f"{nbytes / 1024**power:.1f} {units[power]}"
