"""What ranks say to each other while they meet: msgpack of typed records, nothing unpickled."""

from __future__ import annotations

import msgspec

__all__ = ["Hello", "Refusal", "Table", "read_answer", "read_hello", "shown"]

# What others say of themselves is shown in errors and logs up to this length.
_SHOWN_CHARACTERS = 200
# What decoding raises: text that is no UTF-8 is a ValueError of Python's, not one of msgspec's,
# and depth that has no end a RecursionError.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class Hello(msgspec.Struct, tag=True):
    """What a rank says of itself: who it is, where it listens, what it was started with."""

    version: str
    wire_version: int
    job_id: str
    rank: int
    size: int
    address: str
    control: str
    host: str
    memory: str
    settings: dict[str, int]
    key: str
    # What may differ and work all the same; "" from a rank that does not say.
    python: str = ""
    numpy: str = ""


class Table(msgspec.Struct, tag=True, frozen=True):
    """What every rank knows once the ranks have met.

    Attributes:
        job: 64 random bits in the header of every frame of this ring.
        addresses: where each rank's sockets listen.
        controls: where each rank's control channel listens.
        hosts: name of each rank's host; equal for ranks that share one.
        memory: what each rank announced of memory that it can share; empty for none.
        keys: each rank's public key; empty without a secret.
    """

    job: int
    addresses: tuple[str, ...]
    controls: tuple[str, ...]
    hosts: tuple[str, ...]
    memory: tuple[str, ...]
    keys: tuple[str, ...]


class Refusal(msgspec.Struct, tag=True):
    """Rank 0 turns a rank away, or gives up: an error's text, class and peer."""

    text: str
    mismatch: bool
    peer: int | None


def read_hello(data: bytes) -> Hello | None:
    """The hello in `data`; None when it is none."""
    try:
        return msgspec.msgpack.decode(data, type=Hello)
    except _UNREADABLE:
        return None


def read_answer(data: bytes, size: int) -> Table | Refusal | None:
    """Rank 0's answer in `data`; None when it is none, or no table of `size` ranks."""
    try:
        answer = msgspec.msgpack.decode(data, type=Table | Refusal)
    except _UNREADABLE:
        return None
    if isinstance(answer, Table):
        columns = (answer.addresses, answer.controls, answer.hosts, answer.memory, answer.keys)
        if any(len(column) != size for column in columns):
            return None
    return answer


def shown(value: object) -> str:
    """What a stranger may have written, safe to be read on a terminal."""
    return str(value)[:_SHOWN_CHARACTERS].encode("unicode_escape").decode()
