"""The ring over ZeroMQ: its channels, and what drives the compiled loops over them.

Each rank binds a PULL socket for every connection that another rank makes to it, and connects a
PUSH socket to each of those it sends to (`ringreduce.transport.channel`): `streams` of them to the
next rank, and one each to the ranks 2, 4, 8, ... positions ahead, for the exchanges.

One thread at a time uses a link (the communicator holds a lock); `traffic` and `flow` may be called
from any thread.
"""

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.pure import wire
from ringreduce.pure.liveness import Flow
from ringreduce.pure.membership import Membership
from ringreduce.pure.schedule import channel_distances
from ringreduce.pure.watcher_messages import SentToNext
from ringreduce.transport import frames, libzmq, loop, records
from ringreduce.transport.channel import Incoming, Outgoing, announced_ports, join_ports
from ringreduce.transport.diagnosis import format_bytes, frame_error, lost_error
from ringreduce.transport.link_calls import Call, ExchangeCall, Traffic
from ringreduce.transport.listening import Bind
from ringreduce.transport.security import Security
from ringreduce.transport.sockets import Sockets
from ringreduce.transport.stalls import StalledCall, State, Waiting, finish
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ClosedError, RingReduceError


class ZmqLink(StalledCall):
    """One-way channels over ZeroMQ: to the next ranks, and from the previous ones.

    It listens on `bind` before the ranks have met, for a ring of `members_max` of them; `connect`
    then names its members and closes the sockets not needed. Frames have `segment_bytes` of
    payload, and are spread over `streams` connections to the next rank, both equal on all ranks.
    `address` tells the other ranks' `connect` where the sockets listen: one port each.
    """

    def __init__(
        self,
        *,
        bind: Bind,
        segment_bytes: int,
        waiting: Waiting,
        streams: int = 1,
        security: Security,
        members_max: int | None = None,
    ) -> None:
        frames.load()
        self._rank, self._who, self._streams = security.rank, security.who, streams
        # By channel: first the streams, then the longer distances.
        self._distances = channel_distances(members_max or security.size, streams)
        self.records = (records.ChannelRecord * len(self._distances))()
        longest = frames.SEALED_OVERHEAD_BYTES + max(segment_bytes, loop.EXCHANGE_BYTES_MAX)
        self.sockets = Sockets(security.data, bind, longest, streams)
        self._incoming = self.sockets.incoming
        self._outgoing = self.sockets.outgoing  # Empty until `connect`.
        # The members, in the ring's order, whose places frames and schedules give.
        self._members: tuple[int, ...] = ()
        self._where: dict[int, str] = {}  # their first ports
        try:
            for channel, record in enumerate(self.records):
                self.sockets.listen(record, channel, f"data.{channel}")
        except BaseException:
            self.sockets.close(0)
            raise
        self.address = join_ports([pulling.address for pulling in self._incoming])
        self._scratch = np.empty(segment_bytes if security.seals else 0, np.uint8)
        self._record = records.LinkRecord(
            channels=ctypes.addressof(self.records),
            channel_count=len(self.records),
            streams=streams,
            segment_bytes=segment_bytes,
            is_sealed=security.seals,
            scratch=self._scratch.ctypes.data,
        )
        self._record_address = ctypes.addressof(self._record)
        self._waiting = waiting
        # The present call's arguments for its loop, and what that has returned.
        self._addresses, self._status = (0, 0, 0), records.WAITING
        self._has_failed = False
        self._lent: list[np.ndarray] = []  # buffers of failed calls, kept until close

    def connect(
        self, *, job: int, addresses: Mapping[int, str], membership: Membership, ranks_here: int
    ) -> None:
        """Connect to the ranks ahead, whose sockets are bound already, by all members' `addresses`.

        The ring is that of `membership`, in its order. Only its members know the 64 bits of `job`;
        frames without them are foreign. `ranks_here` ranks of the job share the cores of this host.
        """
        record = self._record
        record.job, record.epoch = job, membership.epoch
        record.yields = frames.yields(ranks_here)
        # Loaded only now: in shared memory alone nothing compiled is needed.
        record.release = libzmq.release_callback(frees=False).address
        record.free = libzmq.release_callback(frees=True).address
        self._members, expected = membership.members, len(self._distances)
        self._distances = channel_distances(membership.size, self._streams)
        for unneeded in self._incoming[len(self._distances) :]:
            unneeded.close()
            self._incoming.remove(unneeded)
        ports = {
            peer: announced_ports(addresses[peer], expected, peer, self._who)
            for peer in membership.members
        }
        self._where = {peer: its_ports[0] for peer, its_ports in ports.items()}
        for channel, distance in enumerate(self._distances):
            ahead, behind = (membership.ahead(self._rank, hops) for hops in (distance, -distance))
            self.sockets.connect(ports[ahead][channel], ahead, self.records[channel], channel)
            self._incoming[channel].admit(behind)

    def lock(self) -> None:
        """Refuse all further connections; call it once all ranks have taken part in a call.

        A port whose rank has not connected within `TIMES.lock_s` stays open, with the
        authenticator.
        """
        if not self.sockets.is_closed and not self._has_failed and self._outgoing:
            self.sockets.read_events()
            self.sockets.lock_all(time.monotonic() + TIMES.lock_s)

    def traffic(self) -> Traffic:
        record = self._record
        return Traffic(record.frames, record.bytes_sent, record.bytes_received)

    def flow(self) -> Flow:
        flow = self.sockets.flow()
        confirmed = [pushing.sent() for pushing in self._outgoing[: self._streams]]
        known = [count for count in confirmed if count is not None]
        if not confirmed or len(known) < len(confirmed):
            return flow
        # They send at the same time.
        nbytes, seconds = sum(n for n, _ in known), max(s for _, s in known)
        return flow._replace(sent_to_next=SentToNext(self._outgoing[0].peer, nbytes, seconds))

    def run(self, call: Call, memory: np.ndarray, sequence: int) -> None:
        """Run `call` on `memory`, contiguous; the caller owns it again afterwards.

        Raises as `finish`; MismatchError if the previous rank sent a frame of another call,
        CorruptionError if a sealed one has changed on the way or is not the next, ProtocolError if
        what arrived is no frame of this ring. After any exception the link is broken: `abort`, then
        `close`.
        """
        call.number(sequence)
        record = self._record
        record.step = record.segment = record.started = record.channel = 0
        self._call = call
        try:
            if not self._outgoing or self._has_failed:
                raise ClosedError("has no connection to the next rank", **self._who)
            data = memory.__array_interface__["data"][0]
            self._addresses = self._record_address, call.address, data
            if not call.steps:
                # The root of a broadcast receives nothing, so it must check for the next rank here.
                self.sockets.read_events()
                for pushing in self._lost_outgoing((1,)):
                    raise lost_error(self.named(pushing.peer), **self.where(pushing.peer))
            if not self.resume():
                finish(self, self._waiting)
        except BaseException:
            self._has_failed = True
            self._lent.append(memory)  # libzmq may read it until its context is closed.
            raise

    def abort(self) -> None:
        """Give up: the memory of the failed call may be overwritten, and must not be sent then."""
        self._has_failed = True
        for pushing in self._outgoing:
            if pushing.borrows:
                pushing.close()

    def close(self) -> None:
        """Free everything, after about a second at most, in which what was sent is written."""
        if not self.sockets.is_closed:
            self.sockets.close(0.0 if self._has_failed else TIMES.linger_s)
            self._lent.clear()

    # --- The present call, while another rank holds it up ---------------------------------------

    def resume(self) -> bool:
        self._status = status = self._call.loop(*self._addresses)
        if status not in (records.DONE, records.WAITING, records.DRAINING):
            raise self._error()
        return status == records.DONE

    def state(self) -> State:
        """The frames received, and the released ones; a frame is due from the channel used last."""
        progress = self._record.frames, sum(channel.released for channel in self.records)
        if self._status == records.DRAINING:
            peer = self._outgoing[0].peer
            return State(progress, peer, f"{self.named(peer)} to take its data")
        source = self._source()
        source.read_events()  # Who has connected matters before the first frame.
        nbytes = format_bytes(int(self._call.expected(self._record.step)[6]))
        due = f"{nbytes} from {self.named(source.peer)}"
        return State(progress, source.peer, due, source.silence)

    def named(self, peer: int) -> str:
        """A rank and where it listens: the first of its ports."""
        return f"rank {peer} ({self._where[peer]})"

    def lost(self, waited_s: float) -> int | None:
        """A lost neighbour that this call still needs; None if none is known."""
        call, source = self._call, self._source()
        self.sockets.read_events()
        step, started = self._record.step, self._record.started
        # Before the first frame, a rank that is late looks like one that is lost.
        is_quiet = waited_s > TIMES.quiet_s
        if step < call.steps and source.is_lost(is_quiet):
            return source.peer
        # With nothing left to send, a lost rank ahead may just have finished before this one; if
        # it died, the rank that waits for it notices and notifies all. Except where that rank also
        # waits for this one (an exchange), or, in the first call, cannot know yet either.
        if is_quiet and (call.sequence == 0 or isinstance(call, ExchangeCall)):
            ahead = [pushing.peer for pushing in self._lost_outgoing(self._distances)]
            behind = [pulling.peer for pulling in self._incoming if pulling.is_lost(True)]
            return next(iter(ahead + behind), None)
        borrows = any(pushing.borrows for pushing in self._outgoing)
        needed = call.sends_to(step, started) + ((1,) if borrows else ())
        return next((pushing.peer for pushing in self._lost_outgoing(needed)), None)

    def where(self, peer: int) -> dict[str, Any]:
        step = min(self._record.step, max(0, self._call.steps - 1))
        return {
            **self._who,
            "peer": peer,
            "operation": wire.Kind(self._call.header.kind).label,
            "sequence": self._call.sequence,
            "step": self._call.schedule.describe_step(step),
        }

    def _lost_outgoing(self, wanted: Sequence[int]) -> list[Outgoing]:
        """Connections over one of the `wanted` distances that have ended, the nearest first."""
        return [
            pushing
            for pushing, distance in zip(self._outgoing, self._distances, strict=True)
            if pushing.is_lost and distance in wanted
        ]

    def _source(self) -> Incoming:
        return self._incoming[int(self._record.channel)]

    def _error(self) -> RingReduceError:
        record, source = self._record, self._source()
        if self._status == records.UNSENDABLE:
            ahead = self._outgoing[record.channel]
            ahead.is_lost = True
            return lost_error(self.named(ahead.peer), **self.where(ahead.peer))
        where = self.where(source.peer)
        if self._status == records.MISMATCH:
            received = wire.decode(record.received)
            expected = wire.decode(self._call.expected(record.step))
            return self._waiting.mismatch(received, expected, self._members, **where)
        there = self._where[source.peer]
        return frame_error(self._status, record, there, source.address, where)
