"""Events of a communicator, as spans of time in memory that Python and C write.

It must cost little beside a collective of a few microseconds: no lock, no formatting, only the
monotonic clock. Calls of one communicator exclude each other: there is one writer at a time.
What writes or reads a call holds the GIL, and a record is written, and all of the memory copied, by
one C function that runs no Python: so a reader in any thread sees whole records only. Parts of
calls are written so too, but those of the native queue under its own lock: see `unchanged`.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from functools import cache

from ringreduce.effects import native
from ringreduce.effects.native import pointer
from ringreduce.pure import spans

_MASK, _CALL = spans.CALLS_KEPT - 1, int(spans.SpanKind.CALL)

_monotonic = time.monotonic
_get_ident = threading.get_ident
_read_standing = spans.STANDING.unpack_from
_write_standing = spans.STANDING.pack_into
_write_running = spans.RUNNING.pack_into
_write_span = spans.SPAN.pack_into
_CALLS_AT, _SPAN_BYTES, _RUNNING_AT = spans.CALLS_AT, spans.SPAN_BYTES, spans.RUNNING_AT


class Events:
    """The events of one communicator, also of rings that take its ring's place."""

    # Records that a collective starts now, given its operation's code and nbytes; its number is how
    # many began before.
    begin: Callable[[int, int], None]
    end: Callable[[], None]  # records that the running collective has completed

    def __init__(self) -> None:
        self._memory = bytearray(spans.EVENTS_BYTES)
        self._pinned = (ctypes.c_char * spans.EVENTS_BYTES).from_buffer(self._memory)
        # The address of its memory, an ``rr_events`` of native/include/ringreduce.h, for native
        # code that makes calls itself; valid while this object lives.
        self.address = ctypes.addressof(self._pinned)
        self._errors: dict[int, str] = {}
        self._formed_s = 0.0
        self.is_traced = False  # whether messages are recorded too
        # Reentrant, since a signal handler may interrupt a thread that holds it.
        self._parts = threading.RLock()
        _write_standing(self._memory, 0, 0, 0, 0.0, 0.0, 0, 0, 0, _monotonic())
        # In C they cost 0.1 us, in Python 0.7.
        if _are_native():
            self.begin = native.method("rr_events_on_begin", self.address)
            self.end = native.method("rr_events_on_end", self.address)
        else:
            self.begin, self.end = self._begin, self._end

    def _begin(self, operation: int, nbytes: int) -> None:
        _write_running(self._memory, _RUNNING_AT, operation, nbytes, _get_ident(), _monotonic())

    def _end(self, completed: int = 1) -> None:
        now = _monotonic()
        memory = self._memory
        number, calls, seconds, elapsed, code, nbytes, thread, began = _read_standing(memory)
        if not code:  # Another thread has called `fail`.
            return
        slot = _CALLS_AT + (number & _MASK) * _SPAN_BYTES
        _write_span(memory, slot, number + 1, _CALL, code, 0, number, nbytes, thread, began, now)
        if completed:
            elapsed = now - began
            seconds += elapsed
        _write_standing(memory, 0, number + 1, calls + completed, seconds, elapsed, 0, 0, 0, now)

    def fail(self, error: BaseException) -> None:
        """Record that the running collective has failed; nothing if none runs."""
        number, *_, operation, _, _, _ = _read_standing(self._memory)
        if operation:
            # Before the record: what is read has its error then. A broken session fails few calls.
            self._errors[number] = f"{type(error).__name__}: {error}"
            self._errors.pop(number - spans.CALLS_KEPT, None)
            self._end(0)

    def part(
        self, kind: spans.SpanKind, began_s: float, ended_s: float, nbytes: int = 0, other: int = 0
    ) -> None:
        """Record a part of the call that runs, or of the next one.

        Times are on `time.monotonic`; `other` is a rank or a bucket, by the kind.
        """
        memory = self._memory
        number = _read_standing(memory)[0]
        with self._parts:
            (count,) = spans.COUNT.unpack_from(memory, spans.OURS_AT)
            slot = spans.OURS_AT + spans.SPANS_AT + count % spans.PARTS_KEPT * spans.SPAN_BYTES
            span = count + 1, kind, 0, other, number, nbytes, _get_ident(), began_s, ended_s
            _write_span(memory, slot, *span)
            spans.COUNT.pack_into(memory, spans.OURS_AT, count + 1)
            at = spans.OURS_AT + spans.SECONDS_AT + 8 * kind
            (seconds,) = spans.SECONDS.unpack_from(memory, at)
            spans.SECONDS.pack_into(memory, at, seconds + ended_s - began_s)

    def seconds(self, kind: spans.SpanKind) -> float:
        """Time of all parts of a kind so far."""
        slots = [at + spans.SECONDS_AT + spans.SECONDS.size * kind for at in spans.RINGS_AT]
        return float(sum(spans.SECONDS.unpack_from(self._memory, slot)[0] for slot in slots))

    def stopped_s(self) -> float:
        """For how long calls have stopped this rank's own work: not while it computed meanwhile."""
        return max(0.0, self._stopped_s() - self._formed_s)

    def _stopped_s(self) -> float:
        hidden_s = self.seconds(spans.SpanKind.REDUCE) - self.seconds(spans.SpanKind.BLOCKED)
        return self.current_call().seconds - hidden_s

    def formed(self) -> None:
        """From now on `stopped_s` counts."""
        self._formed_s = self._stopped_s()

    def added(self, ring: int, seen: int) -> tuple[int, bytes]:
        """How many records a ring of `spans.RECORDS` has had; and those after `seen` of them, raw.

        What is overwritten until it is copied is left out; from any thread.
        """
        count_at, slots_at, kept = spans.RECORDS[ring]
        (count,) = spans.COUNT.unpack_from(self._memory, count_at)
        numbers = range(max(seen, count - kept), count)
        slots = [slots_at + number % kept * _SPAN_BYTES for number in numbers]
        first = [bytes(self._memory[slot : slot + _SPAN_BYTES]) for slot in slots]
        with self._parts:  # In this order, on any processor.
            second = [bytes(self._memory[slot : slot + _SPAN_BYTES]) for slot in slots]
        return count, spans.unchanged(numbers, first, second)

    def current_call(self) -> spans.Present:
        """The call that runs, and totals of those before; from any thread, never raises."""
        return spans.decode_standing(self._memory)

    def calls(self) -> list[spans.Span]:
        """The last calls, oldest first, the running one included; from any thread."""
        copy = bytes(memoryview(self._memory)[: spans.OURS_AT])
        now = spans.decode_standing(copy)
        ended = spans.decode_spans(copy[spans.CALLS_AT : spans.OURS_AT])
        calls = {span.number: span for span in ended}
        if now.operation is not None and now.number not in calls:  # Else it ends at this moment.
            began = now.number, now.nbytes, now.thread, now.since_s
            calls[now.number] = spans.Span(spans.SpanKind.CALL, now.operation, 0, *began, None)
        return [calls[number] for number in sorted(calls)[-spans.CALLS_KEPT :]]

    def error(self, number: int) -> str | None:
        """The error of the call with this number, if it is one of those kept, and failed."""
        return self._errors.get(number)


class _Python(ctypes.Structure):
    """rr_python."""

    _fields_ = native.fields(as_number=pointer, hold=pointer, none=pointer)


@cache
def _are_native() -> bool:
    """Whether C makes the records; from now on it can."""
    if native.library() is None:
        return False
    python = ctypes.pythonapi
    as_number, hold = map(native.address, (python.PyLong_AsUnsignedLongLong, python.Py_IncRef))
    use = native.functions("rr_events_", {"use": (None, [pointer])})["use"]
    table = _Python(as_number, hold, id(None))
    use(ctypes.addressof(table))
    return True
