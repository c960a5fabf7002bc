"""Records on a connection of the launcher, as msgpack: each a frame, length and data. Pure."""

import hashlib
import hmac
from typing import Any, Generic, TypeVar

import msgspec

from ringreduce.pure.decoding import UNREADABLE
from ringreduce.vocabulary.errors import ConfigError

_LENGTH_BYTES = 4
# An environment may be large; output comes in pieces of 64 KiB, and a failure is cut.
_FRAME_BYTES_MAX = 1 << 24
_Record = TypeVar("_Record")

# Of launchers that meet over a network: what they begin with, and what their frames have.
MAGIC = b"\0ringreduce node\n"
NONCE_BYTES = 32
_CODE_BYTES = 16
_SEALED_BYTES_MAX = 1 << 16
OVERHEAD_BYTES = _LENGTH_BYTES + _CODE_BYTES  # of a frame with a code
_PERSON = b"rr launchers"


def encode(record: msgspec.Struct) -> bytes:
    """A record as one frame."""
    return _frame(msgspec.msgpack.encode(record))


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Records(Generic[_Record]):
    """Makes records of one direction's bytes; what comes before those of `after` is left out."""

    def __init__(self, kinds: Any, after: bytes = b"", bytes_max: int = _FRAME_BYTES_MAX) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._data, self._after, self._bytes_max = bytearray(), after, bytes_max

    def feed(self, data: bytes) -> list[_Record]:
        """The records that `data` completes. Raises ConfigError for what is none."""
        self._data += data
        if self._after:
            before, mark, rest = self._data.partition(self._after)
            self._data = rest if mark else before[-len(self._after) :]
            if not mark:
                return []
            self._after = b""
        records = []
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if end > self._bytes_max:
                raise ConfigError(f"got a record of {end} bytes, which ringreduce does not send")
            if len(self._data) < end:
                break
            data = self._open(bytes(self._data[_LENGTH_BYTES:end]))
            del self._data[:end]
            try:
                records.append(self._decoder.decode(data))
            except UNREADABLE as error:
                text = f"got a record that this version of ringreduce does not send: {error}"
                raise ConfigError(text) from None
        return records

    def _open(self, data: bytes) -> bytes:
        """The record in a frame's data."""
        return data


class Channel(Records[_Record]):
    """Frames and records of a connection with a stranger; `is_first` at one of its two ends.

    Each end begins with `MAGIC` and a random nonce. A frame has a code before its record, which
    only those can make that know the secret, for this connection, direction and frame. Records are
    not encrypted: they hold no secret, and no text of a program.

    Frames of the other end have at most 64 KiB; after its first, `bytes_max`.
    """

    def __init__(
        self,
        kinds: Any,
        secret: str,
        nonce: bytes,
        *,
        is_first: bool,
        bytes_max: int = _SEALED_BYTES_MAX,
    ) -> None:
        super().__init__(kinds, bytes_max=_SEALED_BYTES_MAX)
        self._proven_bytes_max = bytes_max
        self._master = hashlib.blake2b(secret.encode(), person=_PERSON).digest()
        self._is_first, self._nonce, self.opening = is_first, nonce, MAGIC + nonce
        self._begun = b""
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0

    @property
    def is_open(self) -> bool:
        """Whether the other end's nonce has arrived, so that `encode` can be called."""
        return self._keys is not None

    @property
    def is_proven(self) -> bool:
        """Whether the other end has shown that it knows the secret."""
        return self._received > 0

    def encode(self, record: msgspec.Struct) -> bytes:
        return self.seal(msgspec.msgpack.encode(record))

    def seal(self, data: bytes) -> bytes:
        """An encoded record as one frame."""
        assert self._keys is not None
        code = _code(self._keys[0], self._sent, data)
        self._sent += 1
        return _frame(code + data)

    def feed(self, data: bytes) -> list[_Record]:
        """The records that `data` completes; ConfigError for what no launcher of this job sends."""
        if self._keys is None:
            self._begun += data
            if not MAGIC.startswith(self._begun[: len(MAGIC)]):
                raise ConfigError("is no process of ringreduce")
            if len(self._begun) < len(self.opening):
                return []
            self._keys = self._derive(self._begun[len(MAGIC) : len(self.opening)])
            data = self._begun[len(self.opening) :]
        return super().feed(data)

    def _derive(self, theirs: bytes) -> tuple[bytes, bytes]:
        nonces = self._nonce + theirs if self._is_first else theirs + self._nonce
        keys = [hashlib.blake2b(nonces + end, key=self._master).digest() for end in (b"0", b"1")]
        return (keys[0], keys[1]) if self._is_first else (keys[1], keys[0])

    def _open(self, data: bytes) -> bytes:
        assert self._keys is not None
        code, data = data[:_CODE_BYTES], data[_CODE_BYTES:]
        if not hmac.compare_digest(code, _code(self._keys[1], self._received, data)):
            raise ConfigError("does not know this job's secret")
        self._received += 1
        self._bytes_max = self._proven_bytes_max
        return data


def _code(key: bytes, number: int, data: bytes) -> bytes:
    message = number.to_bytes(8, "big") + data
    return hashlib.blake2b(message, key=key, digest_size=_CODE_BYTES).digest()
