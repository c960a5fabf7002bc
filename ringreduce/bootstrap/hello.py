"""The messages of the rendezvous: typed records as msgpack, no pickle."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ringreduce.pure.networks import are_networks

# Addresses that a rank reports; it sends to few ranks, at a few addresses each.
FAILED_MAX = 512
# Texts from others are cut to this length in errors and logs.
_SHOWN_CHARACTERS = 200
# What decoding raises: ValueError for text that is not UTF-8, RecursionError for endless depth.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class Hello(msgspec.Struct, tag=True):
    """A rank's own message: who it is, whom it expects, where it listens, its settings."""

    version: str
    wire_version: int
    job_id: str
    rank: int
    size: int
    members: tuple[int, ...]
    epoch: int
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


class Table(msgspec.Struct, tag=True, frozen=True):
    """What every rank knows after the rendezvous, in the order of the members.

    Attributes:
        job: 64 random bits in the header of every frame of this ring.
        addresses: where each rank's data sockets listen.
        controls: where each rank's control channel listens.
        standbys: where each rank can be met if the ring has to be formed anew; empty: nowhere.
        hosts: name of each rank's host; equal for ranks that share one.
        memory: name of the memory that each rank can share; empty for none.
        keys: each rank's public key; empty without a secret.
        material: 32 random bytes, of which the keys of frames are made; empty without a secret.
        networks: all addresses of each rank, with prefixes; it listens on the same ports at each.
    """

    job: int
    addresses: tuple[str, ...]
    controls: tuple[str, ...]
    standbys: tuple[str, ...]
    hosts: tuple[str, ...]
    memory: tuple[str, ...]
    keys: tuple[str, ...]
    material: bytes
    networks: tuple[tuple[str, ...], ...]


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


def read_hello(data: bytes) -> Hello | None:
    """The hello in `data`; None if it is something else."""
    try:
        hello = msgspec.msgpack.decode(data, type=Hello)
    except _UNREADABLE:
        return None
    return hello if are_networks(hello.networks) else None


def read_report(data: bytes) -> Report | None:
    """The report in `data`; None if it is something else."""
    try:
        return msgspec.msgpack.decode(data, type=Report)
    except _UNREADABLE:
        return None


def read_reports(data: bytes) -> Reports | Refusal | None:
    """The first rank's answer to the reports; None if it is no such."""
    try:
        return msgspec.msgpack.decode(data, type=Reports | Refusal)
    except _UNREADABLE:
        return None


def read_answer(data: bytes, size: int) -> Table | Refusal | None:
    """The first rank's answer in `data`; None if it is no such, or a table not of `size` ranks."""
    try:
        answer = msgspec.msgpack.decode(data, type=Table | Refusal)
    except _UNREADABLE:
        return None
    if isinstance(answer, Table):
        columns = [
            *(answer.addresses, answer.controls, answer.standbys),
            *(answer.hosts, answer.memory, answer.keys, answer.networks),
        ]
        if any(len(column) != size for column in columns):
            return None
        if not all(map(are_networks, answer.networks)):
            return None
    return answer


def shown(value: object) -> str:
    """Text from an untrusted sender, shortened and safe for a terminal."""
    return str(value)[:_SHOWN_CHARACTERS].encode("unicode_escape").decode()
