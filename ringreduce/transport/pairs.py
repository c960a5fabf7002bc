"""Pairs of ranks over ZeroMQ: each connects when it is first needed, without any rank between.

      rank 2: bind PULL  -- Listening(2, 5, channel, address), by the watchers -->  rank 5
      rank 2: PULL       <================= PUSH, connects ======================   rank 5

The first time that a rank needs to receive from another one, it listens for it and notifies it over
the control channel, which works also while that rank is in user code. It needs nobody's leave to
send: sending waits until the address is known. Messages (send, recv) and parts (all_to_all) of a
pair have a channel each, so that a pending message never holds up a collective.

Threads: one at a time uses each direction of a pair for messages, and one the parts of all pairs.
`begin`, `found`, `interrupt` and `traffic` may be called from any thread. There is no socket before
the first use; from then on there are libzmq's two threads and the authenticator's, until `close`.

Memory: as in `ringreduce.transport.zeromq`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from ringreduce.pure import wire
from ringreduce.pure.membership import Membership
from ringreduce.pure.messages import PAIR_CHANNELS, Listening
from ringreduce.pure.notification import ABORT_BYTES_MAX
from ringreduce.pure.patience import Patience
from ringreduce.pure.unreceived import Unreceived
from ringreduce.pure.wire import Header, Kind
from ringreduce.transport import descriptors, frames, inherited, libzmq, records, sodium, transfer
from ringreduce.transport.calls import Traffic
from ringreduce.transport.channel import Incoming, Outgoing
from ringreduce.transport.listening import Bind
from ringreduce.transport.others import Others, PeerPatience
from ringreduce.transport.pair_diagnosis import PairDiagnosis, Wait
from ringreduce.transport.pair_ends import Of, Part, Receiving, Sending
from ringreduce.transport.routes import Routes
from ringreduce.transport.security import Security
from ringreduce.transport.stalls import Interruption
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import RingReduceError
from ringreduce.vocabulary.times import milliseconds

_MESSAGES, _PARTS = range(PAIR_CHANNELS)
# What keys and passwords call channel 0, far above the channels of any ring.
_FIRST_CHANNEL = 1 << 16


class ZmqPairs:
    """This rank's connections with single ranks, made on demand.

    Args:
        bind: where to listen.
        segment_bytes: payload of a full frame, equal on all ranks.
        patience: how long the call of a collective may wait.
        security: this rank, and who may connect.
        membership: whose places calls name; `job` is in every frame.
        routes: at which address each rank is reached.
        ranks_here: how many ranks of the job share the cores of this host.
    """

    def __init__(
        self,
        *,
        bind: Bind,
        segment_bytes: int,
        patience: Patience,
        security: Security,
        membership: Membership,
        job: int,
        routes: Routes,
        ranks_here: int,
    ) -> None:
        self._bind, self._patience, self._security = bind, patience, security
        self._membership, self._rank, self._routes = membership, security.rank, routes
        self._diagnosis = PairDiagnosis(security.rank, security.size, membership)
        self._of = Of(
            segment_bytes, frames.yields(ranks_here), security.seals, job, membership.epoch
        )
        self._frame_bytes_max = frames.SEALED_OVERHEAD_BYTES + max(segment_bytes, ABORT_BYTES_MAX)
        self._interruption = Interruption()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._where = {"rank": security.rank, "size": security.size}
        self._has_failed = self._is_closed = False
        # Guards what follows; also notifies that an address has come.
        self._changed = threading.Condition()
        self._addresses: dict[tuple[int, int], str] = {}
        self._sending: dict[tuple[int, int], Sending] = {}
        self._receiving: dict[tuple[int, int], Receiving] = {}
        # Messages to this rank, known once this is closed.
        self.unreceived: list[Unreceived] = []
        # Memory of failed calls and goodbyes, kept until close.
        self._lent: list[np.ndarray] = []

    def begin(self, others: Others) -> None:
        """The watcher runs, so ranks can be notified; call it before any other method."""
        self._others = self._diagnosis.others = others

    def found(self, listening: Listening) -> None:
        """Another rank listens for this one."""
        with self._changed:
            self._addresses[listening.receiver, listening.channel] = listening.address
            self._changed.notify_all()

    # --- Calls ----------------------------------------------------------------------------------

    def send(self, place: int, header: Header, memory: np.ndarray) -> None:
        """Send `memory`, contiguous, to the rank at `place`; the caller owns it again afterwards.

        `header` is that of the message, apart from its sequence number. Raises as `recv`.
        """
        sending = self._sending_to(self._membership.members[place], _MESSAGES)
        wait = self._message("send", header, sending)
        sending.begin(header, header.rank, sending.sequence, memory)
        sending.sequence += 1
        try:
            self._connect(sending, wait)
            self._drive(sending, None, 0, wait)
        except BaseException:
            self._give_up([sending], memory)
            raise

    def recv(self, place: int, header: Header, memory: np.ndarray) -> None:
        """Receive a message of `header` from the rank at `place` into `memory`, contiguous.

        Raises:
            PeerTimeoutError: there was no progress for longer than `Patience` allows.
            PeerLostError: the rank has died or left, or the ring has failed.
            MismatchError: the rank has sent another message.
            CorruptionError: a sealed frame has changed on the way, or is not the next one.
            ProtocolError: what arrived is not a frame of this pair.

        After any exception all pairs are broken: `abort`, then `close`.
        """
        receiving = self._receiving_from(self._membership.members[place], _MESSAGES)
        wait = self._message("recv", header, receiving)
        receiving.begin(header, header.rank, receiving.sequence, memory)
        receiving.sequence += 1
        self._drive(None, receiving, 0, wait)

    def exchange(
        self,
        header: Header,
        sequence: int,
        sent: Sequence[Part],
        received: Sequence[Part],
        compare: Callable[[], None],
    ) -> None:
        """Send parts of the collective with this number to other ranks, and receive some from them.

        Those of one index go and come over the same distance, the shortest first; empty ones do
        not travel. `header` is that of this rank's frames, apart from their count. `compare` raises
        if ranks are in different calls: each would wait in another place. Raises as `recv`.
        """
        members = self._membership.members
        incoming: list[Receiving | None] = []
        for place, memory in received:
            behind = self._receiving_from(members[place], _PARTS) if memory.size else None
            if behind is not None:
                behind.begin(header, place, sequence, memory)
            incoming.append(behind)
        outgoing: list[Sending | None] = []
        for place, memory in sent:
            ahead = self._sending_to(members[place], _PARTS) if memory.size else None
            if ahead is not None:
                ahead.begin(header, header.rank, sequence, memory)
            outgoing.append(ahead)
        used = [sending for sending in outgoing if sending is not None]
        wait = Wait(Kind(header.kind).label, header, sequence, lambda: self._patience)
        is_connected = all(sending.socket is not None for sending in used)
        try:
            if not is_connected:
                compare()
            for sending in used:
                self._connect(sending, wait)
                if not self._of.is_sealed:
                    # Costs no memory.
                    self._drive(sending, None, transfer.HOLD_ALL, wait)
            if is_connected:
                # Meanwhile parts travel.
                compare()
            # Nobody waits in a cycle: of the ranks at the shortest distance, each receives what
            # another one sends, and whose data nobody takes yet still receives.
            for ahead, behind in zip(outgoing, incoming, strict=True):
                self._drive(ahead, behind, transfer.HOLD_ALL, wait)
            for sending in used:
                if sending.borrows:
                    self._drive(sending, None, 0, wait)
        except BaseException:
            self._give_up(used, *(part.memory for part in sent))
            raise

    def _message(self, operation: str, header: Header, end: Sending | Receiving) -> Wait:
        def patience() -> Patience:
            return PeerPatience(self._patience, self._others, end.peer)

        return Wait(operation, header, end.sequence, patience)

    def _give_up(self, ends: Sequence[Sending], *memory: np.ndarray) -> None:
        """Send nothing more from `memory`, which the caller may overwrite now."""
        self._has_failed = True
        self._lent += memory
        for sending in ends:
            if sending.socket is not None and sending.borrows:
                sending.socket.close()

    # --- Connections ----------------------------------------------------------------------------

    def _receiving_from(self, peer: int, channel: int) -> Receiving:
        """The end that receives from `peer`, which is notified when it is made."""
        found = self._receiving.get((peer, channel))
        if found is not None:
            return found
        with self._changed, descriptors.shortage_explained(**self._where):
            context = self._opened()
            admission = self._security.data.of_channel(_FIRST_CHANNEL + channel)
            domain = f"pair.{peer}.{channel}"
            self._authenticator.allow(domain, admission.credentials(peer))
            limits = self._frame_bytes_max, milliseconds(TIMES.poll_s)
            socket = Incoming(context, self._bind, *limits, admission, domain)
            made = Receiving(self._of, peer, socket, domain)
            if self._of.is_sealed:
                key = self._security.frame_key(peer, self._rank, _FIRST_CHANNEL + channel)
                made.channel.open_key[:] = key
            self._receiving[peer, channel] = made
        self._others.listen(Listening(self._rank, peer, channel, made.address))
        return made

    def _sending_to(self, peer: int, channel: int) -> Sending:
        """The end that sends to `peer`, which may not be connected yet."""
        found = self._sending.get((peer, channel))
        if found is not None:
            return found
        with self._changed:
            found = self._sending.get((peer, channel))
            if found is None:
                found = self._sending[peer, channel] = Sending(self._of, peer, channel)
                if self._of.is_sealed:
                    key = self._security.frame_key(self._rank, peer, _FIRST_CHANNEL + channel)
                    found.channel.seal_key[:] = key
            return found

    def _connect(self, sending: Sending, wait: Wait) -> None:
        """Wait until the peer listens, and connect to it.

        Whether a connection has ended is not asked: the rank that awaits its frames finds out.
        """
        if sending.socket is not None:
            return
        with self._changed:
            while (found := self._addresses.get((sending.peer, sending.number))) is None:
                self._look(sending, None, wait)
                self._changed.wait(TIMES.poll_s)
        failed = self._routes.find({sending.peer: found}, lambda: self._look(sending, None, wait))
        if failed:
            raise self._diagnosis.unreached(sending, wait, failed)
        with self._changed, descriptors.shortage_explained(**self._where):
            sending.address = address = self._routes.lead(sending.peer, found)
            admission = self._security.data.of_channel(_FIRST_CHANNEL + sending.number)
            sending.socket = Outgoing(self._opened(), address, sending.peer, admission)
            sending.channel.sender = sending.socket.socket.underlying

    def _opened(self) -> zmq.Context[zmq.Socket[bytes]]:
        """The context, with room for another socket; under the lock."""
        count = descriptors.needed(0, 1, 1, len(self._bind.hosts))
        descriptors.reserve(count, **self._where)
        if self._context is None:
            if self._is_closed or self._interruption.is_set:
                raise self._interruption.error(**self._where)
            libzmq.load()
            sodium.load()
            libzmq.keep_large_blocks()
            self._context = zmq.Context(io_threads=1)
            self._authenticator = self._security.data.authenticator(self._context)
            inherited.watch(self)
        return self._context

    # --- Waiting --------------------------------------------------------------------------------

    def _drive(
        self, sending: Sending | None, receiving: Receiving | None, held: int, wait: Wait
    ) -> None:
        """Run the compiled loop to its end, or raise the error that stopped it."""
        source = (0, 0) if sending is None else sending.addresses
        target = (0, 0) if receiving is None else receiving.addresses
        while (status := transfer.run(*source, *target, held)) != records.DONE:
            if status not in (records.WAITING, records.DRAINING):
                raise self._diagnosis.error(status, sending, receiving, wait)
            self._look(sending, receiving, wait)
        if receiving is not None and not receiving.is_locked:
            self._lock(receiving)

    def _look(self, sending: Sending | None, receiving: Receiving | None, wait: Wait) -> None:
        """Raise an error if a call that does not progress should wait no longer."""
        others, stall = self._others, wait.stall
        end = receiving if sending is None else sending
        assert end is not None
        if receiving is not None:
            self._lock(receiving)
            if receiving.record.segment * self._of.segment_bytes < max(
                1, receiving.transfer.nbytes
            ):
                end = receiving
        if self._interruption.is_set:
            raise self._interruption.error(**self._diagnosis.where(end, wait))
        received = 0 if receiving is None else receiving.record.frames
        released = 0 if sending is None else sending.channel.released
        limit = stall.look((end.peer, received, released, end.address))
        if stall.lost is not None:
            raise self._diagnosis.lost(end, wait)
        if limit is not None:
            raise self._diagnosis.timed_out(end, wait, limit)
        has_left = others.left(end.peer) is not None
        if isinstance(end, Receiving):
            is_lost = end.is_lost(has_left, stall.waited_s)
        else:
            is_lost = has_left or end.is_lost()
        stall.lost = end.peer if is_lost else None

    def _lock(self, receiving: Receiving) -> None:
        """Let nobody connect any more, once the peer has."""
        if receiving.is_locked or not receiving.socket.lock(receiving.channel.source, 0.0):
            return
        receiving.is_locked = True
        self._authenticator.allow(receiving.domain, None)

    # --- Ending ---------------------------------------------------------------------------------

    def interrupt(self, cause: RingReduceError | None = None) -> None:
        """Make calls in other threads raise when they next check the clock."""
        self._interruption.set(cause)
        with self._changed:
            self._changed.notify_all()

    def abort(self, cause: RingReduceError) -> None:
        """Give up; the watcher notifies the other ranks."""
        self._has_failed = True
        self.interrupt(cause)

    def traffic(self) -> Traffic:
        """What has crossed all pairs so far."""
        with self._changed:
            ends = [*self._sending.values(), *self._receiving.values()]
        found = [(e.record.frames, e.record.bytes_sent, e.record.bytes_received) for e in ends]
        return Traffic(*map(sum, zip((0, 0, 0), *found, strict=True)))

    def close_inherited(self) -> None:
        """In a forked child: forget the keys, and close its copies of the connections."""
        ends = [*self._sending.values(), *self._receiving.values()]
        for end in ends:
            end.forget_keys()
        inherited.close_connections(address for end in ends for address in end.endpoints)

    def close(self, goodbye: bytes = b"") -> None:
        """Say goodbye and free everything, after about a second at most; no call may be running."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
        self._interruption.set(None)
        if self._context is None or not is_first:
            return
        inherited.unwatch(self)
        self._authenticator.close()
        connected = [each for each in self._sending.values() if each.socket is not None]
        if not self._has_failed:
            self._say_goodbye(connected, goodbye)
            deadline = time.monotonic() + TIMES.linger_s
            for (peer, channel), receiving in self._receiving.items():
                if channel == _MESSAGES:
                    has_left = self._others.left(peer) is not None
                    found = receiving.drain(has_left, deadline)
                    self.unreceived += [Unreceived(peer, False, header) for header in found]
        # CURVE copies: libzmq has released borrowed memory before the encrypted copy was written.
        curve = self._security.data.mechanism == "CURVE"
        for sending in connected:
            assert sending.socket is not None
            sending.socket.close(milliseconds(TIMES.linger_s) if curve else 0)
        for receiving in self._receiving.values():
            receiving.socket.close()
        self._context.destroy(linger=0)
        for end in (*self._sending.values(), *self._receiving.values()):
            end.forget_keys()
        self._lent.clear()

    def _say_goodbye(self, connected: Sequence[Sending], goodbye: bytes) -> None:
        """Send `goodbye` behind all messages, and wait until all has been written."""
        deadline = time.monotonic() + TIMES.linger_s
        header = Header(
            kind=Kind.GOODBYE,
            job=self._of.job,
            rank=self._membership.place(self._rank),
            group=self._membership.group,
            epoch=self._of.epoch,
            nbytes=len(goodbye),
        )
        frame = np.frombuffer(wire.encode(header).tobytes() + goodbye, np.uint8)
        self._lent.append(frame)
        address = frame.__array_interface__["data"][0]
        posted = [sending for sending in connected if sending.post(address, frame.size)]
        for sending in posted:
            sending.flush(deadline)
