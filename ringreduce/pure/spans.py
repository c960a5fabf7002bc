"""The layout of a session's events in memory: what happened from when to when.

Python and C write it alike (`rr_events` of native/include/ringreduce.h), so every number has a
fixed place. Times are in seconds on CLOCK_MONOTONIC, which is `time.monotonic`.

    offset
         0  standing   the call that runs, and what the calls before it were in all
        64  calls      the last `CALLS_KEPT` calls that have ended: call n in slot n % CALLS_KEPT
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ringreduce.pure.wire import Kind

# A training step makes a few calls, so these are twenty steps or more; a power of two, for masking.
CALLS_KEPT = 256

SPAN_BYTES = 64
CALLS_AT = 64
EVENTS_BYTES = CALLS_AT + CALLS_KEPT * SPAN_BYTES

# stamp (1 more than the number of spans before it in its ring; 0: none is here), kind, operation,
# other (a rank or step), number of the call, nbytes, identity of the thread, began, ended
SPAN = struct.Struct("=QHHiQQQdd8x")
# number of the present or next call, calls completed, seconds in those, seconds of the last one,
# operation (0: none runs), nbytes, identity of the thread, when that call began or the last one
# ended
STANDING = struct.Struct("=QQddQQQd")
# The last four of these.
RUNNING = struct.Struct("=QQQd")
RUNNING_AT = STANDING.size - RUNNING.size

# Kinds of spans: RR_SPAN_CALL, ... of native/include/ringreduce.h.
CALL = 1

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
    """What runs and what has run; as `STANDING`, with the operation's name or None."""

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
    return _NAMES.get(code) or f"operation {code}"


def decode_standing(memory: bytes | bytearray) -> Present:
    """The state at the beginning of `memory`."""
    number, calls, seconds, elapsed_s, code, nbytes, thread, since_s = STANDING.unpack_from(memory)
    operation = operation_name(code) if code else None
    return Present(number, calls, seconds, elapsed_s, operation, nbytes, thread, since_s)


def decode_spans(memory: bytes) -> Iterator[Span]:
    """The spans in whole slots, in the order of the slots."""
    for stamp, kind, code, other, number, nbytes, thread, began_s, ended_s in SPAN.iter_unpack(
        memory
    ):
        if stamp:
            name = operation_name(code)
            yield Span(kind, name, other, number, nbytes, thread, began_s, ended_s)
