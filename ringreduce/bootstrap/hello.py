"""The messages of the rendezvous: typed records as msgpack, no pickle."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ringreduce.pure.networks import are_networks

# Addresses that a rank reports; it sends to few ranks, at a few addresses each.
FAILED_MAX = 512
# Texts from others are cut to this length in errors and logs.
_SHOWN_CHARACTERS = 200


class Hello(msgspec.Struct, tag=True):
    """A rank's own message: who it is, whom it expects, where it listens, its settings."""

    version: str
    wire_version: int
    job_id: str
    rank: int
    size: int
    address: str
    control: str
    standby: str
    host: str
    memory: str
    settings: dict[str, int]
    encryption: str
    key: str
    # These may differ; "" if unknown.
    python: str = ""
    numpy: str = ""
    networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not are_networks(self.networks):
            raise ValueError("networks that cannot be read")


class Table(msgspec.Struct, tag=True, frozen=True):
    """What every rank knows after the rendezvous, by rank."""

    job: int  # 64 random bits in the header of every frame of this ring
    # addresses, controls: where each rank's data sockets, and its control channel, listen.
    addresses: tuple[str, ...]
    controls: tuple[str, ...]
    # Where each rank can be met if the ring has to be formed anew; empty: nowhere.
    standbys: tuple[str, ...]
    hosts: tuple[str, ...]
    memory: tuple[str, ...]  # name of the memory that each rank can share; empty for none
    keys: tuple[str, ...]  # each rank's public key; empty without a secret
    material: bytes  # 32 random bytes, of which the keys of frames are made; empty without a secret
    # All addresses of each rank, with prefixes; it listens on the same ports at each.
    networks: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        columns = (self.addresses, self.controls, self.standbys, self.hosts, self.memory, self.keys)
        if any(len(column) != len(self.networks) for column in columns):
            raise ValueError("columns of different lengths")
        if not all(map(are_networks, self.networks)):
            raise ValueError("networks that cannot be read")


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
    """What a rank that has the table could not reach, of those that it sends to."""

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
    # ValueError for text that is not UTF-8, RecursionError for endless depth.
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def shown(value: object) -> str:
    """Text from an untrusted sender, shortened and safe for a terminal."""
    return str(value)[:_SHOWN_CHARACTERS].encode("unicode_escape").decode()
