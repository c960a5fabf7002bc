"""Close, in a forked child, its copies of the parent's connections with other ranks.

A connection ends when the last process that has it open closes it: if a child that outlives its
parent (a worker of a data pipeline, say) kept a copy, the other ranks would not see that the parent
died. Children started by exec inherit nothing: all descriptors here and libzmq's are close-on-exec.
"""

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from ringreduce.transport.address import split_host


class Inheritable(Protocol):
    """An object that holds connections."""

    def close_inherited(self) -> None:
        """Close this process's copies, sending nothing; called in a forked child."""


_watched: weakref.WeakSet[Inheritable] = weakref.WeakSet()
# Held, in a thread beside those of programs, from when the system makes a connection until a holder
# that is watched has it: forks wait meanwhile, else the child would keep one that nobody knows.
opening = threading.Lock()


def watch(holder: Inheritable) -> None:
    """Call `holder.close_inherited` in every child that this process forks."""
    _watched.add(holder)


def unwatch(holder: Inheritable) -> None:
    """End what `watch` began, once the connections are closed: others may get their ports."""
    _watched.discard(holder)


def close_connections(endpoints: Iterable[str]) -> None:
    """Close this process's TCP sockets at `endpoints`, numeric as ``tcp://127.0.0.1:41873``.

    Includes those connected with them. For libzmq's sockets, whose descriptors it does not give.
    """
    ends = map(split_host, endpoints)
    wanted = {(host.removeprefix("::ffff:"), int(port)) for host, port in ends}
    for descriptor in map(int, os.listdir("/dev/fd")):
        try:
            probe = socket.socket(fileno=descriptor)
        except OSError:
            continue  # no socket
        ours = probe.family in (socket.AF_INET, socket.AF_INET6) and any(
            end in wanted for end in _ends(probe)
        )
        probe.detach()
        if ours:
            os.close(descriptor)


def _ends(probe: socket.socket) -> list[tuple[str, int]]:
    ends = []
    for ask in (probe.getsockname, probe.getpeername):
        with contextlib.suppress(OSError):
            host, port = ask()[:2]
            ends.append((host.removeprefix("::ffff:"), port))
    return ends


def _close_all() -> None:
    """Run in the child, which has no use for connections: communicators refuse to work there."""
    opening.release()
    for holder in list(_watched):
        with contextlib.suppress(OSError):
            holder.close_inherited()
    _watched.clear()


os.register_at_fork(
    before=opening.acquire, after_in_parent=opening.release, after_in_child=_close_all
)
