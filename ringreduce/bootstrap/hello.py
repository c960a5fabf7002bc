"""The messages of the rendezvous: typed records as msgpack, no pickle."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ringreduce.pure.decoding import UNREADABLE
from ringreduce.pure.networks import are_networks

FAILED_MAX = 512  # addresses that a rank reports; it sends to few ranks, at a few addresses each
_SHOWN_CHARACTERS = 200  # texts from others are cut to this length in errors and logs


class Member(msgspec.Struct, kw_only=True, array_like=True):
    """One rank's entry in the table that every rank has after the rendezvous."""

    # address, control: where its data sockets, and its control channel, listen.
    address: str
    control: str
    standby: str  # where it can be met if the ring has to be formed anew; empty: nowhere
    host: str
    memory: str  # name of the memory that it can share; empty for none
    key: str  # its public key; empty without a secret
    # All its addresses, with prefixes; it listens on the same ports at each.
    networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not are_networks(self.networks):
            raise ValueError("networks that cannot be read")


class Hello(Member, tag=True, array_like=False):
    """A rank's own message: who it is, whom it expects, where it listens, its settings."""

    version: str
    wire_version: int
    job_id: str
    rank: int
    size: int
    settings: dict[str, int]
    encryption: str
    # These may differ; "" if unknown.
    python: str = ""
    numpy: str = ""


class Table(msgspec.Struct, tag=True, frozen=True):
    """Rank 0's answer at the rendezvous: all ranks, and the job's keys."""

    job: int  # 64 random bits in the header of every frame of this ring
    members: tuple[Member, ...]  # by rank
    material: bytes  # 32 random bytes, of which the keys of frames are made; empty without a secret


class Refusal(msgspec.Struct, tag=True):
    """The first rank refuses a rank, or gives up: an error's text, class and peer."""

    text: str
    mismatch: bool
    peer: int | None


class Failed(msgspec.Struct, array_like=True, frozen=True):
    """An address of rank `peer` that the sender could not connect to, and why not."""

    peer: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    address: Annotated[str, msgspec.Meta(max_length=64)]
    why: Annotated[str, msgspec.Meta(max_length=64)]


class Report(msgspec.Struct, tag=True, frozen=True):
    """The addresses that a rank with the table could not reach, of ranks that it sends to."""

    failed: Annotated[tuple[Failed, ...], msgspec.Meta(max_length=FAILED_MAX)]


class Reports(msgspec.Struct, tag=True, frozen=True):
    """The first rank's answer once every rank has reported: all reports, by rank."""

    failed: dict[int, tuple[Failed, ...]]


Message = Hello | Table | Refusal | Report | Reports

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def read(data: bytes) -> Message | None:
    """The message in `data`; None if it is something else."""
    try:
        return _DECODER.decode(data)
    except UNREADABLE:
        return None


def shown(value: object) -> str:
    """Text from an untrusted sender, shortened and safe for a terminal."""
    return str(value)[:_SHOWN_CHARACTERS].encode("unicode_escape").decode()
