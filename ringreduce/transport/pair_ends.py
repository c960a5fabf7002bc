"""One direction of a pair of ranks over ZeroMQ: its socket, its records, how far it has come."""

import ctypes

import numpy as np

from ringreduce.pure import wire
from ringreduce.transport.channel import Incoming, Outgoing
from ringreduce.transport.records import ChannelRecord, LinkRecord, TransferRecord
from ringreduce.transport.segment import address_of
from ringreduce.vocabulary.config import TIMES


class _End:
    """One direction, used by one thread at a time; `like` is the record that those of all have.

    It goes to or comes from rank `peer`; `sequence` numbers its next message. `record` and
    `channel` are for the compiled loops, as of a link with one channel; `transfer` is the present
    memory.
    """

    def __init__(self, like: LinkRecord, peer: int) -> None:
        self.peer, self.sequence = peer, 0
        self.channel = ChannelRecord()
        self.record = LinkRecord.from_buffer_copy(like)
        self.record.channels = ctypes.addressof(self.channel)
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


class Sending(_End):
    """To `peer` on the channel `number`; `socket` is None until its address is known."""

    def __init__(self, like: LinkRecord, peer: int, number: int) -> None:
        super().__init__(like, peer)
        self.number = number
        self.socket: Outgoing | None = None

    @property
    def address(self) -> str:
        """Where the other rank listens; empty until it is known."""
        return "" if self.socket is None else self.socket.address

    @property
    def borrows(self) -> bool:
        return self.socket is not None and self.socket.borrows

    def is_lost(self, has_left: bool, waited_s: float) -> bool:
        """Whether nothing more can be sent; as of the other direction."""
        if has_left or self.socket is None:
            return has_left
        self.socket.read_events()
        return self.socket.is_lost or self.socket.socket.closed


class Receiving(_End):
    """From `peer`, which connects to `socket`."""

    def __init__(self, like: LinkRecord, peer: int) -> None:
        super().__init__(like, peer)
        self.socket: Incoming

    @property
    def address(self) -> str:
        """Where this rank listens."""
        return self.socket.address

    @property
    def is_waiting(self) -> bool:
        """Whether frames of the present memory are due."""
        return bool(self.record.segment * self.record.segment_bytes < max(1, self.transfer.nbytes))

    def is_lost(self, has_left: bool, waited_s: float) -> bool:
        """Whether nothing more can come; `has_left`: the peer has closed its communicator."""
        self.socket.read_events()
        if self.socket.is_lost(waited_s > TIMES.quiet_s):
            return True
        # Its last frames may still be on the way: they are not, if it never connected.
        return has_left and not self.socket.visitors and waited_s > TIMES.linger_s
