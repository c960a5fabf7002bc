"""What a job runs, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringreduce.commands.launch.meeting import Meeting
from ringreduce.commands.launch.spread import Spread


@dataclass(frozen=True)
class Plan:
    """What a job runs, in every attempt.

    Attributes:
        arguments: Python's: a script, or ``-m`` and a module's name, and the program's own.
        count: the number of ranks, here and on the hosts of `spread`.
        threads: compute threads of each worker; None: its host's cores shared out.
        output: whose lines are shown as they come (`display.OUTPUTS`).
        tracebacks: whose tracebacks are shown (`conclusion.TRACEBACKS`).
        stdin_rank: the rank that gets the launcher's standard input, or its terminal.
        choices: fields of `Config` that the user chose.
        inherited: for each rank, descriptors that its process gets, and whose numbers stand after
            the command's arguments; empty: none.
        variables: added to the workers' environment.
        spread: the hosts that are reached through ssh; None: only this one.
        meeting: with launchers of other hosts; None: there are none.
    """

    arguments: Sequence[str]
    count: int
    threads: int | None
    output: str
    tracebacks: str
    stdin_rank: int | None
    choices: Mapping[str, Any]
    inherited: Sequence[Sequence[int]] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    spread: Spread | None = None
    meeting: Meeting | None = None

    @property
    def size(self) -> int:
        """The number of ranks in the job."""
        return self.count if self.meeting is None else self.meeting.placed.size

    @property
    def ranks(self) -> range:
        """The ranks of this launcher."""
        first = 0 if self.meeting is None else self.meeting.placed.first_rank
        return range(first, first + self.count)
