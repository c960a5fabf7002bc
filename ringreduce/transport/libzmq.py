"""libzmq for compiled functions, and other C libraries that pyzmq brings: declared by name.

pyzmq opens them privately. The same files are opened here for LLVM's linker, so that compiled
functions call them by name; names, unlike ctypes function pointers, can be cached on disk with the
compiled code. Addresses are passed as intp: the C ABI passes pointers and 64-bit integers alike on
every platform that has wheels. Compiled functions and Python share sockets by address
(``Socket.underlying``).
"""

import ctypes
import glob
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import llvmlite.binding
import zmq
import zmq.backend
from numba import carray, types

from ringreduce.vocabulary.compiled import callback
from ringreduce.vocabulary.errors import NativeError


def declare(name: str, result: Any, *arguments: Any) -> Any:
    """The C function `name`, as compiled functions call it."""
    return types.ExternalFunction(name, result(*arguments))


def open_library(name: str, function: str) -> tuple[ctypes.CDLL | None, list[str]]:
    """Make a library known to compiled code: return it, or None and why files lack `function`."""
    tried = []
    for path in _candidates(name):
        try:
            library = ctypes.CDLL(path)
            if hasattr(library, function):
                llvmlite.binding.load_library_permanently(path)
                return library, []
            tried.append(f"{path} (no {function} in it)")
        except (OSError, RuntimeError) as error:
            tried.append(f"{path} ({error})")
    return None, tried


def _candidates(name: str) -> Iterator[str]:
    """Files that may contain the library which pyzmq has already loaded, likeliest first."""
    if sys.platform == "linux":
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            # pyzmq's libraries are mapped by now, whether a wheel's, conda's or the system's.
            mapped = {line.split(maxsplit=5)[5].strip() for line in maps if name in line}
        yield from sorted(mapped)
    package = os.path.dirname(zmq.__file__)
    yield from sorted(glob.glob(os.path.join(package, ".dylibs", f"{name}*")))
    yield from sorted(glob.glob(os.path.join(os.path.dirname(package), "pyzmq.libs", f"{name}*")))
    # Some builds link them into the extension module itself.
    extension = sys.modules.get("zmq.backend.cython._zmq")
    if extension is not None and extension.__file__ is not None:
        yield extension.__file__


_address, _int = types.intp, types.intc

# Each is documented in the manual page of its C name; a message is a zmq_msg_t, 64 bytes.
errno = declare("zmq_errno", _int)
msg_init = declare("zmq_msg_init", _int, _address)
msg_init_size = declare("zmq_msg_init_size", _int, _address, types.uintp)
msg_init_data = declare(
    "zmq_msg_init_data", _int, _address, _address, types.uintp, _address, _address
)
msg_send = declare("zmq_msg_send", _int, _address, _address, _int)
msg_recv = declare("zmq_msg_recv", _int, _address, _address, _int)
msg_data = declare("zmq_msg_data", _address, _address)
msg_size = declare("zmq_msg_size", types.uintp, _address)
msg_more = declare("zmq_msg_more", _int, _address)
msg_get = declare("zmq_msg_get", _int, _address, _int)
msg_close = declare("zmq_msg_close", _int, _address)
# Of the C library.
memcpy = declare("memcpy", _address, _address, _address, types.uintp)
malloc = declare("malloc", _address, types.uintp)
free = declare("free", types.void, _address)
sched_yield = declare("sched_yield", _int)
usleep = declare("usleep", _int, types.uint32)


@cache
def load() -> None:
    """Make libzmq's functions known to compiled code; NativeError if it cannot be called."""
    library, tried = open_library("libzmq", "zmq_msg_init_data")
    if library is None:
        raise NativeError(
            f"found no libzmq to call; tried {', '.join(tried) or 'nothing'}",
            remedy="Reinstall pyzmq from its binary wheel: pip install --force-reinstall pyzmq",
        )


def version() -> str:
    """Of libzmq."""
    return zmq.zmq_version()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>: parameters of mallopt


@cache
def keep_large_blocks() -> None:
    """Make glibc's malloc reuse blocks of up to 4 MiB; with another C library do nothing.

    libzmq allocates each large message it receives. By default glibc maps and unmaps each such
    block, and the page faults are expensive: 16 MiB took 15.2 ms with them and 12.3 ms without
    (docs/performance.md). Affects the whole process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def _count_release(data, counter):
    carray(counter, 1)[0] += 1


def _free_and_count_release(data, counter):
    free(data)
    carray(counter, 1)[0] += 1


@cache
def release_callback(*, frees: bool) -> Any:
    """The free function of borrowed buffers; with `frees`, of those from `malloc`.

    It adds 1 to the int64 at its hint. Only one I/O thread of libzmq runs it for an open socket, so
    the count has one writer and needs no atomics; the reader asks only whether it has reached a
    number yet.
    """
    function = _free_and_count_release if frees else _count_release
    return callback(types.void(types.intp, types.CPointer(types.int64)), function)
