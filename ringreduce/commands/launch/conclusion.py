"""Words the end of a job that failed: the cause in full, a line for every other rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringreduce.commands.launch.failure import Failure
from ringreduce.commands.launch.tracebacks import exception_in, without_internals
from ringreduce.vocabulary.words import named

TRACEBACKS = ("cause", "all")


def conclude(
    cause: Failure,
    failures: Sequence[Failure],
    held: Mapping[int, Sequence[str]],
    tracebacks: str,
    ended: Sequence[int] = (),
) -> list[str]:
    """The lines that explain a failure.

    Args:
        failures: of all ranks, `cause` too.
        ended: ranks that have ended by themselves, with exit code 0; others may wait for them.
        held: by rank, its traceback and what it wrote after that, unless that has been shown. A
            rank that the launcher stopped may have one too.
        tracebacks: one of `TRACEBACKS`, whose tracebacks are shown.
    """
    lines = [f"{cause.who} failed first ({cause.describe()}); all workers were stopped"]
    if cause.rank in held:
        shown = held[cause.rank]
        lines += _indented(shown if tracebacks == "all" else without_internals(shown))
    elif cause.exception:
        lines.append(f"  {cause.exception} (its traceback is above)")
    if ended:
        itself = "itself" if len(ended) == 1 else "themselves"
        lines.append(f"{named('rank', ended)} had ended by {itself}, exit code 0")
    lines += others(cause, failures, held, tracebacks)
    if tracebacks != "all" and held.keys() - {cause.rank}:
        lines.append("--tracebacks all shows those of all ranks")
    return lines


def others(
    cause: Failure,
    failures: Sequence[Failure],
    held: Mapping[int, Sequence[str]],
    tracebacks: str,
) -> list[str]:
    """A line for each other rank; arguments as for `conclude`."""
    lines = []
    failed = {failure.rank: failure for failure in failures}
    ranks = [f.rank for f in sorted(failures, key=lambda f: f.time_s)]
    ranks += sorted(held.keys() - failed.keys())
    for rank in ranks:
        if rank == cause.rank:
            continue
        who = failed[rank].who if rank in failed else f"rank {rank}"
        how = failed[rank].describe() if rank in failed else "stopped"
        text = held.get(rank, ())
        exception = failed[rank].exception if rank in failed else exception_in(text)
        if tracebacks == "all":
            lines += [f"then {who} ({how}):" if text else f"then {who} ({how})"]
            lines += _indented(text)
        else:
            lines.append(f"then {who} ({how})" + (f": {exception}" if exception else ""))
    return lines


def wanted_keyboard(cause: Failure) -> bool:
    """Whether a debugger or `input` found the end of standard input."""
    return cause.exception.startswith(("bdb.BdbQuit", "EOFError: EOF when reading a line"))


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]
