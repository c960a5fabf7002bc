"""Calls on one array wholly in C: found by array and option, run, and reported in one function.

native/src/small_calls.c does it. A call runs once in Python, which checks it and then teaches it.
Memory: what was taught lives as long as the `SmallCalls`; the caller owns the array again when
`run` returns. Threads: one call at a time, by a lock or the caller's care; `close` from any thread.
"""

import ctypes
import threading
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from ringreduce.effects import native
from ringreduce.effects.events import Events
from ringreduce.effects.native import fields, integer, pointer, u32, u64
from ringreduce.pure.spans import CODES

_CALLS = 64  # RR_SMALL_CALLS


class Kind(IntEnum):
    """RR_SMALL_COLLECTIVE, ..."""

    COLLECTIVE = 1
    SEND = 2
    RECEIVE = 3


class _SmallCall(ctypes.Structure):
    _fields_ = fields(dtype=pointer, option=pointer, count=u64, nbytes=u64, call=pointer)


class _SmallCalls(ctypes.Structure):
    _fields_ = (
        *fields(kind=u32, operation=u32, events=pointer, end=pointer, limits=pointer),
        *fields(array_type=pointer, done=pointer, late=pointer, unknown=pointer),
        *fields(release_gil=pointer, take_gil=pointer, hold=pointer, drop=pointer, call=pointer),
        *fields(lock=pointer, unlock=pointer, caller=pointer, thread=u64),
        *fields(running=pointer, bytes=u64, known=_SmallCall * _CALLS),
    )


class _Array(ctypes.Structure):
    """The part of a numpy array that native/src/python_api.h reads."""

    _fields_ = (
        *fields(references=ctypes.c_ssize_t, type=pointer, data=pointer, dimensions=integer),
        *fields(shape=ctypes.POINTER(ctypes.c_ssize_t), strides=pointer, base=pointer),
        *fields(dtype=pointer, flags=integer),
    )


class SmallCalls:
    """The calls that one end knows: a group of a host's ranks, or one direction of a pair."""

    # Takes an array and an option, which is found by identity. True: the call is done. None:
    # nothing was begun, Python has to do it. False: it is begun and another rank is late, so that
    # Python has to continue it, with the same arguments.
    run: Callable[[Any, Any], bool | None]
    # With a lock (`exclude`), ends a call of this thread that was late; else does nothing.
    end: Callable[[], None]

    def __init__(self, kind: Kind, end: int, limits: int) -> None:
        # An array owns the memory, so that the function finds and keeps it.
        self._memory = np.zeros(ctypes.sizeof(_SmallCalls), np.uint8)
        buffer: Any = self._memory
        self._calls = calls = _SmallCalls.from_buffer(buffer)
        python = ctypes.pythonapi
        calls.kind, calls.end, calls.limits = kind, end, limits
        calls.array_type = id(np.ndarray)
        calls.done, calls.late, calls.unknown = id(True), id(False), id(None)
        calls.release_gil = native.address(python.PyEval_SaveThread)
        calls.take_gil = native.address(python.PyEval_RestoreThread)
        calls.hold, calls.drop = map(native.address, (python.Py_IncRef, python.Py_DecRef))
        calls.call = native.address(python.PyObject_CallNoArgs)
        # Objects by slot that must live as long as their addresses are there.
        self._taught: dict[int, tuple[Any, ...]] = {}
        self.run = native.method("rr_small_run", self._memory)
        self.end = native.method("rr_small_end", self._memory)

    def exclude(
        self, lock: Callable[[], bool], unlock: Callable[[], None], caller: ctypes.c_uint64
    ) -> None:
        """Have `run` hold a lock, and `caller` its thread, until the call is done, or `end`.

        `lock` does not wait. `run` begins nothing when that returns False, or when there is a
        `caller`: in that thread's call a signal handler may run.
        """
        self._locking = lock, unlock, caller
        calls = self._calls
        calls.lock, calls.unlock, calls.caller = id(lock), id(unlock), ctypes.addressof(caller)

    def record(self, events: Events, operation: str) -> None:
        """Have calls recorded in `events`, which is kept, under the name of `operation`."""
        self._events = events
        self._calls.operation, self._calls.events = CODES[operation], events.address

    def teach(self, array: np.ndarray, option: Any, address: int, call: Any) -> None:
        """Have `run` do the call on arrays like this one, with `option`, from now on.

        At `address` is the rr_call, or a message's header; `call` owns what is there.
        """
        dtype = array.dtype
        known = _SmallCall(id(dtype), id(option), array.size, array.nbytes, address)
        learn = native.functions("rr_small_", {"learn": (u32, [pointer, pointer])})["learn"]
        slot = learn(self._memory.ctypes.data, ctypes.addressof(known))
        self._taught[slot] = dtype, option, call

    @property
    def nbytes(self) -> int:
        return int(self._calls.bytes)

    @property
    def running(self) -> Any:
        """The option of the call that runs; None for none. From any thread."""
        if not (address := self._calls.running):
            return None
        first = ctypes.addressof(self._calls) + _SmallCalls.known.offset
        _, option, _ = self._taught[(address - first) // ctypes.sizeof(_SmallCall)]
        return option

    def keep_to(self, thread: int) -> None:
        """Have `run` begin calls in the thread of that identity alone, from now on."""
        self._calls.thread = thread

    @property
    def begins_here(self) -> bool:
        """Whether `run` may begin a call in this thread."""
        thread = self._calls.thread
        return self._calls.end is not None and thread in (0, threading.get_ident())

    def close(self) -> None:
        """Have `run` begin no call any more; from any thread, and before its end is freed."""
        self._calls.end = None


@cache
def are_possible() -> bool:
    """Whether this Python and this numpy lay out their objects as native/src/python_api.h says."""
    if object.__basicsize__ != 2 * ctypes.sizeof(pointer):
        return False
    array = np.zeros((2, 3), np.float32)
    frozen = array[:, 1:]
    frozen.flags.writeable = False
    return all(
        header.type == id(np.ndarray)
        and header.data == of.ctypes.data
        and header.dimensions == of.ndim
        and tuple(header.shape[: of.ndim]) == of.shape
        and header.dtype == id(of.dtype)
        and header.flags & ~_OWNED == flags
        for of, flags in ((array, _USUAL), (frozen, _ALIGNED))
        for header in (_Array.from_address(id(of)),)
    )


# NPY_ARRAY_ALIGNED, NPY_ARRAY_OWNDATA, and RR_ARRAY_USUAL.
_ALIGNED, _OWNED, _USUAL = 0x100, 0x4, 0x1 | 0x100 | 0x400
