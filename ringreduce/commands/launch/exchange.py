"""What the launcher and its agent on another host send each other: records as msgpack. Pure.

    launcher -- ssh's standard input --> agent       Assignment, Start, Signal, Alive
    launcher <-- its standard output --- agent       Hello, Ready or Refused; Output, Told, Ended

The agent's first bytes are `MAGIC`, since a login shell may have written something before.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ringreduce.commands.launch.failure import Failure
from ringreduce.commands.launch.frames import Alive, Frames, Refused, frame
from ringreduce.commands.launch.worker_records import WorkerRecord
from ringreduce.vocabulary.errors import ConfigError

MAGIC = b"\0ringreduce agent\n"
# An environment may be large; output comes in pieces of 64 KiB.
_FRAME_BYTES_MAX = 1 << 24


class Assignment(msgspec.Struct, tag=True, frozen=True):
    """The ranks that a host has, and what they run.

    Attributes:
        arguments: Python's: a script, or ``-m`` and a module's name, and the program's own.
        choices: fields of `Config` that the user chose, and the secret.
        variables: added to the environment.
        threads: compute threads of each; None: the host's cores shared out.
        columns: width of the terminal that shows their lines; None: there is none.
        keeps_records: whether they ignore SIGUSR1 until they can write flight records.
        meeting_host, meeting_port: where the ranks meet, on rank 0's host; port 0: any free one.
        is_reached_by_others: whether rank 0 must be reached from other hosts.
    """

    arguments: list[str]
    first_rank: int
    count: int
    size: int
    job_id: str
    restart: int
    choices: dict[str, Any]
    variables: dict[str, str]
    threads: int | None
    columns: int | None
    keeps_records: bool
    meeting_host: str = "127.0.0.1"
    meeting_port: int = 0
    is_reached_by_others: bool = False

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        return range(self.first_rank, self.first_rank + self.count)


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start the ranks, which meet at ``meeting_host:port``."""

    port: int


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to a rank's processes, or to the rank `alone`."""

    rank: int
    number: int
    alone: bool = False


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The agent runs this version of ringreduce."""

    version: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The assignment can be started; on rank 0's host `port` listens for the ranks, else 0."""

    port: int


class Output(msgspec.Struct, tag=True, frozen=True):
    """Bytes that a rank wrote; none: that stream has ended."""

    rank: int
    is_error: bool
    data: bytes


class Told(msgspec.Struct, tag=True, frozen=True):
    """What a rank has told its launcher."""

    rank: int
    record: WorkerRecord


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A rank has ended; `returncode` is its exit code, or minus the signal that killed it."""

    rank: int
    returncode: int


class Said(msgspec.Struct, tag=True, frozen=True):
    """A line from ssh, or from the agent's standard error. Never sent."""

    host: str
    text: str


class Lost(msgspec.Struct, tag=True, frozen=True):
    """The agent is gone, and why. Never sent."""

    host: str
    why: str


class FailedElsewhere(msgspec.Struct, tag=True, frozen=True):
    """What another launcher of the job says. Never sent in this form."""

    failure: Failure


class JoinsElsewhere(msgspec.Struct, frozen=True):
    """A rank of another launcher waits in the ring of all ranks. Never sent in this form."""


Order = Assignment | Start | Signal | Alive
Report = Hello | Refused | Ready | Output | Told | Ended
Event = Report | Said | Lost | FailedElsewhere | JoinsElsewhere

_ORDERS = msgspec.msgpack.Decoder(Order)
_REPORTS = msgspec.msgpack.Decoder(Report)


def encode(record: Order | Report) -> bytes:
    """One frame."""
    return frame(msgspec.msgpack.encode(record))


class Orders:
    """Makes records of the launcher's bytes."""

    def __init__(self) -> None:
        self._frames = Frames(_FRAME_BYTES_MAX)

    def feed(self, data: bytes) -> list[Order]:
        """The records that `data` completes. Raises ConfigError for what is none."""
        return [_decode(_ORDERS, each) for each in self._frames.feed(data)]


class Reports:
    """Makes records of an agent's bytes, from `MAGIC` on."""

    def __init__(self) -> None:
        self._frames, self._before, self._has_begun = Frames(_FRAME_BYTES_MAX), b"", False

    def feed(self, data: bytes) -> list[Report]:
        """The records that `data` completes. Raises ConfigError for what is none."""
        if not self._has_begun:
            before, magic, data = (self._before + data).partition(MAGIC)
            if not magic:
                self._before = before[-len(MAGIC) :]
                return []
            self._has_begun = True
        return [_decode(_REPORTS, each) for each in self._frames.feed(data)]


def _decode(decoder: Any, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"got a record that ringreduce does not send: {error}") from None
