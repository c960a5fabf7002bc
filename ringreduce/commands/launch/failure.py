"""Finds the worker that failed first. Pure.

A rank that dies of an exception takes a while to leave Python; by then its neighbours may have
raised PeerLostError and ended. So a failure that only reports another rank's is a consequence, at
any time, and the earliest of the others is the cause (`pure.blame`). A worker fails when it says
which exception ends it, or when it ends without saying so.
"""

import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringreduce.commands.launch.worker_records import Raised
from ringreduce.pure.blame import RankFacts, find_culprit
from ringreduce.vocabulary import errors
from ringreduce.vocabulary.errors import ErrorRecord, WorkerError
from ringreduce.vocabulary.words import named

_EXITS = ("SystemExit", "KeyboardInterrupt")


class Failure(NamedTuple):
    """A worker that ended with an exit code other than 0, or is about to.

    Without `host` all ranks are on the launcher's; `how` says more than the exit code, if the
    kernel has killed it, or its own launcher or its host is gone.
    """

    rank: int
    returncode: int  # its exit code, or minus the signal that killed it
    time_s: float  # when it failed, on the launcher's `time.monotonic`
    raised: Raised | None = None  # the exception that ended it, if it could say so
    has_ended: bool = True
    was_stopped: bool = False  # whether the launcher stopped it, after it had failed
    host: str = ""
    how: str = ""
    # Whether it ended well, but before it joined a ring for which others wait.
    has_left: bool = False
    is_final: bool = False  # whether somebody has asked for the end of the job

    @property
    def who(self) -> str:
        """``rank 3``, or ``rank 3 on node2``."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def exception(self) -> str:
        """The line that names the exception; empty for none."""
        return self.raised.exception if self.raised else ""

    @property
    def traceback(self) -> Sequence[str]:
        return self.raised.traceback if self.raised else ()

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell, where a signal's is 128 plus its number."""
        return self.returncode if self.returncode > 0 else 128 - self.returncode

    def describe(self) -> str:
        """``exit code 3``, ``killed by signal 9 (SIGKILL)``; if it was stopped, its exception."""
        if self.was_stopped and self.raised is not None and self.raised.kind != "SystemExit":
            return self.raised.kind
        if self.how:
            return self.how
        if self.has_left:
            return "exit code 0, before it joined the ring for which others wait"
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        name = next((s.name for s in signal.Signals if s == -self.returncode), "unknown")
        return f"killed by signal {-self.returncode} ({name})"


class Cause(NamedTuple):
    """Why a job failed."""

    # The failure that caused the others; or, if there are `silent` ranks, the first about them.
    first: Failure
    # Ranks that held up the others, or left them, and have not failed, such as a stopped one.
    silent: tuple[int, ...] = ()
    is_certain: bool = True  # whether nothing that ranks may yet say would change it

    @property
    def rank(self) -> int:
        """The rank to blame, the lowest of several."""
        return self.silent[0] if self.silent else self.first.rank

    def describe(self, of: str = "") -> str:
        """The cause in a line; `of` stands after the rank's number."""
        how = self.first.describe()
        if not self.silent:
            return f"{self.first.who}{of} failed first ({how})"
        itself = "itself" if len(self.silent) == 1 else "themselves"
        return (
            f"{named('rank', self.silent)}{of} held up or left the others and did not fail "
            f"{itself}; {self.first.who} was the first to notice ({how})"
        )


def worker_error(cause: Cause, size: int, lines: Sequence[str]) -> WorkerError:
    """Make the error for a caller of `launch`; below it stand `lines`."""
    others = "" if size == 1 else "; all workers were stopped"
    text = f"{cause.describe(f' of {size}')}{others}"
    return WorkerError(text, size=size, peer=cause.rank, traceback="\n".join(lines))


def find_cause(failures: Sequence[Failure], ranks: Iterable[int]) -> Cause | None:
    """The cause of the failures among `ranks`; None when there are none."""
    if not failures:
        return None
    failed = {failure.rank: failure for failure in failures}
    unknown = [rank for rank in ranks if rank not in failed]
    facts = [
        RankFacts(f.rank, error=f.raised or ErrorRecord(f.describe()), failed_s=f.time_s)
        for f in failures
    ]
    finding = find_culprit(facts, unknown=unknown)
    known = [failed[rank] for rank in finding.culprits if rank in failed]
    if known:
        return Cause(min(known, key=lambda failure: failure.time_s))
    first = next((failed[rank] for rank in finding.witnesses if rank in failed), failures[0])
    return Cause(first, finding.culprits, is_certain=False)


def find_repeated(failures: Sequence[Failure], *, by_text: bool) -> list[Failure]:
    """Find failures by exceptions that have ended several ranks, and would end all in turn.

    Without `by_text` those of one class count as equal. An exit is no error, nor is a signal.
    """

    def text_of(failure: Failure) -> str:
        raised = failure.raised
        if raised is None or raised.kind in {*errors.__all__, *_EXITS}:
            return ""
        return f"{raised.kind} {failure.returncode} {failure.exception * by_text}"

    texts = {(failure.rank, text) for failure in failures if (text := text_of(failure))}
    ranks = Counter(text for _, text in texts)
    return [failure for failure in failures if ranks[text_of(failure)] > 1]
