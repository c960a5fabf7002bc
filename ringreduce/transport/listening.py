"""Listening sockets: open them, shut them, and open them again."""

import contextlib
import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ringreduce.transport.address import family
from ringreduce.transport.descriptors import borrowed
from ringreduce.vocabulary.errors import RendezvousError

BACKLOG = 128
_ATTEMPTS = 64  # the same port may be taken at another of the addresses
# Missing in Python's socket module. The numbers hold on all Linux platforms but a few (alpha, mips,
# parisc, sparc), where they are refused or have no effect.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# One instruction of classic BPF, "return 0": keep no byte of the packet, which drops it.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


class Bind(NamedTuple):
    """Where a rank listens."""

    hosts: tuple[str, ...]  # numeric addresses; others are given the first one with each port
    ports: range | None = None  # which ports it may use; None: any free ones
    needed: int = 0  # how many it needs to form the ring, for errors


def listen(bind: Bind, **who: Any) -> list[socket.socket]:
    """Listen on one port at all hosts of `bind`; the caller owns the sockets, in that order.

    Raises RendezvousError, about `who`, this rank, if an address is not this host's, or no port is
    free; OSError if no socket is available.
    """
    ports: Sequence[int] = [0] * _ATTEMPTS if bind.ports is None else bind.ports
    for port in ports:
        try:
            return _listen_at(bind.hosts, port)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise RendezvousError(
                    f"cannot listen on {', '.join(bind.hosts)}: {error.strerror}",
                    **who,
                    remedy="The host in RINGREDUCE_RENDEZVOUS must be an address of rank 0's host; "
                    "RINGREDUCE_IFACE chooses among those of this one.",
                ) from error
    if bind.ports is None:
        text = f"found no port that is free at all of {', '.join(bind.hosts)}"
        raise RendezvousError(text, **who, remedy="Choose fewer addresses by RINGREDUCE_IFACE.")
    name = f"RINGREDUCE_PORTS={ports[0]}-{ports[-1]}"
    raise RendezvousError(
        f"found no free port among the {len(ports)} of {name}",
        **who,
        remedy=f"Each rank of this host needs {bind.needed} to form the ring, and more for groups "
        "and for pairs that exchange messages (docs/guides/settings.md): widen the range.",
    )


def _listen_at(hosts: Sequence[str], port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as opened:
        sockets = []
        for host in hosts:
            listener = opened.enter_context(socket.socket(family(host), socket.SOCK_STREAM))
            listener.setblocking(False)  # libzmq accepts until there is nothing more.
            # A port of the range may have been used a minute ago.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
            port = listener.getsockname()[1]
            sockets.append(listener)
        opened.pop_all()
    return sockets


def shut(listener: int) -> bool:
    """Have Linux drop all attempts to connect to that listening socket; return whether it does.

    Attempts get no answer and cost this process nothing. Connections that were accepted stay: they
    have sockets without the filter. libzmq cannot stop listening without ending them.
    """
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
