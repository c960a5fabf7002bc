"""Words the end of a job that failed: the cause in full, a line for every other rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringreduce.commands.launch.failure import Cause, Failure
from ringreduce.vocabulary.words import named

TRACEBACKS = ("cause", "all")
_LEFT = (
    "  every rank must call init() before any can go on: look for what ends the program of {} "
    "early, such as a return, an exit, or `if rank == 0:` around it"
)
_REMEDY = "call rr.init() and wrap the optimizer, rr.DistributedOptimizer(optimizer)"
APART_SO_FAR = f"{{}} imported Keras, and no rank has joined a ring yet; for one model, {_REMEDY}"
APART = f"{{}} imported Keras and joined no ring, so each ran by itself; for one model, {_REMEDY}"


def conclude(
    cause: Cause,
    failures: Sequence[Failure],
    tracebacks: str,
    ended: Sequence[int] = (),
) -> list[str]:
    """The lines that explain a failure.

    Args:
        failures: of all ranks, that of `cause` too.
        tracebacks: one of `TRACEBACKS`, whose tracebacks are shown.
        ended: ranks that have ended by themselves, with exit code 0; others may wait for them.
    """
    first = cause.first
    lines = [f"{cause.describe()}; all workers were stopped"]
    traceback = first.traceback(whole=tracebacks == "all")
    lines += _indented(traceback or filter(None, [first.exception]))
    if first.has_left:
        lines.append(_LEFT.format(first.who))
    elif ended:
        itself = "itself" if len(ended) == 1 else "themselves"
        lines.append(f"{named('rank', ended)} had ended by {itself}, exit code 0")
    lines += others(first, failures, tracebacks)
    if tracebacks != "all" and any(
        failure.traceback(whole=True) for failure in failures if failure.rank != first.rank
    ):
        lines.append("--tracebacks all shows those of all ranks")
    return lines


def others(first: Failure, failures: Sequence[Failure], tracebacks: str) -> list[str]:
    """A line for each rank that failed but `first`; arguments as for `conclude`."""
    lines = []
    for failure in sorted(failures, key=lambda failure: failure.time_s):
        if failure.rank == first.rank:
            continue
        line = f"then {failure.who} ({failure.describe()})"
        if tracebacks == "all" and failure.traceback(whole=True):
            lines += [f"{line}:", *_indented(failure.traceback(whole=True))]
        else:
            lines.append(f"{line}: {failure.exception}" if failure.exception else line)
    return lines


def wanted_keyboard(cause: Cause) -> bool:
    """Whether a debugger or `input` found the end of standard input."""
    exceptions = ("bdb.BdbQuit", "EOFError: EOF when reading a line")
    return cause.first.exception.startswith(exceptions)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]
