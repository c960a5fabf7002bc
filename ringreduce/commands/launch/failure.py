"""Finds the worker that failed first. Pure.

A rank that dies of an exception takes a while to leave Python; by then its neighbours may have
raised PeerLostError and ended. So a failure that only reports another rank's is a consequence, at
any time, and the earliest of the others is the cause. A worker's time of failure is that of its
last traceback's first line, or of its exit when it printed none or was killed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ringreduce.commands.launch.tracebacks import exception_in
from ringreduce.pure.blame import Error, Facts, find_culprit

_REPORTS_ANOTHER = re.compile(
    r"\b(PeerLostError|PeerTimeoutError|WorkerError)\b|was (told|left) by rank \d"
)


@dataclass(frozen=True)
class Failure:
    """A worker that ended with an exit code other than 0, or was about to.

    Attributes:
        returncode: its exit code, or minus the signal that killed it.
        time_s: when it failed, on the launcher's `time.monotonic`.
        traceback: lines of the last traceback that it printed, and lines after it; empty for none.
        was_stopped: whether the launcher stopped it, after its traceback.
        host: the name of its host; empty where all ranks are on the launcher's.
        lost: why it counts as failed, if its own launcher or its host is gone.
        is_report: whether it is known, from another launcher, to only report another rank's.
        is_final: whether somebody has asked for the end of the job.
    """

    rank: int
    returncode: int
    time_s: float
    traceback: tuple[str, ...]
    was_stopped: bool = False
    host: str = ""
    lost: str = ""
    is_report: bool = False
    is_final: bool = False

    @property
    def who(self) -> str:
        """``rank 3``, or ``rank 3 on node2``."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def is_consequence(self) -> bool:
        """Whether this worker only reports that another one failed."""
        found = self.returncode > 0 and any(map(_REPORTS_ANOTHER.search, self.traceback))
        return found or self.is_report

    @property
    def exception(self) -> str:
        """The line that names the exception; empty for none, or when a signal killed it."""
        return exception_in(self.traceback) if self.returncode > 0 else ""

    @property
    def exit_code(self) -> int:
        """What a shell would show: the exit code, or 128 plus the signal's number."""
        return self.returncode if self.returncode > 0 else 128 - self.returncode

    def describe(self) -> str:
        """``exit code 3``, or ``killed by signal 9 (SIGKILL)``."""
        if self.was_stopped:
            return "stopped while it ended"
        if self.lost:
            return self.lost
        if self.returncode > 0:
            return f"exit code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = "unknown"
        return f"killed by signal {-self.returncode} ({name})"


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """The failure that caused the others; None when there is none."""
    # A consequence names an unknown other rank.
    facts = [
        Facts(f.rank, error=Error("PeerError" if f.is_consequence else f.describe(), f.time_s))
        for f in failures
    ]
    finding = find_culprit(facts)
    ranks = finding.culprits or finding.witnesses
    return next((failure for failure in failures if failure.rank in ranks), None)
