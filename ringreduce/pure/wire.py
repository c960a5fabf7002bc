"""The header in front of every frame: eight 64-bit words, little-endian.

    word 0   magic (32 bits) | version (8) | kind (8) | dtype (8) | op (8)
    word 1   job: 64 bits drawn by rank 0 when this ring formed
    word 2   epoch (16) | group (16) | rank of the sender (32)
    word 3   sequence: number of the collective on this communicator
    word 4   count: elements of the whole buffer, over all chunks
    word 5   step (32) | segment (32)
    word 6   payload bytes in this frame
    word 7   signature: what else must agree, such as the gradient plan or the root

A receiver knows every word in advance from its own call, and compares them before it uses the
payload; nothing is ever sized or chosen by what a peer sends. A group is a part of the job's ranks;
each time that it forms its ring anew, an epoch begins, and a frame of another epoch is dropped. How
frames are encrypted and authenticated says `ringreduce.transport.frames`.
"""

import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.vocabulary.types import DTYPE_NAMES, ReduceOp

MAGIC = 0x46_52_52_52  # "RRRF" in memory
WIRE_VERSION = 5
HEADER_BYTES = 64
# The words above as they are in memory.
_LAYOUT = np.dtype(
    [
        *(("magic", "<u4"), ("version", "u1"), ("kind", "u1"), ("dtype", "u1"), ("op", "u1")),
        *(("job", "<u8"), ("epoch", "<u2"), ("group", "<u2"), ("rank", "<u4")),
        *(("sequence", "<u8"), ("count", "<u8"), ("step", "<u4"), ("segment", "<u4")),
        *(("nbytes", "<u8"), ("signature", "<u8")),
    ]
)
_NAMES = _LAYOUT.names or ()
_BYTES = DTYPE_NAMES.index("uint8") + 1


class Kind(enum.IntEnum):
    """Kinds of calls to which frames belong."""

    __hash__ = int.__hash__  # as in `ReduceOp`

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    BARRIER = 5
    BROADCAST_OBJECT = 6
    ALL_GATHER_OBJECT = 7
    ALL_TO_ALL = 8
    GATHER = 9
    SCATTER = 10
    GATHER_OBJECT = 11
    SCATTER_OBJECT = 12
    SEND = 13
    SEND_OBJECT = 14
    SPLIT = 15
    ALL_TO_ALL_COUNTS = 16

    @property
    def label(self) -> str:
        """Name of the collective as the user calls it."""
        return self.name.lower().removesuffix("_counts")


SENDS = (Kind.SEND, Kind.SEND_OBJECT)  # from one rank to another; their signature is a tag


@dataclass(frozen=True)
class Header:
    """The fields of a header, for errors and tests; the compiled loop uses the words."""

    kind: int
    job: int
    rank: int
    sequence: int = 0
    dtype: int = 0
    op: int = 0
    epoch: int = 0
    group: int = 0
    count: int = 0
    step: int = 0
    segment: int = 0
    nbytes: int = 0
    signature: int = 0
    magic: int = MAGIC
    version: int = WIRE_VERSION

    def describe(self) -> str:
        """The call this frame belongs to: ``all_reduce #7 of 1000 float32, sum``."""
        try:
            name = Kind(self.kind).label
        except ValueError:
            name = f"unknown operation {self.kind}"
        text = f"{name} #{self.sequence}"
        if self.kind == Kind.ALL_TO_ALL_COUNTS:
            return f"{text} with counts"
        if self.kind == Kind.SEND_OBJECT:
            # That of the length of an object travels before the object.
            text += f" of {self.count} bytes" if self.dtype == _BYTES else ""
        elif 1 <= self.dtype <= len(DTYPE_NAMES):
            text += f" of {self.count} {DTYPE_NAMES[self.dtype - 1]}"
        if self.kind in SENDS:
            text += f", tag {self.signature}"
        if self.op in ReduceOp.__members__.values():
            text += f", {ReduceOp(self.op).name.lower()}"
        return text


def encode(header: Header) -> np.ndarray:
    """Encode `header` as 8 words, dtype uint64, in a new array."""
    fields = vars(header)
    return np.array([tuple(fields[name] for name in _NAMES)], _LAYOUT).view("<u8")


def decode(words: Any) -> Header:
    """Decode 64 bytes, or whatever begins with them; never fails, whatever they contain."""
    row = np.frombuffer(words, _LAYOUT, count=1)[0]
    return Header(**dict(zip(_NAMES, row.item(), strict=True)))


def signature_of(*parts: object) -> int:
    """64 bits that differ when `parts` differ: BLAKE2b of their text, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def advice(received: Header, expected: Header) -> str | None:
    """Advise on a disagreement, where a remedy is known."""
    if {received.kind, expected.kind} == {Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_COUNTS}:
        return "Pass counts to all_to_all on all ranks, or on none."
    if received.kind in SENDS and expected.kind in SENDS:
        return (
            "Messages are received in the order in which they were sent, with equal tags, dtypes "
            "and numbers of elements; what send_object sends, by recv_object."
        )
    return None


def disagreement(received: Header, expected: Header, name: Callable[[int], str]) -> str:
    """Describe a disagreement as the rank that expected `expected`; `name` names a rank."""
    sender, ours, theirs = name(received.rank), expected.describe(), received.describe()
    if expected.kind in SENDS:
        ours = ours.replace("send", "recv", 1)
    text = f"is in {ours} while {sender} is in {theirs}"
    if ours != theirs:
        return text
    if received.signature != expected.signature:
        return f"{text} with other gradients, shapes or root"
    if received.rank != expected.rank:
        return f"expected frames of {name(expected.rank)}, not of {sender}"
    return (
        f"{text} at step {received.step}, segment {received.segment} "
        f"instead of {expected.step}, {expected.segment}"
    )
