"""libzmq for compiled functions, and other C libraries that pyzmq brings: declared by name.

pyzmq opens them privately. They are opened here for LLVM's linker, so that compiled functions call
them by name; names, unlike ctypes function pointers, can be cached on disk with the compiled code.
Addresses are passed as intp: the C ABI passes pointers and 64-bit integers alike on every platform
that has wheels. Compiled functions and Python share sockets by address (``Socket.underlying``).
"""

import ctypes
from functools import cache
from typing import Any

import llvmlite.binding
import zmq
from numba import carray, types
from zmq.backend.cython import _zmq

from ringreduce.vocabulary.compiled import callback
from ringreduce.vocabulary.errors import NativeError


def declare(name: str, result: Any, *arguments: Any) -> Any:
    """The C function `name`, as compiled functions call it."""
    return types.ExternalFunction(name, result(*arguments))


@cache
def library() -> ctypes.CDLL:
    """The C module of pyzmq, known to compiled code with all libraries that it is linked with.

    A name is searched in those too, so this finds whichever libzmq and libsodium pyzmq uses: in its
    wheel, in conda's, the system's, or in the module itself.
    """
    path = _zmq.__file__
    llvmlite.binding.load_library_permanently(path)
    return ctypes.CDLL(path)


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
# Functions of the C library.
memcpy = declare("memcpy", _address, _address, _address, types.uintp)
malloc = declare("malloc", _address, types.uintp)
free = declare("free", types.void, _address)
sched_yield = declare("sched_yield", _int)
usleep = declare("usleep", _int, types.uint32)


@cache
def load() -> None:
    """Make libzmq's functions known to compiled code; NativeError if it cannot be called."""
    if not hasattr(library(), "zmq_msg_init_data"):
        raise NativeError(
            f"found no libzmq to call in {_zmq.__file__}",
            remedy="Reinstall pyzmq from its binary wheel: pip install --force-reinstall pyzmq",
        )


def version() -> str:
    """The version of libzmq."""
    return zmq.zmq_version()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>: parameters of mallopt


@cache
def keep_large_blocks() -> None:
    """Make glibc's malloc reuse blocks of up to 4 MiB; with another C library do nothing.

    libzmq allocates each large message it receives. By default glibc maps and unmaps each such
    block, and the page faults are expensive: 16 MiB took 15.2 ms with them and 12.3 ms without.
    Affects the whole process.
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
