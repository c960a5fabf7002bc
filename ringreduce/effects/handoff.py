"""The engine's queue of work that other threads hand over.

`NativeQueue` is the native library's (native/src/handoff.c): TensorFlow's threads put buckets of
gradients there without running Python. `PlainQueue`, where that is missing, holds only jobs.
"""

import ctypes
import queue
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ringreduce.effects.events import Events
from ringreduce.effects.native import fields, functions, i64, integer, library, pointer, u32, u64

# RR_HANDOFF_CLOSED, RR_ITEM_JOB, ... of native/include/ringreduce.h.
_CLOSED = 100
_JOB, _BUCKET = 1, 2
MARK_BYTES = 64
_WHY_BYTES = 2048


@dataclass(frozen=True)
class BucketItem:
    """A packed bucket: its plan's number, its index in the plan, and its address."""

    plan: int
    bucket: int
    address: int = field(default=0, compare=False)


class Area:
    """Memory for rounds of a bucket, `array`, of which TensorFlow may borrow results.

    What is lent, such as a variable's value, may outlive its ring: an area lives until all of it
    has been given back. Ranks that share the memory, of which this is number `rank`, pass its
    `marks`, shape (ranks, MARK_BYTES); those of all ranks are 1 in their second word.
    """

    def __init__(self, array: np.ndarray, marks: np.ndarray | None = None, rank: int = 0) -> None:
        self.array, self.address, self._marks = array, array.ctypes.data, marks
        shared = (None, 0) if marks is None else (marks.ctypes.data, len(marks))
        handle = _area_functions()["new"](self.address, *shared, rank)
        if not handle:
            raise MemoryError("cannot make an area")
        self.handle: int = handle
        weakref.finalize(self, _area_functions()["free"], handle).atexit = False

    @property
    def is_used(self) -> bool:
        """Whether a plan, a round or a result uses it, or another rank the memory."""
        return bool(_area_functions()["is_used"](self.handle))


# Areas that were registered and may be in use.
_areas: set[Area] = set()


def _drop_unused_areas() -> None:
    for area in _areas.copy():
        if not area.is_used:
            _areas.discard(area)


class Layout(NamedTuple):
    """A bucket's memory and the (start, nbytes) of each tensor in it."""

    # A round takes the first that is free, or else spare memory, which is not registered. Without
    # any the memory is that of the tensor that is started, and has one slot.
    areas: Sequence[Area]
    nbytes: int
    slots: Sequence[tuple[int, int]]  # where tensors are packed
    results: Sequence[tuple[int, int]] | None = None  # where results are read; None: from the slots

    def memory(self, item: BucketItem) -> np.ndarray:
        """The bytes, uint8, that this round of the bucket has; the engine's until `finish`."""
        for area in self.areas:
            if area.address == item.address:
                return area.array
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(item.address))


class RoundFailed(Exception):
    """A bucket could not be reduced this time; the ring still works."""


# `take` returns this when a bucket was started in the wrong order: this rank is out of step.
COMPLAINT = "complaint"


class _Slot(ctypes.Structure):
    _fields_ = fields(start=u64, nbytes=u64)


class _Bucket(ctypes.Structure):
    _fields_ = (
        *fields(areas=ctypes.POINTER(pointer), nbytes=u64, slots=ctypes.POINTER(_Slot)),
        *fields(results=ctypes.POINTER(_Slot), area_count=u32, slot_count=u32, result_count=u32),
    )


class _Item(ctypes.Structure):
    _fields_ = fields(kind=integer, job=i64, plan=i64, memory=pointer, bucket=u32)


@cache
def _functions() -> dict[str, Any]:
    text = ctypes.c_char_p
    signatures = {
        "open": (integer, [pointer, pointer]),
        "register": (integer, [pointer, pointer, u32, pointer]),
        "unregister": (integer, [i64]),
        "post": (integer, [pointer, i64]),
        "take": (integer, [pointer, pointer]),
        "finish": (None, [pointer, text]),
        "wait_idle": (integer, [pointer, u32]),
        "fail": (None, [pointer, text]),
        "reopen": (integer, [pointer]),
        "close": (None, [pointer, text]),
    }
    return functions("rr_handoff_", signatures)


@cache
def _area_functions() -> dict[str, Any]:
    signatures = {
        "new": (pointer, [pointer, pointer, u32, u32]),
        "free": (None, [pointer]),
        "is_used": (integer, [pointer]),
    }
    return functions("rr_area_", signatures)


class NativeQueue:
    """A queue of jobs, and of buckets that a framework's threads have packed.

    All but `take` and `finish` may be called by any thread. What happens to buckets is recorded in
    `events`, until `close`.
    """

    def __init__(self, events: Events) -> None:
        self._functions = _functions()
        self._events = events
        handle = ctypes.c_void_p()
        if self._functions["open"](ctypes.addressof(handle), events.address) != 0:
            raise MemoryError("cannot open a handoff")
        self._handle = handle.value
        self._item = _Item()

    def register(self, buckets: Sequence[Layout]) -> int:
        """Register a plan's buckets; return the number by which ops name the plan.

        Areas live until `unregister` or `close`, and then until no result in them is lent.
        After `close` the number is -1, for which ops fail with the error that the communicator was
        closed.
        """
        rows = (_Bucket * len(buckets))()
        _drop_unused_areas()
        for row, bucket in zip(rows, buckets, strict=True):
            handles = [area.handle for area in bucket.areas]
            row.areas, row.area_count = (pointer * len(handles))(*handles), len(handles)
            row.nbytes = bucket.nbytes
            row.slots, row.slot_count = _slots(bucket.slots), len(bucket.slots)
            if bucket.results is not None:
                row.results, row.result_count = _slots(bucket.results), len(bucket.results)
        number = ctypes.c_int64()
        status = self._functions["register"](
            self._handle, ctypes.addressof(rows), len(buckets), ctypes.addressof(number)
        )
        if status not in (0, _CLOSED):
            raise MemoryError(f"cannot register a plan of buckets (code {status})")
        _areas.update(*(bucket.areas for bucket in buckets))
        return number.value if status == 0 else -1

    def unregister(self, plan: int) -> bool:
        """Remove a plan; False if it is being reduced now, and so stays."""
        is_done: bool = self._functions["unregister"](plan) == 0
        _drop_unused_areas()
        return is_done

    def post(self, job: int) -> bool:
        """Append a job; False when the queue is closed."""
        return bool(self._functions["post"](self._handle, job) == 0)

    def take(self) -> int | BucketItem | str | None:
        """Wait for the next item: a job's number, a bucket or COMPLAINT; None when closed."""
        item = self._item
        if self._functions["take"](self._handle, ctypes.addressof(item)) != 0:
            return None
        if item.kind == _JOB:
            return int(item.job)
        if item.kind == _BUCKET:
            return BucketItem(int(item.plan), int(item.bucket), int(item.memory or 0))
        return COMPLAINT

    def finish(self, failed: RoundFailed | None = None) -> None:
        """Mark the item that was taken as done, or failed."""
        why = None if failed is None else _text(str(failed))
        self._functions["finish"](self._handle, why)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until nothing is queued or taken; return whether that is so."""
        return bool(self._functions["wait_idle"](self._handle, int(timeout_s * 1e3)))

    def fail(self, why: str) -> None:
        """End all waits for buckets, present and future, with the error `why`."""
        self._functions["fail"](self._handle, _text(why))

    def reopen(self) -> None:
        """After `fail`, once nothing is queued or taken: have buckets reduced again."""
        self._functions["reopen"](self._handle)

    def close(self, why: str) -> None:
        """End `take`, and all waits for buckets with the error `why`."""
        self._functions["close"](self._handle, _text(why))
        _drop_unused_areas()


def _slots(slots: Sequence[tuple[int, int]]) -> Any:
    return (_Slot * len(slots))(*(_Slot(*slot) for slot in slots))


def _text(why: str) -> bytes:
    """`why` in UTF-8, cut between two characters to what the C code can hold."""
    return why.encode(errors="replace")[: _WHY_BYTES - 1].decode(errors="ignore").encode()


class PlainQueue:
    """A queue of jobs only, where there is no native library."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[int | None] = queue.Queue()  # None wakes who waits to take one.
        self._closed = False

    def post(self, job: int) -> bool:
        if not self._closed:
            self._jobs.put(job)
        return not self._closed

    def take(self) -> int | BucketItem | str | None:
        job = self._jobs.get()
        return None if self._closed else job

    def finish(self, failed: RoundFailed | None = None) -> None:
        """Like `NativeQueue.finish`; `failed` is ignored, since a job records its own error."""
        if not self._closed:  # Else the thread itself may have closed it, after a first time.
            self._jobs.task_done()

    def wait_idle(self, timeout_s: float) -> bool:
        jobs = self._jobs
        with jobs.all_tasks_done:
            return jobs.all_tasks_done.wait_for(
                lambda: self._closed or not jobs.unfinished_tasks, timeout_s
            )

    def fail(self, why: str) -> None:
        """Do nothing: there are no buckets here."""

    def reopen(self) -> None:
        """Do nothing, as `fail`."""

    def close(self, why: str) -> None:
        with self._jobs.all_tasks_done:
            self._closed = True
            self._jobs.all_tasks_done.notify_all()
        self._jobs.put(None)


Queue = NativeQueue | PlainQueue


def open_queue(events: Events) -> Queue:
    """A new queue, native if there is a native library."""
    return PlainQueue() if library() is None else NativeQueue(events)
