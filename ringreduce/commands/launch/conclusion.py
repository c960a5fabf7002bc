"""Words the end of a job that failed: the cause in full, a line for every other rank. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence

from ringreduce.commands.launch.failure import Cause, Failure
from ringreduce.commands.launch.worker_records import Goes, Joined, Raised
from ringreduce.vocabulary import errors
from ringreduce.vocabulary.words import named

_LEFT = (
    "  every rank must call init(), or fit with --unchanged, before any can go on: look for what "
    "ends the program of {} early, such as a return, an exit, or `if rank == 0:` around it"
)
# How an error names the rank that has it, which differs.
_WHO = re.compile(r"rank \d+ of \d+( was told by rank \d+: rank \d+ of \d+)?")
_REMEDY = "call rr.init() and wrap the optimizer, rr.DistributedOptimizer(optimizer)"
APART_SO_FAR = f"{{}} imported Keras, and no rank has joined a ring yet; for one model, {_REMEDY}"
APART = f"{{}} imported Keras and joined no ring, so each ran by itself; for one model, {_REMEDY}"
_NO_HOROVOD = "ModuleNotFoundError: No module named 'horovod'"
_HOROVOD = (
    "  Horovod is not needed: `import ringreduce.keras.horovod as hvd` in its place; for a library "
    "that imports it, call hvd.install_as_horovod() before (docs/from-horovod.md)"
)

WAITING = "waits up to {grace_s:g} s for {ranks} to end; Ctrl-C now kills at once"
KILLED = (
    "killed {ranks}, which had not ended {grace_s:g} s after {signal}; --grace SECONDS gives more"
)


def conclude(
    cause: Cause,
    failures: Sequence[Failure],
    ended: Mapping[int, str] | None = None,
    log_dir: str | None = None,
    *,
    was_shown: bool = False,
) -> list[str]:
    """The lines that explain a failure; `failures` are of all ranks, that of `cause` too.

    Others may wait for the ranks that have `ended` by themselves, with exit code 0, and by what.
    What all ranks wrote is kept in `log_dir`, if that is given. `was_shown`: the traceback of the
    cause.
    """
    first = cause.first
    lines = [f"{cause.describe()}; all workers were stopped"]
    shown = () if was_shown else first.traceback
    lines += _indented(shown or filter(None, [first.exception]))
    if first.exception == _NO_HOROVOD:
        lines.append(_HOROVOD)
    elif first.has_left:
        lines.append(_LEFT.format(first.who))
    elif ended:
        itself = "itself" if len(ended) == 1 else "themselves"
        how = ", ".join(dict.fromkeys(ended.values()))
        lines.append(f"{named('rank', ended)} had ended by {itself}, exit code 0: {how}")
    lines += others(first, failures)
    is_cut = first.raised is not None and bool(first.raised.whole)
    if is_cut or any(failure.traceback for failure in failures if failure.rank != first.rank):
        has = f"{log_dir} has" if log_dir else "--log-dir DIR keeps"
        frames = ", with the frames that are left out" if is_cut else ""
        lines.append(f"{has} the tracebacks of all ranks{frames}")
    return lines


def others(first: Failure, failures: Sequence[Failure]) -> list[str]:
    """A line for each rank that failed but `first`; for those of a host that say the same, one."""
    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.time_s):
        if failure.rank != first.rank:
            text = _WHO.sub("rank", failure.exception, count=1) or failure.describe()
            alike.setdefault((failure.host, text), []).append(failure)
    lines = []
    for (host, text), them in alike.items():
        who = named("rank", sorted(failure.rank for failure in them))
        hows = [each.describe() for each in them if not (each.was_stopped and each.exception)]
        how = f" ({', '.join(dict.fromkeys(hows))})" if hows else ""
        line = f"then {who} on {host}{how}" if host else f"then {who}{how}"
        is_same = text == _WHO.sub("rank", first.exception, count=1)
        said = "the same" if is_same else them[0].exception
        lines.append(f"{line}: {said}" if said else line)
    return lines


def lost(ranks: Sequence[int], failures: Sequence[Failure], where: str) -> str:
    """``rank 2 was lost in step 341 (killed by signal 9 (SIGKILL))``."""
    hosts = {failure.host for failure in failures} - {""}
    on = f" on {hosts.pop()}" if len(hosts) == 1 else ""
    hows = ", ".join(dict.fromkeys(failure.describe() for failure in failures))
    how = f" ({hows})" if hows else ""
    were = "was" if len(ranks) == 1 else "were"
    return f"{named('rank', ranks)}{on} {were} lost {where}".rstrip() + how


def back(joined: Joined, started_s: float) -> str:
    """``rank 2 is back in step 402, 41 s after it was started; training stopped for 0.6 s``."""
    return (
        f"rank {joined.place} is back in step {joined.step}, {started_s:.0f} s after it was "
        f"started; training stopped for {joined.stopped_s:.1f} s"
    )


def not_back(failure: Failure) -> str:
    """``rank 2 failed while it was coming back (exit code 1): ValueError: ...``."""
    ended = "ended" if failure.returncode == 0 else "failed"
    what = f": {failure.exception}" if failure.exception else ""
    return f"{failure.who} {ended} while it was coming back ({failure.describe()}){what}"


def left(goes: Mapping[int, Goes]) -> str:
    """``rank 3 left after step 410 (SIGTERM)``; `goes` is what each rank has said."""
    where = ", ".join(dict.fromkeys(each.where for each in goes.values()))
    return f"{named('rank', sorted(goes))} left {where} ({_reasons(goes)})"


def stopped(stops: Mapping[int, Goes]) -> str:
    """How the job has stopped since ranks were told to go, as `stops` of each rank say."""
    first = next(iter(stops.values()))
    told = sorted(first.reasons)
    were = "was" if len(told) == 1 else "were"
    text = f"training stopped {first.where}, since {named('rank', told)} {were} told to go"
    return f"{text} ({_reasons(stops)}). {first.said}".rstrip()


def _reasons(goes: Mapping[int, Goes]) -> str:
    return ", ".join(dict.fromkeys(why for each in goes.values() for why in each.reasons.values()))


def interrupted(signal: str, raised: Mapping[int, Raised | None]) -> list[str]:
    """The lines after a signal has ended the job: where each rank was, those of one line together.

    `raised` is what ended each rank, if it said so. An exception that the signal did not cause, as
    in a handler that saves, is shown in full.
    """
    lines, ranks = [f"stopped by {signal}"], dict[tuple[str, ...], list[int]]()
    for rank, ended_by in sorted(raised.items()):
        if ended_by is None or not ended_by.traceback:
            continue
        if ended_by.kind == "KeyboardInterrupt" or ended_by.kind in errors.__all__:
            # The first frame is in the program.
            shown = [f"{ended_by.exception} ({''.join(ended_by.traceback[1:2]).strip()})"]
        else:
            shown = ["", *_indented(ended_by.traceback)]
        ranks.setdefault(tuple(shown), []).append(rank)
    for (first, *rest), them in ranks.items():
        lines += [f"{named('rank', them)}: {first}".rstrip(), *rest]
    return lines


def wanted_keyboard(cause: Cause) -> bool:
    """Whether a debugger or `input` found the end of standard input."""
    exceptions = ("bdb.BdbQuit", "EOFError: EOF when reading a line")
    return cause.first.exception.startswith(exceptions)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}".rstrip() for line in lines]
