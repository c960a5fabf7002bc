"""The paragraph of ``ringreduce report``: which rank is the culprit, and why. Pure."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import PurePath
from typing import NamedTuple

from ringreduce.commands.report.flight_records import Records, clean, shorten
from ringreduce.pure.blame import Finding, RankFacts, Reason, find_culprit
from ringreduce.pure.flight import Dump, Frame
from ringreduce.vocabulary import errors
from ringreduce.vocabulary.words import named

# Ranks of a job at work are in different calls too; only one in its call this long hangs.
_STILL_S = 1.0
_VERBS = {"PeerLostError": "lost", "PeerTimeoutError": "waited for"}


class Verdict(NamedTuple):
    """The culprits (one rank, those that disagree, or none), and a paragraph that explains it."""

    culprits: tuple[int, ...]
    text: str
    of: Records  # the records that show it: the job's, or those of the group in which it began


def judge(records: Records) -> Verdict:
    """Find the culprit and word the paragraph."""
    shown, finding = _first_cause(records)
    why = _WORDS[finding.reason](shown, finding)
    if shown.group is not None:
        why = f"in {shown.group.name}, {why}"
    return Verdict(finding.culprits, why[:1].upper() + why[1:], shown)


def _first_cause(records: Records) -> tuple[Records, Finding]:
    """The job or the group in which it began, and what is found there.

    A group that breaks makes its ranks leave the job, and breaks other groups by that. A rank that
    holds one up may be held up itself, in a call of another.
    """
    parts = [records, *records.groups()]
    findings = []
    for part in parts:
        facts = [_facts_of(dump) for dump in part.dumps.values()]
        findings.append((part, find_culprit(facts, unknown=part.missing, still_s=_STILL_S)))
    failed = [pair for pair in findings if _failed_s(pair[0]) < inf]
    if failed:
        own_error = Reason.OWN_ERROR
        return min(failed, key=lambda pair: (pair[1].reason is not own_error, _failed_s(pair[0])))
    findings = [pair for pair in findings if pair[1].culprits] or findings[:1]
    dumps = (item for part in parts for item in part.dumps.items())
    waiting = {rank for rank, dump in dumps if dump.operation is not None}
    return next((pair for pair in findings if not waiting & {*pair[1].culprits}), findings[0])


def _failed_s(records: Records) -> float:
    """When the first rank failed."""
    failures = [dump.failure for dump in records.dumps.values()]
    return min((failure.when for failure in failures if failure is not None), default=inf)


def _facts_of(dump: Dump) -> RankFacts:
    """Take the facts from a record: the call, now or when the rank failed, and for how long."""
    failure = dump.failure
    if failure is None:
        stood_s = dump.when - dump.since
        return RankFacts(dump.rank, dump.calls, dump.operation, dump.nbytes, stood_s)
    failed = next((call for call in reversed(dump.entries) if call.error is not None), None)
    if failure.in_call is None:
        stood_s = max(0.0, failure.when - dump.since)
    else:
        stood_s = (failed and failed.seconds) or 0.0
    return RankFacts(
        rank=dump.rank,
        calls=dump.calls,
        operation=failure.in_call,
        nbytes=failed.nbytes if failed else 0,
        stood_s=stood_s,
        error=failure,
        failed_s=failure.when,
    )


def _own_error(records: Records, finding: Finding) -> str:
    [rank] = finding.culprits
    dump = records.dumps[rank]
    current = dump.failure and dump.failure.in_call
    where = f"in {_numbered(current, dump)}" if current else "in user code"
    return (
        f"rank {rank} is the culprit: its own error came first, {where}{_raised_at(dump)}: "
        f"{_said(dump)}"
    )


def _odd_call(records: Records, finding: Finding) -> str:
    [rank] = finding.culprits
    dump = records.dumps[rank]
    facts = _facts_of(dump)
    return (
        f"rank {rank} is the culprit: it was in {_numbered(facts.operation, dump)}"
        f"{_amount(facts.nbytes)}{_location_of(dump)}, unlike all others. "
        f"{_quoted(records, finding)}"
    )


def _disagreement(records: Records, finding: Finding) -> str:
    quoted = _quoted(records, finding)
    if len(finding.culprits) == 1:
        return f"rank {finding.culprits[0]} disagrees with the others. {quoted}"
    return f"{those(finding.culprits, 'disagree', '')} with each other. {quoted}"


def _never_joined(records: Records, finding: Finding) -> str:
    return (
        f"{those(finding.culprits, 'are the culprits', 'is the culprit')}: without a record, while "
        f"{those(finding.witnesses, 'waited', 'waited')} for all to join. "
        f"Rank {finding.witnesses[0]}: {_quoted(records, finding)}"
    )


def _named(records: Records, finding: Finding) -> str:
    [culprit], namers = finding.culprits, finding.witnesses
    failures = [records.dumps[rank].failure for rank in namers]
    verbs = {_VERBS.get(failure.kind, "name") for failure in failures if failure}
    verb = verbs.pop() if len(verbs) == 1 else "name"
    why = f"{those(namers, verb, f'{verb}s' if verb == 'name' else verb)} it, and "
    dump = records.dumps.get(culprit)
    if dump is not None:
        why += f"it {_was(dump)}{_source_of(dump)}"
    elif f"flight-rank{culprit}.json" in records.skipped:
        why += "its record cannot be read"
    else:
        why += "it left no record, so it was killed or ended"
    return f"rank {culprit} is the culprit: {why}. Rank {namers[0]}: {_quoted(records, finding)}"


def _behind(records: Records, finding: Finding) -> str:
    [rank] = finding.culprits
    dump = records.dumps[rank]
    what = (
        "the others have completed that" if _facts_of(dump).operation else "it has not called that"
    )
    return (
        f"rank {rank} is the culprit: it {_was(dump)}{_source_of(dump)}, while "
        f"{_waits(records, finding)}; {what}."
    )


def _unknown(records: Records, finding: Finding) -> str:
    return (
        f"{those(finding.culprits, 'are the culprits', 'is the culprit')}, probably: without a "
        f"record (killed, or stopped by SIGSTOP), while {_waits(records, finding)}."
    )


def _out_of_step(records: Records, finding: Finding) -> str:
    groups: dict[tuple[str | None, int], list[int]] = {}
    for rank in finding.witnesses:
        groups.setdefault(_facts_of(records.dumps[rank]).call, []).append(rank)
    sides = "; ".join(
        f"{those(ranks, 'are', 'is')} in {clean(operation or '')}{_amount(nbytes)}"
        for (operation, nbytes), ranks in groups.items()
    )
    number = records.dumps[finding.witnesses[0]].calls
    text = f"The ranks are out of step in call #{number}: {sides}."
    if len(finding.culprits) > 1:
        return text
    [rank] = finding.culprits
    return f"rank {rank} is the culprit{_location_of(records.dumps[rank])}. {text}"


def _nobody(records: Records, finding: Finding) -> str:
    longest = max(records.dumps.values(), key=lambda dump: _facts_of(dump).stood_s)
    if _facts_of(longest).stood_s < _STILL_S and not records.missing and not finding.witnesses:
        why = f"no rank had stood still for {_STILL_S:g} s, so the job was at work"
        return f"No culprit found: {why}."
    was = f"{_was(longest)}{_source_of(longest)}"
    return f"No culprit found. Longest of all, rank {longest.rank} {was}."


_WORDS: Mapping[Reason, Callable[[Records, Finding], str]] = {
    Reason.OWN_ERROR: _own_error,
    Reason.ODD_CALL: _odd_call,
    Reason.DISAGREEMENT: _disagreement,
    Reason.NEVER_JOINED: _never_joined,
    Reason.NAMED: _named,
    Reason.BEHIND: _behind,
    Reason.UNKNOWN: _unknown,
    Reason.OUT_OF_STEP: _out_of_step,
    Reason.NOBODY: _nobody,
}


def _quoted(records: Records, finding: Finding) -> str:
    """The first witness's error."""
    return _said(records.dumps[finding.witnesses[0]])


def _waits(records: Records, finding: Finding) -> str:
    first = records.dumps[finding.witnesses[0]]
    longest_s = max(_facts_of(records.dumps[rank]).stood_s for rank in finding.witnesses)
    return (
        f"{those(finding.witnesses, 'wait', 'waits')} in "
        f"{_numbered(_facts_of(first).operation, first)} for {_seconds(longest_s)}"
    )


def _outside(dump: Dump) -> str:
    """Where a rank stands that is in no collective of its communicator."""
    return "user code" if dump.pending is None else f"{clean(dump.pending)},"


def state_of(dump: Dump) -> str:
    """Say what a rank is doing, or did when it failed, and for how long."""
    for_s = _seconds(_facts_of(dump).stood_s)
    failure = dump.failure
    if failure is None:
        if dump.operation is not None:
            return f"in {_numbered(dump.operation, dump)} for {for_s}"
        return f"in {_outside(dump)} for {for_s}{_location_of(dump)}"
    if failure.in_call is not None:
        return f"failed in {_numbered(failure.in_call, dump)} after {for_s}"
    if failure.kind in errors.__all__:
        return f"in {_outside(dump)} for {for_s}{_location_of(dump)}, when the ring broke"
    return f"failed in user code after {for_s}{_raised_at(dump)}"


def _was(dump: Dump) -> str:
    """The same as a predicate: ``was in user code ...``, ``failed in ...``."""
    state = state_of(dump)
    return state if state.startswith("failed") else f"was {state}"


def _raised_at(dump: Dump) -> str:
    """``, at train.py:12``: the line of the user's program that raised a rank's error."""
    trace = dump.failure.trace if dump.failure is not None else []
    frames = [frame for frame in trace if not frame.library]
    return _location(frames[-1]) if frames else _location_of(dump)


def _said(dump: Dump) -> str:
    """A rank's error as a sentence; empty for none."""
    failure = dump.failure
    if failure is None:
        return ""
    text = shorten(f"{failure.kind}: {failure.text}" if failure.text else failure.kind)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _numbered(operation: str | None, dump: Dump) -> str:
    """``all_reduce #17``: a call and its number."""
    return f"{clean(operation or 'user code')} #{dump.calls}"


def _location_of(dump: Dump) -> str:
    """``, at train.py:12``: the line of the user's program that the main thread is in."""
    return _location(_main_frame(dump))


def _source_of(dump: Dump) -> str:
    """The source of that line, if the rank is in user code."""
    frame = _main_frame(dump)
    if frame is None or _facts_of(dump).operation is not None or not frame.text:
        return ""
    return f" ({shorten(frame.text, 60)})"


def _main_frame(dump: Dump) -> Frame | None:
    """The main thread's innermost frame in the user's program, or in any code if it has none."""
    frames = next((stack.frames for stack in dump.stacks if stack.main), [])
    program_frames = [frame for frame in frames if not frame.library]
    return next(reversed(program_frames or frames), None)


def _location(frame: Frame | None) -> str:
    return f", at {clean(PurePath(frame.file).name)}:{frame.line}" if frame else ""


def those(ranks: Sequence[int], several: str, single: str) -> str:
    """``ranks 0, 1, 5 wait``."""
    return f"{named('rank', sorted(ranks))} {single if len(ranks) == 1 else several}"


def _seconds(duration_s: float) -> str:
    """``1.5 s``, ``12 min``."""
    return f"{duration_s:.1f} s" if duration_s < 600 else f"{duration_s / 60:.0f} min"


def _amount(nbytes: int) -> str:
    """`` of 80 bytes``, `` of 4.2 MB``; empty for none."""
    if not nbytes:
        return ""
    return f" of {nbytes} bytes" if nbytes < 10_000 else f" of {nbytes / 1e6:.3g} MB"
