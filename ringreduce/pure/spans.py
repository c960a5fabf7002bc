"""The layout of a session's events in memory: what happened from when to when.

Python and C write it alike (`rr_events` of native/include/ringreduce.h), so every number has a
fixed place. Times are in seconds on CLOCK_MONOTONIC, which is `time.monotonic`.

    offset
         0  current    the call that runs, and what the calls before it were in all
        64  calls      the last `CALLS_KEPT` calls that have ended: call n in slot n % CALLS_KEPT
     16448  ours       what calls consist of, by threads that hold the GIL
     82176  queued     the same by threads that hold the native queue's lock

    `ours` and `queued` are rings of parts:
         0  count      of all parts so far; part n is in slot n % PARTS_KEPT
        64  seconds    of all parts so far, by kind
       192  slots      the last `PARTS_KEPT`
"""

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringreduce.pure.wire import Kind

# A training step makes a few calls, so these are twenty steps or more; a power of two, for masking.
CALLS_KEPT = 256

SPAN_BYTES = 64
CALLS_AT = 64
PARTS_KEPT = 1024
SECONDS_AT, SPANS_AT = 64, 192
PARTS_BYTES = SPANS_AT + PARTS_KEPT * SPAN_BYTES
OURS_AT = CALLS_AT + CALLS_KEPT * SPAN_BYTES
QUEUED_AT = OURS_AT + PARTS_BYTES
RINGS_AT = (OURS_AT, QUEUED_AT)
EVENTS_BYTES = QUEUED_AT + PARTS_BYTES
# Of calls, `ours` and `queued`: where the count of records is, where slot 0, and how many there
# are. The number of the present or next call is the count of those before.
RECORDS = ((0, CALLS_AT, CALLS_KEPT), *((at, at + SPANS_AT, PARTS_KEPT) for at in RINGS_AT))

# stamp (1 more than the number of spans before it in its ring; 0: none is here), kind, operation,
# other (a rank or bucket), number of the call, nbytes, identity of the thread, began, ended
SPAN = struct.Struct("=QHHiQQQdd8x")
# number of the present or next call, calls completed, seconds in those, seconds of the last one,
# operation (0: none runs), nbytes, identity of the thread, when that call began or the last one
# ended
STANDING = struct.Struct("=QQddQQQd")
RUNNING = struct.Struct("=QQQd")  # the last four of these
RUNNING_AT = STANDING.size - RUNNING.size
COUNT, SECONDS = struct.Struct("=Q"), struct.Struct("=d")


class SpanKind(enum.IntEnum):
    """Kinds of spans: RR_SPAN_CALL, ... of native/include/ringreduce.h, which describes them.

    C does not know the last ones: that a call waited for rank `other`; a training step, from the
    reduction of its first bucket to that of the next step's; messages to or from rank `other`, only
    while they are traced; and, only in traces, that `number` records are missing.
    """

    CALL = 1
    QUEUE = 2
    PACK = 3
    REDUCE = 4
    BLOCKED = 5
    UNPACK = 6
    WAIT = 7
    TRAINING = 8
    SEND = 9
    RECV = 10
    LOST = 11


# Operations by the names of their calls (the first of those that share one), and back.
CODES: dict[str, int] = {kind.label: kind.value for kind in reversed(Kind)}
_NAMES = {kind.value: kind.label for kind in Kind}


class Span(NamedTuple):
    """One thing that happened; as `SPAN`, with the operation's name. `ended_s` is None: it runs."""

    kind: int
    operation: str
    other: int
    number: int
    nbytes: int
    thread: int
    began_s: float
    ended_s: float | None


class Present(NamedTuple):
    """The running and the completed calls; as `STANDING`, with the operation's name or None."""

    number: int
    calls: int
    seconds: float
    elapsed_s: float
    operation: str | None
    nbytes: int
    thread: int
    since_s: float


def operation_name(code: int) -> str:
    """The name of an operation's code; never fails."""
    return _NAMES.get(code) or (f"operation {code}" if code else "")


def decode_standing(memory: bytes | bytearray) -> Present:
    """The state at the beginning of `memory`."""
    number, calls, seconds, elapsed_s, code, nbytes, thread, since_s = STANDING.unpack_from(memory)
    operation = operation_name(code) or None
    return Present(number, calls, seconds, elapsed_s, operation, nbytes, thread, since_s)


def unchanged(numbers: Sequence[int], first: Sequence[bytes], second: Sequence[bytes]) -> bytes:
    """The records of these numbers, from two copies of their slots, taken one after the other.

    One that was written meanwhile may be half an old and half a new one in the first copy, but not
    with the same stamp in the second. Such records are left out.
    """
    copies = zip([COUNT.pack(number + 1) for number in numbers], first, second, strict=True)
    return b"".join(one for stamp, one, two in copies if one == two and one.startswith(stamp))


def decode_spans(memory: bytes) -> Iterator[Span]:
    """The spans in whole slots, in the order of the slots."""
    for stamp, kind, code, *rest in SPAN.iter_unpack(memory):
        if stamp:
            yield Span(kind, operation_name(code), *rest)
