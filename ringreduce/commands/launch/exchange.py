"""Messages between the launcher and its agent on another host, as msgpack. Pure.

    launcher -- ssh's standard input --> agent       Assignment, Start, Signal, Alive
    launcher <-- its standard output --- agent       Hello, Ready or Refused; Output, Told, Ended

Launchers of several hosts send each other Told and Ended too (`node_messages`).

The agent's first bytes are `MAGIC`, since a login shell may have written something before.
"""

from typing import Any

import msgspec

from ringreduce.commands.launch.frames import Alive, Refused
from ringreduce.commands.launch.worker_records import WorkerRecord

MAGIC = b"\0ringreduce agent\n"


class Assignment(msgspec.Struct, tag=True, frozen=True):
    """The ranks that a host has, and what they run."""

    # arguments, choices, variables, threads: as in `JobPlan`; with the secret among the choices.
    arguments: list[str]
    first_rank: int
    count: int
    size: int
    job_id: str
    restart: int
    choices: dict[str, Any]
    variables: dict[str, str]
    threads: int | None
    columns: int | None  # width of the terminal that shows their lines; None: there is none
    # meeting_host, meeting_port: where the ranks meet, on rank 0's host; port 0: any free one.
    meeting_host: str = "127.0.0.1"
    meeting_port: int = 0
    is_reached_by_others: bool = False  # whether rank 0 must be reached from other hosts

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.count)


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start the ranks, which meet at ``meeting_host:port``."""

    port: int


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to a rank's processes; one that asks for its flight record to it alone."""

    rank: int
    number: int


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
    """A rank has told its launcher something."""

    rank: int
    record: WorkerRecord


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A rank has ended; `returncode` is its exit code, or minus the signal that killed it."""

    rank: int
    returncode: int
    how: str = ""  # where more is known
    is_final: bool = False  # whether somebody has asked for the end of the job


Order = Assignment | Start | Signal | Alive
Event = Output | Told | Ended  # what ranks do, on whichever host
Report = Hello | Refused | Ready | Event
