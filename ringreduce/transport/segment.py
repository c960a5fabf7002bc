"""Memory that the ranks of a host share: a segment of one rank, and the arrays in its heap.

native/include/ringreduce.h shows the layout. A segment is a sealed memfd: it has no name, so
nothing is left of it when the last process that mapped it has ended.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from ringreduce.effects import native
from ringreduce.effects.native import integer, pointer, u32, u64

_ALIGNMENT = 4096
# Address space for registered arrays; only what is used takes memory. No known host's memory has
# room for more, and it leaves 47 bits of address space for hundreds of ranks.
_HEAP_BYTES_MAX = 64 << 30

_Nothing = ctypes.c_char * 0


@cache
def functions() -> dict[str, Any]:
    """The library's functions on shared memory, by name without ``rr_``; or NativeError."""
    signatures = {
        "segment_create": (integer, [u64, u64, pointer]),
        "segment_map": (integer, [integer, pointer, pointer]),
        "segment_unmap": (integer, [pointer, u64]),
        "segment_heap": (u64, [pointer, pointer]),
        "segment_reserve": (integer, [integer, pointer, u64, u64]),
        "segment_release": (integer, [integer, pointer, u64, u64]),
        "segment_detach": (integer, [integer, pointer, u64, u64]),
        "segment_drop": (integer, [pointer, u64, u64]),
        "shm_new": (integer, [pointer, u32, u32, pointer]),
        "shm_free": (None, [pointer]),
        "shm_exchange": (integer, [pointer, pointer, pointer, pointer, pointer]),
        "shm_abort": (None, [pointer]),
        "shm_look": (None, [pointer, pointer]),
        "shm_has_arrived": (integer, [pointer, u32]),
        "pair_new": (integer, [pointer, u32, pointer, u32, u32]),
        "pair_free": (None, [pointer]),
        "pair_channel_bytes": (u64, []),
        "pair_open": (None, [pointer, u64]),
        "pair_send": (integer, [pointer, pointer, pointer, u64, pointer]),
        "pair_receive": (integer, [pointer, pointer, pointer, u64, pointer]),
        "pair_look": (None, [pointer, pointer]),
    }
    return native.functions("rr_", signatures)


def heap_bytes() -> int:
    """Size of the heap of each segment on this host: its physical memory, up to a limit."""
    return min(_HEAP_BYTES_MAX, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def address_of(flat: np.ndarray) -> int:
    """Address of the first byte of a contiguous array: 0.3 us where numpy's own ways take 1.1."""
    buffer: Any = flat  # Before Python 3.12 an array's type does not say that it is one.
    try:
        return ctypes.addressof(_Nothing.from_buffer(buffer))
    # It is read-only, or of a dtype that buffers cannot describe.
    except (TypeError, ValueError):
        address: int = flat.__array_interface__["data"][0]
        return address


def checked(status: int) -> None:
    """Raise OSError for the errno in `status`."""
    if status < 0:
        raise OSError(-status, os.strerror(-status))


def made(owner: object, kind: str, *arguments: Any) -> int:
    """Address of a new C object of `kind`, ``shm`` or ``pair``, freed with `owner`; or OSError."""
    handle = ctypes.c_void_p()
    checked(functions()[f"{kind}_new"](ctypes.addressof(handle), *arguments))
    assert handle.value is not None
    weakref.finalize(owner, functions()[f"{kind}_free"], handle.value).atexit = False
    return handle.value


def _whole_blocks(nbytes: int) -> int:
    return max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT


def array_at(address: int, nbytes: int, owner: Callable[[], object]) -> np.ndarray:
    """Memory as an array, dtype uint8; when the last view of it is gone, `owner` is called."""
    block = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(block, owner).atexit = False
    return np.frombuffer(memoryview(block), np.uint8)


class Segment:
    """One rank's segment, mapped into this process until nothing refers to it any more.

    It owns and closes the memfd `descriptor`. Raises OSError if it cannot be mapped; EPROTO when it
    is no segment of this ABI.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        address, nbytes = ctypes.c_void_p(), ctypes.c_uint64()
        outputs = ctypes.addressof(address), ctypes.addressof(nbytes)
        try:
            checked(functions()["segment_map"](descriptor, *outputs))
        except OSError:
            os.close(descriptor)
            raise
        assert address.value is not None
        self.address: int = address.value
        # At exit the system unmaps it, and arrays may outlive this module.
        weakref.finalize(self, _unmap, self.address, nbytes.value, descriptor).atexit = False
        size = ctypes.c_uint64()
        offset = functions()["segment_heap"](self.address, ctypes.addressof(size))
        self.heap, self.heap_bytes = self.address + offset, size.value

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """Return an array of bytes in the heap, of which the segment's rank has the memory."""
        return array_at(self.heap + offset, nbytes, lambda: self)

    @classmethod
    def create(cls, staging_bytes: int, heap_bytes: int) -> Segment:
        """A new segment of this rank, allocated but for its heap; OSError if memory is short."""
        descriptor = ctypes.c_int()
        create, made = functions()["segment_create"], ctypes.addressof(descriptor)
        checked(create(staging_bytes, heap_bytes, made))
        return cls(descriptor.value)


def _unmap(address: int, nbytes: int, descriptor: int) -> None:
    functions()["segment_unmap"](address, nbytes)
    os.close(descriptor)


class Heap:
    """Registered arrays of this rank, in memory that all ranks of the host can reach.

    The array returned and all its views own a block; when the last is gone, its memory goes back to
    the system. After a failure, `detach` makes blocks private, since a rank that was stopped while
    it wrote into them may continue at any time. Blocks are found first-fit.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._lock = threading.Lock()
        # Free parts as (offset, length), by offset; adjacent ones are joined.
        self._free: list[tuple[int, int]] = [(0, segment.heap_bytes)]
        # Returned, not yet joined to the free parts. Garbage collection may run `_release` at any
        # line, even in the thread that holds the lock, so it must not take the lock.
        self._returned: deque[tuple[int, int]] = deque()
        self._used: dict[int, int] = {}  # length by offset of blocks in use
        self._is_detached = False

    def empty(self, nbytes: int) -> np.ndarray | None:
        """An array of `nbytes` zeros, dtype uint8, in the heap; None when there is no room."""
        length = _whole_blocks(nbytes)
        offset = self._take(length, is_array=True)
        if offset is None:
            return None
        release = partial(self._release, offset, length)
        return array_at(self.segment.heap + offset, nbytes, release)

    def reserve(self, nbytes: int) -> int | None:
        """Offset in the heap of `nbytes` zeros that stay with the segment; None for no room."""
        return self._take(_whole_blocks(nbytes), is_array=False)

    def detach(self) -> int:
        """Make all arrays private to this process, at the same addresses; return the bytes left.

        Afterwards no other rank reaches them, and `empty` returns None. Arrays for whose copies
        there is no memory stay shared. Costs a copy of all arrays.
        """
        with self._lock:
            if self._is_detached:
                return 0
            self._is_detached = True
            used = list(self._used.items())
        return sum(part[1] for part in used if self._change("segment_detach", *part) < 0)

    def _change(self, function: str, offset: int, length: int) -> int:
        segment = self.segment
        status: int = functions()[function](segment.descriptor, segment.address, offset, length)
        return status

    def _take(self, length: int, *, is_array: bool) -> int | None:
        with self._lock:
            if self._is_detached:
                return None
            self._join_returned()
            place = next((i for i, (_, room) in enumerate(self._free) if room >= length), None)
            if place is None:
                return None
            offset, room = self._free.pop(place)
            if room > length:
                self._free.insert(place, (offset + length, room - length))
            if is_array:
                self._used[offset] = length
        status = self._change("segment_reserve", offset, length)
        if status < 0:
            self._used.pop(offset, None)
            self._returned.append((offset, length))
            if -status in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                return None
            checked(status)
        return offset

    def _release(self, offset: int, length: int) -> None:
        self._used.pop(offset, None)
        if self._is_detached:
            # Others may still read the shared contents as this rank's part. Those are freed with
            # the segment; the copy is freed now.
            functions()["segment_drop"](self.segment.address, offset, length)
            return
        self._change("segment_release", offset, length)
        self._returned.append((offset, length))

    def _join_returned(self) -> None:
        """Join adjacent free parts; call it under the lock."""
        parts = list(self._free)
        while self._returned:
            parts.append(self._returned.popleft())
        self._free = []
        for start, size in sorted(parts):
            if self._free and sum(self._free[-1]) == start:
                self._free[-1] = (self._free[-1][0], self._free[-1][1] + size)
            else:
                self._free.append((start, size))
