"""Pairs of ranks over ZeroMQ: each connects when it is first needed, without any rank between.

The first time that a rank needs to receive from another one, it listens for it and notifies it over
the control channel (`Listening`), which works also while that rank is in user code. Sending waits
until the address is known. Messages (send, recv) and parts (all_to_all) of a pair have a channel
each, so that a pending message never holds up a collective.

Threads: one at a time uses each direction of a pair for messages, and one the parts of all pairs.
`found`, `traffic` and `flow` may be called from any thread.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ringreduce.pure import wire
from ringreduce.pure.liveness import Flow
from ringreduce.pure.membership import Membership
from ringreduce.pure.watcher_messages import PAIR_CHANNELS, Listening
from ringreduce.pure.wire import Header, Kind
from ringreduce.transport import descriptors, frames, libzmq, loop, records
from ringreduce.transport.diagnosis import format_bytes, frame_error, lost_error, mismatch_error
from ringreduce.transport.link_calls import Traffic
from ringreduce.transport.listening import Bind
from ringreduce.transport.pair_ends import Receiving, Sending
from ringreduce.transport.routes import Routes
from ringreduce.transport.security import Security
from ringreduce.transport.sockets import Sockets
from ringreduce.transport.stalls import StalledCall, State, Waiting, finish
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import PeerLostError, RingReduceError

_MESSAGES, _PARTS = range(PAIR_CHANNELS)
_FIRST_CHANNEL = 1 << 16  # the number of channel 0, far above the channels of any ring


class ZmqPairs:
    """This rank's connections with single ranks, made on demand.

    Calls name places in `membership`. Its arguments are those of `ZmqLink`; `routes` say at which
    address each rank is reached.
    """

    def __init__(
        self,
        *,
        bind: Bind,
        segment_bytes: int,
        waiting: Waiting,
        security: Security,
        membership: Membership,
        job: int,
        routes: Routes,
        ranks_here: int,
    ) -> None:
        self._bind, self._waiting, self._security = bind, waiting, security
        self._membership, self._rank, self.routes = membership, security.rank, routes
        self._segment_bytes, self._ranks_here, self._job = segment_bytes, ranks_here, job
        self._sockets: Sockets | None = None
        self._who = security.who
        self._has_failed = self._is_closed = False
        # Guards what follows; also notifies that an address has come.
        self._changed = threading.Condition()
        self._addresses: dict[tuple[int, int], str] = {}
        self._sending: dict[tuple[int, int], Sending] = {}
        self._receiving: dict[tuple[int, int], Receiving] = {}
        self._lent: list[np.ndarray] = []  # memory of failed calls, kept until close

    def found(self, listening: Listening) -> None:
        """Another rank listens for this one."""
        with self._changed:
            self._addresses[listening.receiver, listening.channel] = listening.address
            self._changed.notify_all()

    # --- Calls ----------------------------------------------------------------------------------

    def transfer(self, place: int, header: Header, memory: np.ndarray, *, sends: bool) -> None:
        """Send `memory`, contiguous, to the rank at `place`, or receive a message of it into it.

        The caller owns it again afterwards. `header` is that of the message, apart from its
        sequence number. Raises as `ZmqLink.run`. After any exception all pairs are broken: `abort`,
        then `close`.
        """
        peer = self._membership.members[place]
        end = self._sending_to(peer, _MESSAGES) if sends else self._receiving_from(peer, _MESSAGES)
        call = _PairCall(self, "send" if sends else "recv", header, end.sequence)
        end.begin(header, header.rank, end.sequence, memory)
        end.sequence += 1
        if isinstance(end, Receiving):
            call.run(None, end, 0)
            return
        try:
            call.connect(end)
            call.run(end, None, 0)
        except BaseException:
            self._give_up([end], memory)
            raise

    def exchange(
        self,
        header: Header,
        sequence: int,
        sent: Sequence[np.ndarray],
        received: Sequence[np.ndarray],
        compare: Callable[[], None],
    ) -> None:
        """Send parts of the collective with this number to other ranks, and receive some from them.

        `sent` and `received` are by place; this rank's own and empty ones do not travel. `header`
        is that of this rank's frames, apart from their count. `compare` raises if ranks are in
        different calls: each would wait in another place. Raises as `transfer`.
        """
        members, own_place, size = self._membership.members, header.rank, len(sent)
        around = [(own_place + distance) % size for distance in range(1, size)]

        def begun(ends: Any, place: int, sender: int, memory: np.ndarray) -> Any:
            end = ends(members[place], _PARTS) if memory.size else None
            if end is not None:
                end.begin(header, sender, sequence, memory)
            return end

        incoming = [begun(self._receiving_from, p, p, received[p]) for p in reversed(around)]
        outgoing = [begun(self._sending_to, place, own_place, sent[place]) for place in around]
        used: list[Sending] = [sending for sending in outgoing if sending is not None]
        call = _PairCall(self, Kind(header.kind).label, header, sequence)
        is_connected = all(sending.socket is not None for sending in used)
        try:
            if not is_connected:
                compare()
            for sending in used:
                call.connect(sending)
                if not self._security.seals:
                    call.run(sending, None, loop.NO_LIMIT)  # Costs no memory.
            if is_connected:
                compare()  # Meanwhile parts travel.
            # What goes and comes over one distance at a time. Nobody waits in a cycle: of the ranks
            # at the shortest distance, each receives what another one sends, and whose data nobody
            # takes yet still receives.
            for ahead, behind in zip(outgoing, incoming, strict=True):
                call.run(ahead, behind, loop.NO_LIMIT)
            for sending in used:
                if sending.borrows:
                    call.run(sending, None, 0)
        except BaseException:
            self._give_up(used, *sent)
            raise

    def _give_up(self, ends: Sequence[Sending], *memory: np.ndarray) -> None:
        """Send nothing more from `memory`, which the caller may overwrite now."""
        self._has_failed = True
        self._lent += memory
        for sending in ends:
            if sending.socket is not None and sending.borrows:
                sending.socket.close()

    # --- Connections ----------------------------------------------------------------------------

    @cached_property
    def _record(self) -> records.LinkRecord:
        """The record from which those of all ends are copied."""
        return records.LinkRecord(
            channel_count=1,
            streams=1,
            segment_bytes=self._segment_bytes,
            yields=frames.yields(self._ranks_here),
            is_sealed=self._security.seals,
            job=self._job,
            epoch=self._membership.epoch,
            release=libzmq.release_callback(frees=False).address,
            free=libzmq.release_callback(frees=True).address,
        )

    def _receiving_from(self, peer: int, channel: int) -> Receiving:
        """The end that receives from `peer`, which is notified when it is made."""
        receiving = self._receiving.get((peer, channel))
        if receiving is not None:
            return receiving
        with self._changed:
            sockets, made = self._opened(), Receiving(self._record, peer)
            number, domain = _FIRST_CHANNEL + channel, f"pair.{peer}.{channel}"
            made.socket = sockets.listen(made.channel, number, domain)
            made.socket.admit(peer)
            self._receiving[peer, channel] = made
        self._waiting.listen(Listening(self._rank, peer, channel, made.address))
        return made

    def _sending_to(self, peer: int, channel: int) -> Sending:
        """The end that sends to `peer`, which may not be connected yet."""
        if (peer, channel) not in self._sending:
            with self._changed:
                self._sending.setdefault((peer, channel), Sending(self._record, peer, channel))
        return self._sending[peer, channel]

    def find(self, sending: Sending, wait_s: float) -> str:
        """Where the peer listens; waits for that if need be, and is empty if it is not known."""
        key = sending.peer, sending.number
        with self._changed:
            if key not in self._addresses:
                self._changed.wait(wait_s)
            return self._addresses.get(key, "")

    def connect(self, sending: Sending, address: str) -> None:
        """Connect to the peer; the rank that awaits its frames finds out if that has ended."""
        with self._changed:
            number = _FIRST_CHANNEL + sending.number
            sockets = self._opened()
            sending.socket = sockets.connect(address, sending.peer, sending.channel, number)

    def _opened(self) -> Sockets:
        """The sockets, with room for another one; under the lock."""
        count = descriptors.needed(0, 1, 1, len(self._bind.hosts))
        descriptors.reserve(count, **self._who)
        if self._sockets is None:
            if self._is_closed or self._waiting.is_interrupted:
                raise self._waiting.error(**self._who)
            frames.load()
            longest = frames.SEALED_OVERHEAD_BYTES + self._segment_bytes
            self._sockets = Sockets(self._security.data, self._bind, longest)
        return self._sockets

    # --- Ending ---------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give up: `close` will not wait for what is still to be sent."""
        self._has_failed = True

    def traffic(self) -> Traffic:
        with self._changed:
            ends = [*self._sending.values(), *self._receiving.values()]
        counts = [(e.record.frames, e.record.bytes_sent, e.record.bytes_received) for e in ends]
        return Traffic(*map(sum, zip((0, 0, 0), *counts, strict=True)))

    def flow(self) -> Flow:
        return Flow() if self._sockets is None else self._sockets.flow()

    def close(self) -> None:
        """Free everything, after about a second at most; no call may be running."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
        if self._sockets is None or not is_first:
            return
        self._sockets.close(0.0 if self._has_failed else TIMES.linger_s)
        self._lent.clear()


class _PairCall(StalledCall):
    """A message, or the parts of a collective, one after the other."""

    def __init__(self, pairs: ZmqPairs, operation: str, header: Header, sequence: int) -> None:
        self._pairs = pairs
        self._operation, self._header, self._sequence = operation, header, sequence
        self._sending: Sending | None = None
        self._receiving: Receiving | None = None
        self._held, self._status = 0, records.WAITING
        self._is_connecting = False

    def run(self, sending: Sending | None, receiving: Receiving | None, held: int) -> None:
        self._sending, self._receiving, self._held = sending, receiving, held
        self._source = (0, 0) if sending is None else sending.addresses
        self._target = (0, 0) if receiving is None else receiving.addresses
        if not self.resume():
            self._finish()
        if receiving is not None:
            receiving.socket.lock(0.0)

    def connect(self, sending: Sending) -> None:
        """Wait until the peer listens, and connect to it."""
        if sending.socket is not None:
            return
        self._sending, self._receiving, self._is_connecting = sending, None, True
        pairs, peer = self._pairs, sending.peer
        if not pairs.find(sending, 0.0):
            self._finish()
        self._is_connecting = False
        address = pairs.find(sending, 0.0)
        if failed := pairs.routes.find({peer: address}, self._check):
            tried = "; ".join(f"{way.address}: {way.why}" for way in failed)
            raise PeerLostError(
                f"cannot connect to rank {peer} ({tried})",
                **self.where(peer),
                remedy="Let these hosts connect to each other at all ports of RINGREDUCE_PORTS, or "
                "at any.",
            )
        pairs.connect(sending, pairs.routes.lead(peer, address))

    def _finish(self) -> None:
        is_message = self._header.kind in wire.SENDS
        sends = isinstance(self._end, Sending) if is_message else None
        finish(self, self._pairs._waiting, sends=sends)

    def _check(self) -> None:
        waiting = self._pairs._waiting
        if waiting.is_interrupted:
            raise waiting.error(**self.where(self._pairs._rank))

    @property
    def _end(self) -> Sending | Receiving:
        """The end that is waited for now."""
        if self._receiving is not None and (self._sending is None or self._receiving.is_waiting):
            return self._receiving
        assert self._sending is not None
        return self._sending

    def resume(self) -> bool:
        if self._is_connecting:
            assert self._sending is not None
            return bool(self._pairs.find(self._sending, TIMES.poll_s))
        self._status = status = loop.transfer(*self._source, *self._target, self._held)
        if status not in (records.DONE, records.WAITING, records.DRAINING):
            raise self._error()
        return bool(status == records.DONE)

    def state(self) -> State:
        end, sending, receiving = self._end, self._sending, self._receiving
        received = 0 if receiving is None else receiving.record.frames
        released = 0 if sending is None else sending.channel.released
        if receiving is not None:
            receiving.socket.lock(0.0)
            receiving.socket.read_events()
        progress, name = (end.peer, received, released), self.named(end.peer)
        nbytes = format_bytes(end.transfer.nbytes)
        if isinstance(end, Receiving):
            return State(progress, end.peer, f"{nbytes} from {name}", end.socket.silence)
        return State(progress, end.peer, f"{name} to receive {nbytes}")

    def named(self, peer: int) -> str:
        """The rank, and where the receiving one of the two listens."""
        address = self._end.address
        return f"rank {peer} ({address})" if address else f"rank {peer}"

    def lost(self, waited_s: float) -> int | None:
        """The other rank, if its connection has ended or it has left."""
        end = self._end
        has_left = self._pairs._waiting.peers.left(end.peer) is not None
        return end.peer if end.is_lost(has_left, waited_s) else None

    def where(self, peer: int) -> dict[str, Any]:
        is_message = self._header.kind in wire.SENDS
        return {
            **self._pairs._who,
            "peer": peer,
            "operation": self._operation,
            "sequence": self._sequence,
            "step": f"tag {self._header.signature}" if is_message else f"with rank {peer}",
        }

    def _error(self) -> RingReduceError:
        sending, receiving, status = self._sending, self._receiving, self._status
        is_sending = status in (records.UNSENDABLE, records.KEY_ENDED) or (
            sending is not None and sending.record.errno != 0
        )
        end = sending if is_sending or receiving is None else receiving
        assert end is not None
        where = self.where(end.peer)
        if status == records.UNSENDABLE:
            return lost_error(f"rank {end.peer} ({end.address})", **where)
        if status == records.MISMATCH:
            received, expected = wire.decode(end.record.received), wire.decode(end.transfer.header)
            return mismatch_error(received, expected, self._pairs._membership.members, **where)
        return frame_error(status, end.record, end.address, end.address, where)
