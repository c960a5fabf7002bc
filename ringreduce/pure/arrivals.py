"""What a newcomer and the first rank of a job that trains tell each other. Pure.

newcomer                      first rank
Here              <- ->       Here          both know the job's secret
Knock              ->
                  <-          Welcome       the job, as a member knows it; or Refusal
Ready              ->
                  <-          Noted         it may be taken in from now on; or Refusal
                  <-          Refusal, Ended
"""

from typing import Any

import msgspec

from ringreduce.pure.networks import are_networks
from ringreduce.pure.views import Row, View


class Here(msgspec.Struct, tag=True, frozen=True):
    """The first frame of both ends: its code shows that the sender knows the job's secret."""


class Knock(msgspec.Struct, tag=True, frozen=True):
    """A process that wants to come in; what `facts` are is for those that compare them."""

    version: str  # of ringreduce
    job_id: str
    place: int  # its rank in the job
    life: int  # as in `Row`
    facts: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.place < 0 or self.life <= 0:
            raise ValueError("a newcomer without a place")


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The job as the first rank knows it, of which a newcomer makes its own `formation.Job`.

    hosts, domains, standbys, keys, networks: by place, as in `Row`. `facts` and `journal` are for
    those that repeat what the members have done.
    """

    number: int  # of the job, in the header of every frame
    size: int
    hosts: tuple[str, ...]
    domains: tuple[str, ...]
    standbys: tuple[str, ...]
    keys: tuple[str, ...]  # empty texts without a secret
    networks: tuple[tuple[str, ...], ...]
    view: View  # the present one
    training: int = 0  # the number of that which the ring is formed anew for; 0: none
    has_ended: bool | None = None  # as `formation.Job` has it
    transport: str = ""  # how the members reach each other, ``shm``, ``zmq`` or ``shm+zmq``
    facts: dict[str, Any] = {}
    journal: bytes = b""

    def __post_init__(self) -> None:
        tables = (self.hosts, self.domains, self.standbys, self.keys, self.networks)
        if {*map(len, tables)} != {self.size} or self.size < 1:
            raise ValueError(f"tables that are not those of {self.size} ranks")
        members = self.view.members
        if not members or not {*members} <= {*range(self.size)} or len(self.view.lives) > self.size:
            raise ValueError(f"a view that is none of {self.size} ranks")
        if not all(map(are_networks, self.networks)):
            raise ValueError("networks that cannot be read")


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The newcomer could be taken in now, by that row."""

    row: Row
    facts: dict[str, Any] = {}


class Noted(msgspec.Struct, tag=True, frozen=True):
    """The newcomer is among those that the members may take in."""


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """Why the newcomer is not taken in; nothing follows."""

    text: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The job has ended, and how; nothing follows."""

    text: str


ToDoor = Here | Knock | Ready
FromDoor = Here | Welcome | Noted | Refusal | Ended
