"""Stands between two ranks and changes one bit of what passes, once."""

from __future__ import annotations

import contextlib
import socket
import threading

from ringreduce.transport.zeromq import ZmqLink

__all__ = ["Flip", "stand_before"]


class Flip:
    """Changes a bit at `offset` bytes from where `marker` begins, the first time it passes."""

    def __init__(self, marker: bytes, offset: int, bit: int = 0) -> None:
        self._marker, self._offset, self._bit = marker, offset, bit
        self._lock = threading.Lock()
        self.is_done = False

    def search(self, seen: bytes) -> int:
        """Place of the byte to change, counted from the start of `seen`; -1 if not there yet."""
        place = seen.find(self._marker)
        return -1 if place < 0 or self.is_done else place + self._offset

    def claim(self) -> bool:
        """Whether it is the caller's to do; so for one connection only."""
        with self._lock:
            was_done, self.is_done = self.is_done, True
            return not was_done

    def change(self, data: bytearray, place: int) -> None:
        """Do it."""
        data[place] ^= 1 << self._bit


def stand_before(link: ZmqLink, flip: Flip) -> None:
    """From now on others reach `link` through sockets of ours; it has not connected yet."""
    host, _, ports = link.address.rpartition(":")
    ours = [_listen(int(port), flip) for port in ports.split(",")]
    link.address = f"{host}:{','.join(map(str, ours))}"


def _listen(port: int, flip: Flip) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)

    def serve() -> None:
        with listener, contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                near.settimeout(None)
                far = socket.create_connection(("127.0.0.1", port))
                for source, target, changed in ((near, far, flip), (far, near, None)):
                    threading.Thread(
                        target=_pass_on, args=(source, target, changed), daemon=True
                    ).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def _pass_on(source: socket.socket, target: socket.socket, flip: Flip | None) -> None:
    """Copy one direction of a connection to its end."""
    with contextlib.suppress(OSError), source, target:
        total, kept, due = 0, b"", -1
        while data := bytearray(source.recv(1 << 16)):
            if flip is not None:
                if due < 0:
                    seen = kept + bytes(data)
                    place = flip.search(seen)
                    # What has gone cannot be changed any more.
                    if place >= len(kept) and flip.claim():
                        due = total - len(kept) + place
                    kept = seen[-256:]
                if total <= due < total + len(data):
                    flip.change(data, due - total)
                total += len(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
