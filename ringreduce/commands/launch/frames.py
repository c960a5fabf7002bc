"""Records on a connection of the launcher's: what every kind of connection has. Pure.

A frame is its length in four bytes and its data.
"""

from __future__ import annotations

import msgspec

from ringreduce.vocabulary.errors import ConfigError

_LENGTH_BYTES = 4


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The launcher lives."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Why what the other end wants cannot be done."""

    text: str


def frame(data: bytes) -> bytes:
    """One frame."""
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Frames:
    """Cuts bytes into the data of frames, which are at most `bytes_max` long."""

    def __init__(self, bytes_max: int) -> None:
        self._data, self._bytes_max = bytearray(), bytes_max

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. Raises ConfigError for one that is too long."""
        self._data += data
        frames = []
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if end > self._bytes_max:
                raise ConfigError(f"got a record of {end} bytes, which ringreduce does not send")
            if len(self._data) < end:
                break
            frames.append(bytes(self._data[_LENGTH_BYTES:end]))
            del self._data[:end]
        return frames
