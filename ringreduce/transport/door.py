"""A listening socket that lets nobody in any more, while those who are in stay.

Once a ring stands nobody has any business at its ports. libzmq cannot stop to listen without
ending the connections it has accepted (``zmq_unbind``), so the kernel is asked: a filter on the
listening socket that drops every packet for it. Accepted connections have sockets of their own,
with no filter. Attempts to connect then get no answer and cost this process nothing, however
many there are.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

__all__ = ["shut"]

# Python's socket module has no name for it; the number is the same on all that Linux runs on
# but a few (alpha, mips, parisc, sparc), where it is refused or counts for nothing.
_SO_ATTACH_FILTER = 26
# One instruction of classic BPF, "return 0": keep no byte of the packet, which drops it.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


def shut(listener: int) -> bool:
    """Drop all attempts to connect at the listening socket of descriptor `listener`.

    Returns:
        Whether that was possible: on Linux, with a socket that listens.
    """
    if sys.platform != "linux" or listener < 0:
        return False
    program = ctypes.create_string_buffer(_DROP)
    argument = struct.pack("HL", 1, ctypes.addressof(program))
    try:
        # A duplicate, since a Python socket closes what it is given.
        with socket.socket(fileno=os.dup(listener)) as listening:
            if not listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, argument)
    except OSError:
        return False
    return True
