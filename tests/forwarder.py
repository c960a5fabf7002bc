"""Stands between ranks: what is sent to a link goes through a forwarder, which may change it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator

from ringreduce.transport.zeromq import ZmqLink

__all__ = ["Change", "Flip", "stand_before"]

# What is sent on instead of some bytes of a connection, in pieces; an OSError ends the connection.
Change = Callable[[bytes], Iterable[bytes]]


class Flip:
    """Changes a bit at `offset` bytes from where `marker` begins, the first time it passes."""

    def __init__(self, marker: bytes, offset: int, bit: int = 0) -> None:
        self._marker, self._offset, self._bit = marker, offset, bit
        self._lock = threading.Lock()
        self.is_done = False

    def __call__(self, channel: int, port: int) -> Change:
        """The change of one more connection."""
        total, kept, due = 0, b"", -1

        def change(data: bytes) -> Iterator[bytes]:
            nonlocal total, kept, due
            changed = bytearray(data)
            if due < 0:
                seen = kept + data
                place = seen.find(self._marker) + self._offset
                # What has gone cannot be changed any more.
                if self._marker in seen and place >= len(kept) and self._claim():
                    due = total - len(kept) + place
                kept = seen[-256:]
            if total <= due < total + len(data):
                changed[due - total] ^= 1 << self._bit
            total += len(data)
            yield bytes(changed)

        return change

    def _claim(self) -> bool:
        """Whether it is the caller's to do; so for one connection only."""
        with self._lock:
            was_done, self.is_done = self.is_done, True
            return not was_done


def stand_before(link: ZmqLink, changes: Callable[[int, int], Change]) -> None:
    """From now on others reach `link` through sockets of ours; it has not connected yet.

    `changes` makes the change of what each connection brings, from the number of the link's channel
    and its port.
    """
    host, _, ports = link.address.rpartition(":")
    ours = [_listen(changes, *where) for where in enumerate(map(int, ports.split(",")))]
    link.address = f"{host}:{','.join(map(str, ours))}"


def _listen(changes: Callable[[int, int], Change], channel: int, port: int) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)

    def serve() -> None:
        with listener, contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                near.settimeout(None)
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:  # The link has closed.
                    near.close()
                    raise
                for source, target, change in (
                    (near, far, changes(channel, port)),
                    (far, near, lambda data: [data]),
                ):
                    threading.Thread(
                        target=_pass_on, args=(source, target, change), daemon=True
                    ).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def _pass_on(source: socket.socket, target: socket.socket, change: Change) -> None:
    """Copy one direction of a connection to its end."""
    with source, target:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for piece in change(data):
                    target.sendall(piece)
        # The other direction ends too.
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
