"""One direction of a pair of ranks over ZeroMQ: a socket, its records, and how far it has come."""

from __future__ import annotations

import ctypes
import time
from typing import NamedTuple

import numpy as np

from ringreduce.pure import wire
from ringreduce.transport import frames, libzmq, records, sodium
from ringreduce.transport.channel import Incoming, Outgoing
from ringreduce.transport.frames import FRAMES_PER_KEY_MAX
from ringreduce.transport.records import NO_SOURCE, ChannelRecord, LinkRecord, TransferRecord
from ringreduce.transport.segment import address_of
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.times import milliseconds


class Of(NamedTuple):
    """What all pairs of a session have in common."""

    segment_bytes: int
    yields: int
    is_sealed: bool
    job: int
    epoch: int


class Part(NamedTuple):
    """A part of an all-to-all: the place of the rank that it goes to or comes from, and memory."""

    place: int
    memory: np.ndarray


class _End:
    """One direction, used by one thread at a time.

    Attributes:
        peer: the rank at the other end.
        record, channel: for the compiled loops, as of a link with one channel.
        transfer: the memory that is sent or received now.
        address: where the receiving one of the two ranks listens; empty until it is known.
        sequence: number of the next message.
    """

    def __init__(self, of: Of, peer: int) -> None:
        self.peer, self.address, self.sequence = peer, "", 0
        self.channel = ChannelRecord(source=NO_SOURCE)
        self.record = LinkRecord(
            channels=ctypes.addressof(self.channel),
            channel_count=1,
            streams=1,
            segment_bytes=of.segment_bytes,
            yields=of.yields,
            is_sealed=of.is_sealed,
            job=of.job,
            epoch=of.epoch,
            release=libzmq.release_callback().address,
            free=libzmq.free_callback().address,
        )
        self.transfer = TransferRecord()
        self.addresses = ctypes.addressof(self.record), ctypes.addressof(self.transfer)
        self._header: wire.Header | None = None

    def begin(self, header: wire.Header, sender: int, sequence: int, memory: np.ndarray) -> None:
        """Prepare for `memory`, contiguous, from place `sender`, with frames of `header`.

        The frames have the sender, sequence number and count that are given, not those of `header`.
        The same header object as the last time costs less.
        """
        record, transfer = self.record, self.transfer
        record.started = record.segment = record.errno = 0
        words = transfer.header
        if header is not self._header:
            self._header = header
            words[:] = wire.encode(header).tolist()
        words[2] = (words[2] & 0xFFFFFFFF) | sender << 32
        words[3], words[4] = sequence, memory.size
        transfer.memory, transfer.nbytes = address_of(memory), memory.nbytes

    @property
    def endpoints(self) -> list[str]:
        """Of this end's connection, once there is one."""
        return [self.address] if self.address else []

    def forget_keys(self) -> None:
        """Seal and open nothing from now on."""
        self.channel.seal_nonce[0] = FRAMES_PER_KEY_MAX
        self.channel.seal_key[:] = self.channel.open_key[:] = bytes(sodium.KEY_BYTES)


class Sending(_End):
    """To `peer` on the channel `number`; `socket` is None until its address is known."""

    def __init__(self, of: Of, peer: int, number: int) -> None:
        super().__init__(of, peer)
        self.number = number
        self.socket: Outgoing | None = None

    @property
    def borrows(self) -> bool:
        """Whether libzmq still holds memory that is to be sent."""
        return bool(self.channel.released < self.channel.borrowed)

    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        if self.socket is None:
            return False
        self.socket.read_events()
        return self.socket.is_lost or not self.socket.is_open

    def post(self, frame: int, nbytes: int) -> bool:
        """Queue the frame at address `frame` behind all others; return whether that was possible.

        It is borrowed.
        """
        return (
            not self.is_lost() and frames.post(self.addresses[0], 0, frame, nbytes) == records.DONE
        )

    def flush(self, deadline: float) -> None:
        """Wait until libzmq has written all, until `deadline` at most."""
        assert self.socket is not None
        while self.borrows and not self.is_lost() and time.monotonic() < deadline:
            self.socket.read_events(wait_ms=1)


class Receiving(_End):
    """From `peer`, which connects to `socket`, for the authenticator `domain`."""

    def __init__(self, of: Of, peer: int, socket: Incoming, domain: str) -> None:
        super().__init__(of, peer)
        self.socket, self.address, self.domain = socket, socket.address, domain
        self.channel.receiver = socket.socket.underlying
        self.is_locked = False

    @property
    def endpoints(self) -> list[str]:
        """Where this end listens."""
        return self.socket.endpoints

    def is_lost(self, has_left: bool, waited_s: float) -> bool:
        """Whether nothing more can come; `has_left`: the peer has closed its communicator."""
        self.socket.read_events()
        if self.socket.is_lost(self.channel.source, waited_s > TIMES.quiet_s):
            return True
        # Its last frames may still be on the way: they are not, if it never connected.
        return has_left and not self.socket.has_visitors and waited_s > TIMES.linger_s

    def drain(self, has_left: bool, deadline: float) -> list[wire.Header]:
        """The first frames of all messages that were not received; they are lost afterwards.

        Of a peer that has left, waits for the goodbye behind the last of them, up to `deadline`.
        """
        found: list[wire.Header] = []
        known, is_over = self.sequence, False
        while time.monotonic() < deadline:
            status = frames.skip(self.addresses[0], 0)
            if status == records.DONE:
                header = wire.decode(self.record.received)
                if header.epoch == self.record.epoch and header.sequence >= known:
                    found.append(header)
                    known = header.sequence + 1
            elif status != records.WAITING or is_over:
                break
            else:
                self.socket.read_events()
                # Once the connection has ended, all that was sent is here.
                is_over = not has_left or not self.socket.has_visitors
                if not is_over:
                    self.socket.socket.poll(milliseconds(TIMES.ended_poll_s))
        return found
