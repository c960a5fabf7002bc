"""The port at which a rank can be met again, shut while its ring works (`visits`).

It is announced when the ring forms, since later there may be no way left to do so. While it is shut
the kernel drops what comes for it, so strangers find nothing there.
"""

from __future__ import annotations

import contextlib
import os
import threading

from ringreduce.transport import inherited, listening
from ringreduce.transport.address import endpoint
from ringreduce.transport.listening import Bind


class Standby:
    """A port at the addresses of `bind`, open only on request, of this rank in a job of `size`."""

    def __init__(self, bind: Bind, *, rank: int, size: int) -> None:
        # Answers there although no ring is formed; the lock is for threads that change that.
        self.answering, self.lock = contextlib.ExitStack(), threading.RLock()
        self.is_in_use = False  # by a rank that forms the ring anew itself
        self._listeners = listening.listen(bind, rank=rank, size=size)
        # The first, as ``tcp://host:port``; empty where the system cannot shut a port.
        self.address = ""
        if not all([listening.shut(listener.fileno()) for listener in self._listeners]):
            self._close_listeners()
            return
        self.address = endpoint(*self._listeners[0].getsockname()[:2])
        inherited.watch(self)

    @property
    def is_closed(self) -> bool:
        return self._listeners[0].fileno() < 0

    def open(self) -> None:
        with contextlib.suppress(OSError):  # It is open, or closed.
            for listener in self._listeners:
                listening.open_again(listener.fileno())

    def descriptors(self) -> dict[str, int]:
        """Where it listens, each with a descriptor for the caller."""
        return {
            endpoint(*listener.getsockname()[:2]): os.dup(listener.fileno())
            for listener in self._listeners
        }

    def shut(self) -> None:
        with contextlib.suppress(OSError):  # It was closed meanwhile.
            for listener in self._listeners:
                listening.shut(listener.fileno())

    def close(self) -> None:
        """Close the port for good; calling it again does nothing."""
        with self.lock:
            self.answering.close()
            inherited.unwatch(self)
            self._close_listeners()

    def close_inherited(self) -> None:
        """In a forked child: close its copies, those that libzmq listens with too."""
        self.lock = threading.RLock()
        ports = [endpoint(*listener.getsockname()[:2]) for listener in self._listeners]
        self._close_listeners()
        inherited.close_connections(ports)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
