"""What happens in one session, as spans of time in memory that Python and C write.

It must cost little beside a collective of a few microseconds: no lock, no formatting, only the
monotonic clock. Calls of one session exclude each other, so that there is one writer at a time.
Whoever writes or reads holds the GIL, and a record is written, and all of the memory copied, by one
C function that runs no Python: so a reader in any thread sees whole records only.
"""

from __future__ import annotations

import ctypes
import threading
import time

from ringreduce.pure.spans import (
    CALL,
    CALLS_AT,
    CALLS_KEPT,
    CODES,
    EVENTS_BYTES,
    RUNNING,
    RUNNING_AT,
    SPAN,
    SPAN_BYTES,
    STANDING,
    Present,
    Span,
    decode_spans,
    decode_standing,
)

_MASK = CALLS_KEPT - 1
_NAMES_KEPT = 32

_monotonic = time.monotonic
_get_ident = threading.get_ident
_read_standing = STANDING.unpack_from
_write_standing = STANDING.pack_into
_write_running = RUNNING.pack_into
_write_span = SPAN.pack_into


class Events:
    """The events of one session.

    Attributes:
        address: of its memory, an ``rr_events`` of native/include/ringreduce.h, for native code
            that makes calls itself; valid while this object lives.
    """

    def __init__(self) -> None:
        self._memory = bytearray(EVENTS_BYTES)
        self._pinned = (ctypes.c_char * EVENTS_BYTES).from_buffer(self._memory)
        self.address = ctypes.addressof(self._pinned)
        self._names: dict[int, str] = {}
        self._errors: dict[int, str] = {}
        _write_standing(self._memory, 0, 0, 0, 0.0, 0.0, 0, 0, 0, _monotonic())

    def begin(self, operation: str, nbytes: int) -> None:
        """Record that a collective starts now; its number is how many began before."""
        thread = _get_ident()
        if thread not in self._names:
            self._learn_name(thread)
        _write_running(self._memory, RUNNING_AT, CODES[operation], nbytes, thread, _monotonic())

    def end(self) -> None:
        """Record that the running collective has completed."""
        self._end(1)

    def fail(self, error: BaseException) -> None:
        """Record that the running collective has failed; nothing if none runs."""
        number, *_, operation, _, _, _ = _read_standing(self._memory)
        if operation:
            # Before the record: what is read has its error then. A broken session fails few calls.
            self._errors[number] = f"{type(error).__name__}: {error}"
            self._errors.pop(number - CALLS_KEPT, None)
            self._end(0)

    def _end(self, completed: int) -> None:
        now = _monotonic()
        memory = self._memory
        number, calls, seconds, elapsed, code, nbytes, thread, began = _read_standing(memory)
        if not code:  # Another thread has called `fail`.
            return
        slot = CALLS_AT + (number & _MASK) * SPAN_BYTES
        _write_span(memory, slot, number + 1, CALL, code, 0, number, nbytes, thread, began, now)
        if completed:
            elapsed = now - began
            seconds += elapsed
        _write_standing(memory, 0, number + 1, calls + completed, seconds, elapsed, 0, 0, 0, now)

    def standing(self) -> Present:
        """The call that runs, and totals of those before; from any thread, never raises."""
        return decode_standing(self._memory)

    def calls(self) -> tuple[Present, list[Span]]:
        """The standing, and the last calls that have ended, oldest first; from any thread."""
        copy = bytes(self._memory)
        return decode_standing(copy), sorted(
            decode_spans(copy[CALLS_AT:]), key=lambda span: span.number
        )

    def error(self, number: int) -> str | None:
        """What the call of that number, one of those kept, has failed with."""
        return self._errors.get(number)

    def thread_name(self, thread: int) -> str:
        """The name of a thread that has made a call, or its identity."""
        return self._names.get(thread, str(thread))

    def _learn_name(self, thread: int) -> None:
        # A program that makes a thread for each call must not fill memory.
        if len(self._names) >= _NAMES_KEPT:
            self._names = {}
        self._names[thread] = threading.current_thread().name
