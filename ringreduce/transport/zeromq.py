"""The ring over ZeroMQ: sockets to and from neighbours, the clock, and what stops a loop.

Each rank binds a PULL socket for every connection that another rank makes to it, and connects
a PUSH socket to each of those it sends to (`ringreduce.transport.channel`): `streams` of them
to the next rank, and one to the ranks 2, 4, 8, ... places ahead, for the exchanges. The
compiled loops (`ringreduce.transport.loop`, `.exchange`) do the work; this file decides what
they leave open: whether a neighbour is merely slow, gone, or of another opinion.

Threads: libzmq's for I/O, `streams` of them in each link's own context; they end in `close`.
A link is used by one thread at a time (the communicator holds a lock).

Memory: a call's buffer is lent to libzmq until `run` returns. When `run` fails, libzmq may
still hold pieces of it; the link keeps the array alive until its context is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import zmq

from ringreduce.pure import schedule, wire
from ringreduce.transport import exchange, inherited, libzmq, loop
from ringreduce.transport.base import ExchangeCall, Flow, RingCall, Traffic
from ringreduce.transport.channel import Incoming, Outgoing, join_ports, split_ports
from ringreduce.transport.news import NEWS_BYTES_MAX, read_goodbye, read_news, write_news
from ringreduce.transport.security import Security
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import (
    ClosedError,
    CorruptionError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    RendezvousError,
    RingReduceError,
)
from ringreduce.vocabulary.times import milliseconds

__all__ = ["ZmqLink", "distances"]

_Call = RingCall | ExchangeCall


class _Dry(NamedTuple):
    """A channel that has been waited on for a while.

    Attributes:
        channel: which.
        arrived: bytes that have come on it, ever.
        since_s: since when no more have.
        looked_s: when that was seen last.
    """

    channel: int
    arrived: int
    since_s: float
    looked_s: float


class ZmqLink:
    """A `Link` over ZeroMQ sockets; see the module for who owns what.

    It listens before the ranks have met, for a ring of all of them; `connect` then says which
    of them its ring is made of, and closes what that does not need.

    Args:
        rank, size: this rank, and the number of ranks of the job.
        bind: address to listen on, such as ``tcp://127.0.0.1:*``.
        segment_bytes: payload of a full frame, equal on all ranks.
        timeout_s: longest wait without any progress.
        streams: connections to the next rank that segments take turns on, equal on all ranks.
        security: who may connect; by default nobody is asked.

    Attributes:
        address: where the sockets listen, for the other ranks' `connect`: an address with the
            ports of the streams and then of the longer distances, separated by commas.

    Raises:
        NativeError: libzmq cannot be called from compiled code.
        RendezvousError: the address cannot be bound.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        bind: str,
        segment_bytes: int,
        timeout_s: float,
        streams: int = 1,
        security: Security | None = None,
    ) -> None:
        libzmq.load()
        libzmq.keep_large_blocks()
        self._rank, self._world_size = rank, size
        # Errors speak of ranks of the job; frames and schedules, of places in the ring.
        self._place, self._members = rank, tuple(range(size))
        self._streams = streams
        # Of each pair of sockets: how far ahead its sender goes.
        self._distances = distances(size, streams)
        self._segment_bytes = segment_bytes
        self._timeout_s = timeout_s
        self._job = self._sequence = 0
        self._has_failed = False
        self._checked = False

        self._context = zmq.Context(io_threads=streams)
        frame_bytes_max = wire.HEADER_BYTES + max(segment_bytes, exchange.EXCHANGE_BYTES_MAX)
        self._incoming: list[Incoming] = []
        self._outgoing: list[Outgoing] = []
        self._security = security or Security(rank=rank, size=size)
        self._authenticator = self._security.authenticator(self._context)
        limits = frame_bytes_max, milliseconds(TIMES.poll_s)
        try:
            for channel in range(len(self._distances)):
                domain = _domain(channel)
                pulling = Incoming(self._context, bind, *limits, self._security, domain)
                self._incoming.append(pulling)
        except zmq.ZMQError as error:
            self._authenticator.close()
            self._context.destroy(linger=0)
            raise RendezvousError(
                f"cannot listen on {bind}: {error.strerror}",
                rank=self._rank,
                size=self._world_size,
                remedy="The rendezvous host must be one of rank 0's own addresses.",
            ) from error
        self.address = join_ports([pulling.address for pulling in self._incoming])
        self._addresses: tuple[str, ...] = ()

        self._state = np.zeros(loop.STATE_WORDS, np.int64)
        self._channels = np.zeros((len(self._distances), loop.CHANNEL_WORDS), np.int64)
        self._channels[:, loop.SOURCE] = loop.NO_SOURCE
        self._released = np.zeros(len(self._distances), np.int64)
        self._message = np.zeros(128, np.uint8)
        self._received = np.zeros(wire.HEADER_WORDS, np.uint64)
        self._control = np.zeros(NEWS_BYTES_MAX, np.uint8)
        self._release = libzmq.count_release_address()
        self._interrupted, self._cause = False, cast("RingReduceError | None", None)
        self._dry: _Dry | None = None
        # Of the call under way, for `flow`: its steps, and the segments of each.
        self._steps, self._segments = 0, 1
        # Buffers of failed calls and control frames, kept until close.
        self._lent: list[np.ndarray] = []
        inherited.watch(self)

    def connect(
        self,
        *,
        job: int,
        addresses: Sequence[str],
        members: Sequence[int] | None = None,
        checked: bool = False,
    ) -> None:
        """Open the ways to the ranks ahead, which have bound their sockets already.

        Args:
            job: 64 bits that only this ring's members know; frames without them are foreign.
            addresses: the `address` of each rank's link.
            members: the ranks of this ring, in its order; all of them by default.
            checked: whether frames carry the checksum of their payload; equal on all members.

        Raises:
            RendezvousError: an address is not that of a link like this one.
        """
        self._job, self._checked = job, checked
        if members is not None:
            self._members, self._place = tuple(members), tuple(members).index(self._rank)
        ports_per_rank = len(self._distances)
        self._distances = distances(self._size, self._streams)
        for unneeded in self._incoming[len(self._distances) :]:
            unneeded.close()
        del self._incoming[len(self._distances) :]
        for channel, distance in enumerate(self._distances):
            peer = self._members[(self._place + distance) % self._size]
            ports = split_ports(addresses[peer])
            if len(ports) != ports_per_rank:
                raise RendezvousError(
                    f"got the address {addresses[peer][:200]!r} of rank {peer}, "
                    f"which has not {ports_per_rank} ports",
                    rank=self._rank,
                    size=self._world_size,
                    peer=peer,
                    remedy="Start all ranks with the same ringreduce.",
                )
            try:
                pushing = Outgoing(self._context, ports[channel], peer, self._security)
            except zmq.ZMQError as error:
                why = zmq.strerror(error.errno or 0)  # Its own text repeats the whole address.
                raise RendezvousError(
                    f"cannot connect to rank {peer} at {ports[channel][:200]!r}: {why}",
                    rank=self._rank,
                    size=self._world_size,
                    peer=peer,
                    remedy=f"Read rank {peer}'s log.",
                ) from error
            self._outgoing.append(pushing)
            self._channels[channel, loop.SENDER] = pushing.socket.underlying
            self._channels[channel, loop.RECEIVER] = self._incoming[channel].socket.underlying
        self._addresses = tuple(addresses[member] for member in self._members)
        for channel in range(len(self._distances)):
            expected = self._security.credentials(self._behind(channel)[0])
            self._authenticator.allow(_domain(channel), expected)

    def lock(self) -> None:
        """Let nobody connect any more; call it once all ranks have taken part in a call.

        A port whose rank has not come within `TIMES.lock_s` stays open for it, with the
        authenticator. Where the kernel cannot shut a port (`ringreduce.transport.door`), libzmq
        refuses everyone who does not find an authenticator.
        """
        if self._context.closed or self._has_failed or not self._outgoing:
            return
        deadline = time.monotonic() + TIMES.lock_s
        sources = self._channels[:, loop.SOURCE].tolist()
        # Each is tried, also after one that has not come.
        if all([p.lock(s, deadline) for p, s in zip(self._incoming, sources, strict=False)]):
            self._authenticator.close()

    @property
    def is_encrypted(self) -> bool:
        """Whether its frames are encrypted, and with that proven to be whole."""
        return self._security.mechanism == "CURVE"

    @property
    def _size(self) -> int:
        """Number of places in this ring."""
        return len(self._members)

    def interrupt(self, cause: RingReduceError | None = None) -> None:
        """Have a `run` or `exchange` in another thread raise at its next slice."""
        self._cause = cause
        self._interrupted = True

    def traffic(self) -> Traffic:
        """What has crossed the link so far."""
        return Traffic(
            frames_received=int(self._state[loop.FRAMES]),
            bytes_sent=int(self._state[loop.BYTES_SENT]),
            bytes_received=int(self._state[loop.BYTES_RECEIVED]),
        )

    def run(self, call: RingCall, buffer: np.ndarray, sequence: int) -> None:
        """Run `call` on `buffer`; see `Link.run`."""
        arguments = (
            self._channels,
            self._streams,
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
            self._checked,
            self._release,
            self._released,
            self._state,
            self._message,
            self._received,
            self._control,
        )
        self._drive(call, loop.run, arguments, buffer, sequence)

    def exchange(self, call: ExchangeCall, rows: np.ndarray, sequence: int) -> None:
        """Run `call` on `rows`; see `Link.exchange`."""
        arguments = (
            self._channels,
            self._streams,
            rows,
            call.distances_array,
            call.counts_array,
            call.outgoing,
            call.incoming,
            self._checked,
            self._state,
            self._message,
            self._received,
            self._control,
        )
        self._drive(call, exchange.run, arguments, rows, sequence)

    def _drive(
        self,
        call: _Call,
        run: Callable[..., int],
        arguments: tuple[Any, ...],
        memory: np.ndarray,
        sequence: int,
    ) -> None:
        """Run a compiled loop to its end, or raise what has stopped it."""
        self._sequence = sequence
        call.number(sequence)
        self._state[: loop.FRAMES] = 0  # where the loop stands: step, segment, started, channel
        try:
            if not self._outgoing or self._has_failed:
                raise ClosedError(
                    "has no connection to the next rank", rank=self._rank, size=self._world_size
                )
            if not call.steps:
                # The root of a broadcast waits for nobody, so it must ask whether anybody is there.
                self.read_events()
                if self._lost_outgoing((1,)):
                    raise self._lost(call)
            status = run(*arguments)
            if status != loop.DONE:
                self._finish(status, run, arguments, call)
        except BaseException:
            self._has_failed = True
            # libzmq may still read from it.
            self._lent.append(memory)
            raise

    def _finish(
        self, status: int, run: Callable[..., int], arguments: tuple[Any, ...], call: _Call
    ) -> None:
        """Go on with a call whose first turn did not reach the end."""
        self._steps, self._segments = call.steps, call.segments(self._segment_bytes)
        try:
            self._go_on(status, run, arguments, call)
        finally:
            self._dry = None

    def _go_on(
        self, status: int, run: Callable[..., int], arguments: tuple[Any, ...], call: _Call
    ) -> None:
        progress, since, doomed = self._progress(), time.monotonic(), False
        while status != loop.DONE:
            if status not in (loop.WAITING, loop.DRAINING):
                raise self._error(status, call)
            now = time.monotonic()
            if self._interrupted:
                if self._cause is not None:
                    raise self._cause
                raise PeerLostError(
                    "closed its communicator in the middle of a collective",
                    **self._where(call, self._rank),
                )
            self._note_dryness(status, now)
            if self._progress() != progress:
                progress, since, doomed = self._progress(), now, False
            elif doomed:
                raise self._lost(call)
            elif now - since >= self._timeout_s:
                raise self._timed_out(status, call, now - since)
            # One more turn after the news: what the peer sent before it left still counts.
            doomed = self._is_neighbour_lost(call, now - since)
            status = run(*arguments)

    def _note_dryness(self, status: int, now: float) -> None:
        """Keep in mind since when not a byte has come on the channel that is waited on."""
        channel = int(self._state[loop.CHANNEL])
        arrived = None
        if status == loop.WAITING:
            self._incoming[channel].read_events()
            arrived = self._arrived_bytes(channel)
        if arrived is None:
            # Unknown counts as in flight: a link that is merely slow must not look dead.
            self._dry = None
        elif (
            self._dry is None
            or (channel, arrived) != self._dry[:2]
            or now - self._dry.looked_s > TIMES.looked_s  # stood still itself
        ):
            self._dry = _Dry(channel, arrived, now, now)
        else:
            self._dry = self._dry._replace(looked_s=now)

    def _arrived_bytes(self, channel: int) -> int | None:
        return self._incoming[channel].arrived_bytes(int(self._channels[channel, loop.SOURCE]))

    def flow(self) -> Flow:
        """Where the link stands; numbers that the loop is changing may be a little old."""
        return Flow(
            done=self._done(),
            sent=tuple(
                (pushing.peer, channel, int(self._channels[channel, loop.SENT]))
                for channel, pushing in enumerate(self._outgoing)
            ),
            waits=self._waits(),
        )

    def _done(self) -> float:
        """The part of the call under way that is done; roughly, since it goes on meanwhile."""
        steps = int(self._state[loop.STEP]) + int(self._state[loop.SEGMENT]) / self._segments
        return min(1.0, steps / max(1, self._steps))

    def _waits(self) -> tuple[int, int, int, float] | None:
        dry, now = self._dry, time.monotonic()
        # A thread that waits for the GIL, and not for a frame, has not looked for long; what it has
        # not taken may have come.
        if (
            dry is None
            or now - dry.looked_s > TIMES.looked_s
            or dry.arrived != self._arrived_bytes(dry.channel)
        ):
            return None
        taken = int(self._channels[dry.channel, loop.TAKEN])
        return self._behind(dry.channel)[0], dry.channel, taken, now - dry.since_s

    def _progress(self) -> tuple[int, int]:
        return int(self._state[loop.FRAMES]), int(self._released.sum())

    def _is_neighbour_lost(self, call: _Call, waited_s: float) -> bool:
        """Whether a neighbour that this call still needs has gone."""
        self.read_events()
        step, started = int(self._state[loop.STEP]), int(self._state[loop.STARTED])
        if step < call.steps and self._is_source_lost(waited_s):
            return True
        # With nothing more to send, a rank ahead that is gone may just have finished before us;
        # if it has not, the rank that waits for it sees that and tells us. Unless that rank waits
        # for us in its turn, or, in the very first call, knows as little as we do.
        if waited_s > TIMES.quiet_s and (self._sequence == 0 or isinstance(call, ExchangeCall)):
            return bool(self._gone())
        needed = call.sends_to(step, started) + ((1,) if self._borrows() else ())
        return bool(self._lost_outgoing(needed))

    def read_events(self) -> None:
        """Take note of what has happened to our connections."""
        for pulling in self._incoming:
            pulling.read_events()
        for pushing in self._outgoing:
            pushing.read_events()

    def _is_source_lost(self, waited_s: float) -> bool:
        """Whether the connection that the frame due must come from has ended."""
        channel = int(self._state[loop.CHANNEL])
        source = int(self._channels[channel, loop.SOURCE])
        return self._incoming[channel].is_lost(source, waited_s > TIMES.quiet_s)

    def _lost_outgoing(self, distances: Sequence[int]) -> list[Outgoing]:
        """Connections over one of `distances` that have ended, the nearest first."""
        return [
            pushing
            for pushing, distance in zip(self._outgoing, self._distances, strict=True)
            if pushing.is_lost and distance in distances
        ]

    def _gone(self) -> list[tuple[int, str]]:
        """Neighbours whose connections have ended, those ahead first; quiet ones count."""
        behind = [
            self._behind(channel)
            for channel, pulling in enumerate(self._incoming)
            if pulling.is_lost(int(self._channels[channel, loop.SOURCE]), True)
        ]
        ahead = self._lost_outgoing(self._distances)
        return [(pushing.peer, pushing.address) for pushing in ahead] + behind

    def _behind(self, channel: int) -> tuple[int, str]:
        """The rank that `channel` receives from, and where that rank listens itself."""
        place = (self._place - self._distances[channel]) % self._size
        return self._members[place], split_ports(self._addresses[place])[channel]

    def _source(self) -> tuple[int, str]:
        """The rank that the channel used last receives from, and where that rank listens."""
        return self._behind(int(self._state[loop.CHANNEL]))

    def _where(self, call: _Call, peer: int | None) -> dict[str, Any]:
        """The fields every error of this call carries."""
        step = min(int(self._state[loop.STEP]), max(0, call.steps - 1))
        return {
            "rank": self._rank,
            "size": self._world_size,
            "peer": peer,
            "operation": call.operation,
            "sequence": self._sequence,
            "step": call.describe_step(step),
        }

    def _timed_out(self, status: int, call: _Call, waited_s: float) -> RingReduceError:
        if status == loop.DRAINING:
            pushing = self._outgoing[0]
            peer, doing = pushing.peer, f"rank {pushing.peer} ({pushing.address}) to take its data"
        else:
            nbytes = format_bytes(int(call.expected(int(self._state[loop.STEP]))[6]))
            peer, address = self._source()
            doing = f"{nbytes} from rank {peer} ({address})"
        return PeerTimeoutError(
            f"waited {waited_s:.1f} s for {doing}",
            **self._where(call, peer),
            remedy=f"Read rank {peer}'s log first; raise RINGREDUCE_TIMEOUT_S "
            f"(now {self._timeout_s:g}) only if it is merely slow.",
        )

    def _lost(self, call: _Call) -> RingReduceError:
        if (news := self._queued_news(call)) is not None:
            return news
        gone = self._gone()
        peer, address = self._source()
        if gone and not self._is_source_lost(self._timeout_s):
            peer, address = gone[0]
        return PeerLostError(
            f"lost the connection with rank {peer} ({address}): "
            "it died, or closed its communicator early",
            **self._where(call, peer),
            remedy=f"Read rank {peer}'s log first.",
        )

    def _error(self, status: int, call: _Call) -> RingReduceError:
        received = wire.decode(self._received)
        peer, _ = self._source()
        where = self._where(call, peer)
        if status == loop.CONTROL:
            return self._told(received, call, peer)
        if status == loop.MISMATCH:
            expected = wire.decode(call.expected(int(self._state[loop.STEP])))
            if wire.will_be_explained(received, expected) and (news := self._await_news(call)):
                return news
            error = MismatchError(wire.disagreement(received, expected, self._name), **where)
            error.signatures = expected.signature, received.signature
            return error
        if status == loop.CORRUPT:
            return self._corrupted(received, call)
        if status == loop.UNSENDABLE:
            self._outgoing[self._state[loop.CHANNEL]].is_lost = True
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
            f"received {what} on {self._incoming[self._state[loop.CHANNEL]].address}",
            **where,
            remedy="Keep other programs and jobs away from this port.",
        )

    def _corrupted(self, received: wire.Header, call: _Call) -> RingReduceError:
        peer, address = self._source()
        return CorruptionError(
            f"received {format_bytes(received.nbytes)} that changed on the way from rank {peer} "
            f"({address}): their CRC-32C is "
            f"0x{int(self._state[loop.COMPUTED]):08x}, rank {peer} sent 0x{received.checksum:08x}; "
            "nothing of them was used",
            **self._where(call, peer),
            remedy="Start again from the last checkpoint. Should it come back, test the memory and "
            f"the network of the hosts of ranks {peer} and {self._rank}, and what lies between.",
        )

    def _name(self, place: int) -> str:
        """What errors call the rank at a place of this ring, as a header gives it."""
        if place < self._size:
            return f"rank {self._members[place]}"
        return f"a rank at place {place}, which is beyond this ring,"

    def _await_news(self, call: _Call) -> RingReduceError | None:
        """What the rank of the channel used last says about the end of the ring, if soon."""
        deadline = time.monotonic() + TIMES.explanation_s
        incoming = self._incoming[int(self._state[loop.CHANNEL])]
        while (left := deadline - time.monotonic()) > 0 and not self._interrupted:
            incoming.socket.poll(milliseconds(min(TIMES.poll_s, left)))
            if (news := self._queued_news(call)) is not None:
                return news
        return None

    def _queued_news(self, call: _Call) -> RingReduceError | None:
        """What another rank has said about the end of the ring, if that is still unread."""
        for channel, pulling in enumerate(self._incoming):
            peer, _ = self._behind(channel)
            while True:
                try:
                    frame = pulling.socket.recv_multipart(zmq.DONTWAIT)[0]
                except zmq.ZMQError:
                    break
                if len(frame) < wire.HEADER_BYTES:
                    continue
                header = wire.decode(np.frombuffer(frame, np.uint64, wire.HEADER_WORDS))
                ours = (header.magic, header.version, header.job) == (
                    wire.MAGIC,
                    wire.WIRE_VERSION,
                    self._job,
                )
                if ours and header.kind >= wire.Kind.ABORT:
                    text = np.frombuffer(frame[wire.HEADER_BYTES :][:NEWS_BYTES_MAX], np.uint8)
                    self._control[: text.size] = text
                    self._state[loop.CONTROL_BYTES] = text.size
                    return self._told(header, call, peer)
        return None

    def _told(self, header: wire.Header, call: _Call, peer: int) -> RingReduceError:
        """The error that a control frame from `peer` stands for."""
        where = self._where(call, peer)
        payload = self._control[: self._state[loop.CONTROL_BYTES]].tobytes()
        if header.kind == wire.Kind.GOODBYE:
            return read_goodbye(payload, **where)
        return read_news(payload, **where)

    def abort(self, cause: RingReduceError) -> None:
        """Tell the ranks ahead why this one gives up; they pass the news on.

        Segments of the failed call leave first, in order, while their memory is still whole.
        """
        self._has_failed = True
        # Where the news came from it need not go: it has gone all the way round.
        told = [pushing.peer != cause.origin for pushing in self._outgoing]
        self._send_control(
            wire.Kind.ABORT, write_news(cause, self._rank), told, TIMES.abort_linger_s
        )
        for channel, pushing in enumerate(self._outgoing):
            if self._borrows_on(channel):
                # The caller may now overwrite the buffer; the neighbour must not get to see that.
                pushing.close()

    def _send_control(
        self, kind: wire.Kind, payload: bytes, wanted: Sequence[bool], linger_s: float
    ) -> None:
        """Send a frame that speaks of the ring itself on `wanted` channels, and see it out.

        On every stream, since a rank ahead may wait on any of them. Waits until it has left
        this process, not for an answer, since the sockets may be closed next. A neighbour
        that is stopped or far away costs at most `linger_s`; one that is gone, nothing.
        """
        header = wire.Header(
            kind=kind, job=self._job, rank=self._place, sequence=0, nbytes=len(payload)
        )
        frame = np.frombuffer(wire.encode(header).tobytes() + payload, np.uint8)
        self._lent.append(frame)
        deadline = time.monotonic() + linger_s
        posted = []
        for channel, pushing in enumerate(self._outgoing):
            pushing.read_events()
            if not wanted[channel] or pushing.is_lost or not pushing.is_open:
                continue
            status = loop.post(
                *(self._channels, channel, frame, self._release, self._released),
                *(self._state, self._message),
            )
            if status == loop.DONE:
                posted.append(channel)
        for channel in posted:
            pushing = self._outgoing[channel]
            while self._borrows_on(channel) and time.monotonic() < deadline:
                pushing.read_events(wait_ms=1)
                if pushing.is_lost:
                    break  # Nobody is there any more.

    def _borrows_on(self, channel: int) -> bool:
        """Whether libzmq still holds memory of ours that has to leave on `channel`."""
        return bool(self._released[channel] < self._channels[channel, loop.BORROWED])

    def _borrows(self) -> bool:
        return any(self._borrows_on(channel) for channel in range(len(self._outgoing)))

    def close_inherited(self) -> None:
        """In a forked child: close its copies of the connections, and nothing else."""
        own = [pulling.address for pulling in self._incoming]
        inherited.close_connections(own + [pushing.address for pushing in self._outgoing])

    def close(self, word: bytes = b"") -> None:
        """Say goodbye to the ranks ahead and free everything; at most about a second."""
        if self._context.closed:
            return
        self._authenticator.close()
        if not self._has_failed:  # otherwise an abort has said more
            self._send_control(
                wire.Kind.GOODBYE, word, [True] * len(self._outgoing), TIMES.linger_s
            )
        # libzmq lets go of what it has encrypted before that has left.
        linger_ms = milliseconds(TIMES.linger_s) if self.is_encrypted else 0
        for pushing in self._outgoing:
            pushing.close(linger_ms)
        for pulling in self._incoming:
            pulling.close()
        self._context.destroy(linger=0)
        self._lent.clear()


def distances(size: int, streams: int) -> tuple[int, ...]:
    """Of each pair of sockets, how far ahead its sender goes: the streams', then the longer."""
    return (1,) * streams + schedule.exchange(size).distances[1:]


def _domain(channel: int) -> str:
    """What the authenticator knows the port of `channel` by."""
    return f"data.{channel}"


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people: ``17 bytes``, ``1.0 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    units = ("bytes", "KiB", "MiB", "GiB")
    power = min(3, (nbytes.bit_length() - 1) // 10)
    return f"{nbytes / 1024**power:.1f} {units[power]}"
