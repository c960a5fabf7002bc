"""A job's plan: what it runs, where, and how it is shown and ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringreduce.commands.launch.meeting import Meeting
from ringreduce.commands.launch.spread import Spread
from ringreduce.vocabulary.config import TIMES


@dataclass(frozen=True)
class JobPlan:
    """A job's plan, equal in every attempt."""

    arguments: Sequence[str]  # a script, or ``-m`` and a module's name, and the program's own
    count: int  # the number of ranks, here and on the hosts of `spread`
    # Fields of `Config` for the workers; where absent, as the environment has them. What is kept in
    # `log_dir` of the k-th restart goes to its folder ``restart-k``.
    choices: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None  # compute threads of each worker; None: its host's cores shared out
    max_restarts: int = 0
    # How many ranks must be left to go on when others are lost; None: the first one ends the job.
    elastic: int | None = None
    grace_s: float = TIMES.grace_s
    output: str = "all"
    stdin_rank: int | None = None
    # For each rank, descriptors for its process, with their numbers as last arguments; empty: none.
    inherited: Sequence[Sequence[int]] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # added to the workers' environment
    spread: Spread | None = None  # the hosts that are reached through ssh; None: only this one
    meeting: Meeting | None = None  # with launchers of other hosts; None: there are none

    @property
    def size(self) -> int:
        return self.count if self.meeting is None else self.meeting.placed.size

    @property
    def ranks(self) -> range:
        first = 0 if self.meeting is None else self.meeting.placed.first_rank
        return range(first, first + self.count)

    @property
    def log_dir(self) -> str | None:
        """Where the records of ranks are kept, if they are."""
        return self.choices.get("log_dir")
