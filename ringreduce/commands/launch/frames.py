"""Records on a connection of the launcher's, as msgpack: what every connection has. Pure.

A frame is its length in four bytes and its data.
"""

from typing import Any, Generic, TypeVar

import msgspec

from ringreduce.vocabulary.errors import ConfigError

_LENGTH_BYTES = 4
# An environment may be large; output comes in pieces of 64 KiB, and a failure is cut.
_FRAME_BYTES_MAX = 1 << 24
_Record = TypeVar("_Record")


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The launcher lives."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Why what the other end wants cannot be done."""

    text: str


def frame(data: bytes) -> bytes:
    """One frame."""
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def encode(record: msgspec.Struct) -> bytes:
    """A record as one frame."""
    return frame(msgspec.msgpack.encode(record))


class Frames:
    """Cuts bytes into the data of frames, which are at most `bytes_max` long."""

    def __init__(self, bytes_max: int = _FRAME_BYTES_MAX) -> None:
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


class Records(Generic[_Record]):
    """Makes records of one direction's bytes; what comes before those of `after` is left out."""

    def __init__(self, kinds: Any, after: bytes = b"") -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._frames, self._after, self._before = Frames(), after, b""

    def feed(self, data: bytes) -> list[_Record]:
        """The records that `data` completes. Raises ConfigError for what is none."""
        if self._after:
            before, mark, data = (self._before + data).partition(self._after)
            if not mark:
                self._before = before[-len(self._after) :]
                return []
            self._after = b""
        frames = self._frames.feed(data)
        try:
            return [self._decoder.decode(data) for data in frames]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigError(f"got a record that ringreduce does not send: {error}") from None
