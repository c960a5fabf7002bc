"""Messages between launchers of one job, and between a launcher and its agents. Pure.

    launcher -- ssh's standard input --> agent       Assignment, Start, Signal, Alive; Told, Ended
    launcher <-- its standard output --- agent       Hello, Ready or Refused; Output, Told, Ended

    node 1, 2, ... -- Join ---------------> node 0
                   <- Placed, or Refused --
                   <- Told, Ended, Alive ->

The agent's first bytes are `MAGIC`, since a login shell may have written something before.
"""

from typing import Any

import msgspec

from ringreduce.commands.launch.worker_records import WorkerRecord

MAGIC = b"\0ringreduce agent\n"


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The launcher lives."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Why what the other end wants cannot be done."""

    text: str


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
    """The ranks that a host has, from `first_rank` on, and where in the job they are."""

    first_rank: int
    size: int
    job_id: str
    restart: int
    port: int  # of rank 0's host, where the ranks meet; 0: any free one
    nodes: tuple[tuple[str, int], ...] = ()  # the host of each, and how many ranks it has


class Assignment(msgspec.Struct, tag=True, frozen=True):
    """The ranks that a host has, and what they run."""

    placed: Placed
    count: int
    # arguments, choices, variables, threads: as in `JobPlan`; with the secret among the choices.
    arguments: list[str]
    choices: dict[str, Any]
    variables: dict[str, str]
    threads: int | None
    columns: int | None  # width of the terminal that shows their lines; None: there is none
    meeting_host: str = "127.0.0.1"  # where the ranks meet
    is_reached_by_others: bool = False  # whether rank 0 must be reached from other hosts

    @property
    def ranks(self) -> range:
        return range(self.placed.first_rank, self.placed.first_rank + self.count)


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start the ranks, which meet at ``meeting_host:port``."""

    port: int


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to a rank's processes, or to its own alone: see `LocalHost.send`."""

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
    life: int = 0  # which process of the rank: more where it was lost, and started again


class Told(msgspec.Struct, tag=True, frozen=True):
    """A rank has told its launcher something."""

    rank: int
    record: WorkerRecord
    life: int = 0


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A rank has ended; `returncode` is its exit code, or minus the signal that killed it."""

    rank: int
    returncode: int
    how: str = ""  # where more is known
    is_final: bool = False  # whether somebody has asked for the end of the job
    # Whether its process was seen to have ended; else its launcher or host was lost, or ends it.
    is_seen: bool = False
    life: int = 0


# Of what ranks elsewhere do an agent is told that, which its own ranks may have to know.
Order = Assignment | Start | Signal | Alive | Told | Ended
Event = Output | Told | Ended  # what ranks do, on whichever host
Report = Hello | Refused | Ready | Event
NodeRecord = Join | Placed | Refused | Told | Ended | Alive
