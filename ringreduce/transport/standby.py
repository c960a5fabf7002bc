"""The port at which a rank can be met again, shut while its ring works.

It is announced when the ring forms, since later there may be no way left to do so. While it is shut
the kernel drops what comes for it (`ringreduce.transport.door`), so strangers find nothing there.
"""

from __future__ import annotations

import contextlib
import os
import socket

from ringreduce.transport import door, inherited
from ringreduce.transport.address import endpoint

_BACKLOG = 128


class Standby:
    """A port at the address of `bind`, such as ``tcp://127.0.0.1:*``, open only on request.

    Attributes:
        address: ``tcp://host:port``; empty where the system cannot shut a port, and there is none.

    Raises:
        OSError: the address cannot be bound, or no socket is available.
    """

    def __init__(self, bind: str) -> None:
        host = bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address = ""
        if not door.shut(self._listener.fileno()):
            self._listener.close()
            return
        self.address = endpoint(host, self._listener.getsockname()[1])
        inherited.watch(self)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._listener.fileno() < 0

    def open(self) -> int:
        """Let others connect; return a descriptor of the listening socket, which the caller owns.

        Raises:
            OSError: there is no port.
        """
        door.open_again(self._listener.fileno())
        return os.dup(self._listener.fileno())

    def shut(self) -> None:
        """Let nobody connect any more."""
        with contextlib.suppress(OSError):  # It was closed meanwhile.
            door.shut(self._listener.fileno())

    def close(self) -> None:
        """Close the port for good; calling it again does nothing."""
        inherited.unwatch(self)
        self._listener.close()

    def close_inherited(self) -> None:
        """In a forked child: close its copy."""
        self._listener.close()
