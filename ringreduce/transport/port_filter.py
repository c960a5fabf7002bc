"""Shut a listening socket, and open it again: no new connections, while accepted ones stay.

libzmq cannot stop listening without ending the connections it has accepted (``zmq_unbind``). So a
filter on the listening socket makes the kernel drop every packet for it; accepted connections have
sockets without that filter. Attempts to connect get no answer and cost this process nothing.
"""

import ctypes
import socket
import struct
import sys

from ringreduce.transport.descriptors import borrowed

# Missing in Python's socket module. The numbers hold on all Linux platforms but a few (alpha, mips,
# parisc, sparc), where they are refused or have no effect.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# One instruction of classic BPF, "return 0": keep no byte of the packet, which drops it.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


def shut(listener: int) -> bool:
    """Have Linux drop all attempts to connect to that listening socket; return whether it does."""
    if sys.platform != "linux" or listener < 0:
        return False
    program = ctypes.create_string_buffer(_DROP)
    argument = struct.pack("HL", 1, ctypes.addressof(program))
    try:
        with borrowed(listener) as listening:
            if not listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, argument)
    except OSError:
        return False
    return True


def open_again(listener: int) -> None:
    """Undo `shut`. Raises OSError if the descriptor is no shut socket."""
    with borrowed(listener) as listening:
        listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
