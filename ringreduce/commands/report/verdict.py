"""The paragraph of ``ringreduce report``: the culprit, and what each rank was doing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringreduce.commands.report.records import Records
from ringreduce.commands.report.words import (
    amount,
    call_of,
    capital,
    clean,
    in_bytes,
    location_of,
    nbytes_of,
    numbered,
    raised_at,
    said,
    seconds,
    source_of,
    stood_s,
    those,
    was,
)
from ringreduce.pure.blame import Error, Facts, Finding, Reason, find_culprit
from ringreduce.pure.flight import Dump
from ringreduce.vocabulary import errors

__all__ = ["Verdict", "judge"]

# Ranks of a job at work are in different calls too; only one in its call this long hangs.
_STILL_S = 1.0
_VERBS = {"PeerLostError": "lost", "PeerTimeoutError": "waited for"}


@dataclass(frozen=True)
class Verdict:
    """The culprits (one rank, those that disagree, or none), and a paragraph that explains it."""

    culprits: tuple[int, ...]
    text: str


def judge(records: Records) -> Verdict:
    """Find the culprit and word the paragraph."""
    facts = [_facts_of(dump) for dump in records.dumps.values()]
    finding = find_culprit(facts, unknown=records.missing, still_s=_STILL_S)
    why = capital(_WORDS[finding.reason](records, finding))
    done = {*finding.culprits} | (
        {*finding.witnesses} if finding.reason in _PLACES_WITNESSES else set()
    )
    rest = _standings(records, [rank for rank in range(records.size) if rank not in done])
    return Verdict(finding.culprits, f"{why} {rest}".rstrip())


def _facts_of(dump: Dump) -> Facts:
    failure = dump.failure
    return Facts(
        rank=dump.rank,
        calls=dump.calls,
        operation=call_of(dump),
        nbytes=nbytes_of(dump),
        stood_s=stood_s(dump),
        error=None
        if failure is None
        else Error(failure.kind, failure.when, failure.peer, failure.origin),
    )


def _own_error(records: Records, finding: Finding) -> str:
    [rank] = finding.culprits
    dump = records.dumps[rank]
    standing = dump.failure and dump.failure.standing
    where = f"in {numbered(standing, dump)}" if standing else "in user code"
    return (
        f"rank {rank} is the culprit: its own error came first, {where}{raised_at(dump)}: "
        f"{said(dump)}"
    )


def _odd_call(records: Records, finding: Finding) -> str:
    [rank] = finding.culprits
    dump = records.dumps[rank]
    return (
        f"rank {rank} is the culprit: it was in {numbered(call_of(dump), dump)}{amount(dump)}"
        f"{location_of(dump)}, unlike all others. {_quoted(records, finding)}"
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
        why += f"it {was(dump)}{source_of(dump)}"
    elif f"flight-rank{culprit}.json" in records.skipped:
        why += "its record cannot be read"
    else:
        why += "it left no record, so it was killed or ended"
    if culprit in records.log_tails:
        why += f'; its log ends with "{records.log_tails[culprit]}"'
    return f"rank {culprit} is the culprit: {why}. Rank {namers[0]}: {_quoted(records, finding)}"


def _behind(records: Records, finding: Finding) -> str:
    [rank] = finding.culprits
    dump = records.dumps[rank]
    what = "the others have completed that" if call_of(dump) else "it has not called that"
    return (
        f"rank {rank} is the culprit: it {was(dump)}{source_of(dump)}, while "
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
        f"{those(ranks, 'are', 'is')} in {clean(operation or '')}"
        + (f" of {in_bytes(nbytes)}" if nbytes else "")
        for (operation, nbytes), ranks in groups.items()
    )
    number = records.dumps[finding.witnesses[0]].calls
    text = f"The ranks are out of step in call #{number}: {sides}."
    if len(finding.culprits) > 1:
        return text
    [rank] = finding.culprits
    return f"rank {rank} is the culprit{location_of(records.dumps[rank])}. {text}"


def _nobody(records: Records, finding: Finding) -> str:
    longest = max(records.dumps.values(), key=stood_s)
    if stood_s(longest) < _STILL_S and not records.missing and not finding.witnesses:
        return (
            f"No culprit found: no rank had stood still for {_STILL_S:g} s, so the job was at work."
        )
    return (
        f"No culprit found. Longest of all, rank {longest.rank} {was(longest)}{source_of(longest)}."
    )


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
# Texts of these say what the witnesses were doing.
_PLACES_WITNESSES = (Reason.NEVER_JOINED, Reason.BEHIND, Reason.UNKNOWN, Reason.OUT_OF_STEP)


def _quoted(records: Records, finding: Finding) -> str:
    """The first witness's error."""
    return said(records.dumps[finding.witnesses[0]])


def _waits(records: Records, finding: Finding) -> str:
    ahead = [records.dumps[rank] for rank in finding.witnesses]
    return (
        f"{those(finding.witnesses, 'wait', 'waits')} in {numbered(call_of(ahead[0]), ahead[0])} "
        f"for {seconds(max(map(stood_s, ahead)))}"
    )


def _standings(records: Records, ranks: Sequence[int]) -> str:
    """What the other ranks were doing, equal ones together."""
    grouped: dict[str, list[int]] = {}
    for rank in ranks:
        dump = records.dumps.get(rank)
        if dump is None:
            text = "left no readable record"
        elif dump.failure is not None and dump.failure.standing is not None:
            text = f"had failed in {numbered(dump.failure.standing, dump)}"
        elif dump.failure is not None and dump.failure.kind not in errors.__all__:
            text = f"had failed in user code after {dump.calls} calls"
        elif dump.operation is not None:
            text = f"stood in {numbered(dump.operation, dump)}"
        else:
            text = f"stood in user code after {dump.calls} calls"
        grouped.setdefault(text, []).append(rank)
    return " ".join(capital(f"{those(ranks, text, text)}.") for text, ranks in grouped.items())
