"""The messages that ranks exchange beside the data, as MessagePack."""

from typing import Annotated

import msgspec

from ringreduce.vocabulary.errors import ErrorRecord

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
TEXT_MAX = 4096
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
PAIR_CHANNELS = 2  # of each pair of ranks: one for messages, one for parts of collectives
OVERDUE_MAX = 8  # the collectives and some messages of other threads may wait at the same time


class Overdue(msgspec.Struct, frozen=True, array_like=True):
    """The data connection on which a rank waits for a frame."""

    sender: _Rank
    channel: _Rank
    frames: _Count  # received on it in all
    dry_s: _Seconds  # for so long not one byte has arrived


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """A send to rank `peer`, or a recv from it, that a rank waits in."""

    sends: bool
    peer: _Rank
    tag: Annotated[int, msgspec.Meta(ge=0)]

    def describe(self) -> str:
        """Say it as in ``recv from rank 2, tag 7``."""
        return f"{'send to' if self.sends else 'recv from'} rank {self.peer}, tag {self.tag}"


class SentToNext(msgspec.Struct, frozen=True, array_like=True):
    """The connections to the next rank: bytes that arrived there, and how long that took in all.

    Time in which there was nothing to send, or the receiver did not read, does not count.
    """

    receiver: _Rank
    nbytes: _Count
    seconds: _Seconds


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report of itself."""

    rank: _Rank
    number: _Count  # counted up with each heartbeat
    calls: _Count  # collectives it has completed
    operation: _Name  # the one it is in; empty in user code
    since_s: _Seconds  # how long it had been there when it sent this
    # Connections on which it waits for frames, the longest first.
    overdue: Annotated[tuple[Overdue, ...], msgspec.Meta(max_length=OVERDUE_MAX)] = ()
    # Its neighbours that are alive and send no heartbeats: Python's lock is held there.
    locked: Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=2)] = ()
    pending: Pending | None = None  # the send or recv that it waits in, beside its collectives
    stopped_s: _Seconds = 0.0  # for how long completed calls have stopped its own work, in all
    # Its link to the next rank, over sockets, where the system measures it.
    sent_to_next: SentToNext | None = None


class Heartbeats(msgspec.Struct, frozen=True, tag=True):
    """Heartbeats of all ranks that the sender knows, itself first, and how old they are."""

    heartbeats: tuple[tuple[Heartbeat, _Seconds], ...]


class Abort(ErrorRecord, frozen=True, tag=True, kw_only=True):
    """A rank has given up, because of an error that rank `origin` has found."""

    origin: _Rank
    text: _Text


# Why a rank leaves a ring that it forms anew with others, while no call is under way.
FORMS_ANEW = "the ring is formed anew"


class Left(msgspec.Struct, frozen=True, tag=True):
    """A rank has closed its communicator after `calls` calls.

    `why`: the exception for which it has, if any, or `FORMS_ANEW`.
    """

    rank: _Rank
    calls: _Count
    why: _Text = ""


class Acknowledgement(msgspec.Struct, frozen=True, tag=True):
    """A neighbour's abort or leave has arrived here, so that it may close."""


class Value(msgspec.Struct, frozen=True, tag=True):
    """A rank's value of something that should be equal on all ranks; see `pure.claims`."""

    key: Annotated[str, msgspec.Meta(max_length=1024)]
    value: Annotated[bytes, msgspec.Meta(max_length=64)]


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Rank `receiver` listens for rank `sender`; all ranks pass this on to it."""

    receiver: _Rank
    sender: _Rank
    channel: Annotated[int, msgspec.Meta(ge=0, lt=PAIR_CHANNELS)]
    address: Annotated[str, msgspec.Meta(max_length=128, pattern="^tcp://")]


Message = Heartbeats | Abort | Left | Acknowledgement | Value | Listening

_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encode `message` as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode(payload: bytes, size: int) -> Message:
    """Decode a message; `UNREADABLE` if it is none, or names ranks beyond a job of `size`."""
    message: Message = _decoder.decode(payload)
    if isinstance(message, Heartbeats):
        if len(message.heartbeats) > size:
            raise ValueError("has heartbeats of more ranks than there are")
        ranks = [heartbeat.rank for heartbeat, _ in message.heartbeats]
        for heartbeat, _ in message.heartbeats:
            ranks += [overdue.sender for overdue in heartbeat.overdue]
            ranks += heartbeat.locked
            ranks += [heartbeat.pending.peer] if heartbeat.pending is not None else []
            ranks += [heartbeat.sent_to_next.receiver] if heartbeat.sent_to_next is not None else []
    elif isinstance(message, Listening):
        ranks = [message.receiver, message.sender]
    else:
        ranks = [message.rank] if isinstance(message, Left) else []
    if any(rank >= size for rank in ranks):
        raise ValueError("speaks of a rank that does not exist")
    return message


def message_bytes_max(size: int) -> int:
    """No message of a job of `size` ranks is longer."""
    return (1 << 16) + 2048 * size
