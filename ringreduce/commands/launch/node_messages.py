"""Messages between the launchers of a job with ``--nnodes``. Pure.

    node 1, 2, ... -- Join ---------------> node 0
                   <- Placed, or Refused --
                   <- Told, Ended, Alive ->

Each end begins with `MAGIC` and a random nonce. A frame has a record, after a code that only a
launcher that knows the secret can make for this connection, direction and frame. Records are not
encrypted: they hold no secret, and no text of a program.
"""

import hashlib
import hmac
from typing import Any

import msgspec

from ringreduce.commands.launch.exchange import Ended, Told
from ringreduce.commands.launch.frames import Alive, Frames, Refused, frame
from ringreduce.vocabulary.errors import ConfigError

MAGIC = b"\0ringreduce node\n"
NONCE_BYTES = 32
_CODE_BYTES = 16
_FRAME_BYTES_MAX = 1 << 16
_PERSON = b"rr launchers"


class Join(msgspec.Struct, tag=True, frozen=True):
    """A launcher; `version`, `nodes`, `max_restarts` and `elastic` must be equal on all."""

    version: str
    nodes: int
    max_restarts: int
    node: int
    count: int
    host: str
    elastic: int | None = None


class Placed(msgspec.Struct, tag=True, frozen=True):
    """The ranks that a launcher starts, and the port of node 0's host where they meet."""

    first_rank: int
    size: int
    job_id: str
    restart: int
    port: int
    nodes: tuple[tuple[str, int], ...] = ()  # the host of each, and how many ranks it has


Event = Told | Ended
Record = Join | Placed | Refused | Event | Alive

_DECODER = msgspec.msgpack.Decoder(Record)


class Channel:
    """Makes frames of records, and records of the other end's bytes; `is_first` on node 0."""

    def __init__(self, secret: str, nonce: bytes, *, is_first: bool) -> None:
        self._master = hashlib.blake2b(secret.encode(), person=_PERSON).digest()
        self._nonce, self._is_first = nonce, is_first
        self._begun = b""
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0
        self._frames = Frames(_FRAME_BYTES_MAX)

    @property
    def opening(self) -> bytes:
        return MAGIC + self._nonce

    @property
    def is_open(self) -> bool:
        """Whether the other end's nonce has arrived, so that `encode` can be called."""
        return self._keys is not None

    def encode(self, record: Record) -> bytes:
        assert self._keys is not None
        data = msgspec.msgpack.encode(record)
        code = _code(self._keys[0], self._sent, data)
        self._sent += 1
        return frame(code + data)

    def feed(self, data: bytes) -> list[Record]:
        """The records that `data` completes; ConfigError for what no launcher of this job sends."""
        if self._keys is None:
            self._begun += data
            length = len(MAGIC) + NONCE_BYTES
            if not MAGIC.startswith(self._begun[: len(MAGIC)]):
                raise ConfigError("is no launcher of ringreduce")
            if len(self._begun) < length:
                return []
            self._keys = self._derive(self._begun[len(MAGIC) : length])
            data = self._begun[length:]
        return [self._open(frame) for frame in self._frames.feed(data)]

    def _derive(self, theirs: bytes) -> tuple[bytes, bytes]:
        nonces = self._nonce + theirs if self._is_first else theirs + self._nonce
        keys = [hashlib.blake2b(nonces + end, key=self._master).digest() for end in (b"0", b"1")]
        return (keys[0], keys[1]) if self._is_first else (keys[1], keys[0])

    def _open(self, sealed: bytes) -> Any:
        assert self._keys is not None
        code, data = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, _code(self._keys[1], self._received, data)):
            raise ConfigError("does not know this job's secret")
        self._received += 1
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise ConfigError("runs another version of ringreduce") from None


def _code(key: bytes, number: int, data: bytes) -> bytes:
    message = number.to_bytes(8, "big") + data
    return hashlib.blake2b(message, key=key, digest_size=_CODE_BYTES).digest()
