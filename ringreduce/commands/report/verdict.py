"""Which rank is to blame, from all ranks' flight records. Pure.

The order of suspicion:

1. the rank whose own error came first, whatever others say of it;
2. ranks that disagree: a minority of one, else both sides; ranks that never joined;
3. the rank that others waited for or lost, followed from one to the next (in a ring, rank 0
   waits for 3 because that waits for 2); it may have left no record, since it was killed;
4. the rank with the fewest calls completed while others wait in the next one;
5. ranks in different calls that have the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ringreduce.commands.report.records import Records
from ringreduce.commands.report.words import (
    amount,
    call_of,
    capital,
    clean,
    in_bytes,
    nbytes_of,
    numbered,
    place_of,
    raised_at,
    said,
    seconds,
    source_of,
    stood_s,
    those,
    was,
)
from ringreduce.pure.flight import Dump, Failure
from ringreduce.vocabulary import errors

__all__ = ["Verdict", "judge"]

# Shorter than this nobody stands still: a record of a job at work finds ranks anywhere.
_STILL_S = 1.0
# These speak of another rank, so the one that raises them is not to blame.
_ABOUT_OTHERS = ("PeerLostError", "PeerTimeoutError", "PeerError", "RendezvousError")
_VERBS = {"PeerLostError": "lost", "PeerTimeoutError": "waited for"}


@dataclass(frozen=True)
class _Finding:
    """Who it is and why; `told` are others of whom this already says where they stood."""

    culprits: tuple[int, ...]
    why: str
    told: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Who is to blame, as far as can be told: one rank, the sides of a disagreement, or nobody.

    Attributes:
        culprits: ranks.
        text: one paragraph: who stood where, who is the culprit, and why.
    """

    culprits: tuple[int, ...]
    text: str


def judge(records: Records) -> Verdict:
    """Who stood where, who is the culprit, and why."""
    found = (
        _own_error(records)
        or _disagreement(records)
        or _never_joined(records)
        or _named(records)
        or _behind(records)
        or _different_calls(records)
        or _first_named(records)
        or _Finding((), _nobody(records))
    )
    done = {*found.culprits, *found.told}
    rest = [rank for rank in range(records.size) if rank not in done]
    text = " ".join(part for part in (capital(found.why), _standings(records, rest)) if part)
    return Verdict(found.culprits, text)


def _own_error(records: Records) -> _Finding | None:
    """The rank whose own error came first."""
    own = [
        (failure.when, rank, failure)
        for rank, failure in _failures(records)
        if failure.origin in (None, rank) and _is_own(rank, failure)
    ]
    if not own:
        return None
    _, rank, failure = min(own, key=lambda item: item[:2])
    dump = records.dumps[rank]
    where = f"in {numbered(failure.standing, dump)}" if failure.standing else "in user code"
    at = raised_at(dump)
    text = f"Rank {rank} is the culprit: its own error came first, {where}{at}: {said(failure)}"
    return _Finding((rank,), text)


def _is_own(rank: int, failure: Failure) -> bool:
    if failure.kind not in errors.__all__:
        return True  # an exception of the program's
    if failure.kind == "MismatchError":
        return False
    return failure.peer == rank or (failure.peer is None and failure.kind not in _ABOUT_OTHERS)


def _disagreement(records: Records) -> _Finding | None:
    """Ranks that made different calls, by the first error that says so."""
    found = [
        (failure.origin is not None, failure.when, rank, failure)
        for rank, failure in _failures(records)
        if failure.kind == "MismatchError"
    ]
    if not found:
        return None
    _, _, rank, failure = min(found, key=lambda item: item[:3])
    if failure.peer in records.missing:
        return _blame(records, failure.peer)  # It left before a call that the others make.
    quoted = said(failure)
    odd = _odd_one_out(records)
    if odd is not None:
        dump = records.dumps[odd]
        return _Finding(
            (odd,),
            f"Rank {odd} is the culprit: it was in {numbered(call_of(dump), dump)}{amount(dump)}"
            f"{place_of(dump)}, unlike all others. {quoted}",
        )
    speaker = rank if failure.origin is None else failure.origin
    if failure.peer in (None, speaker):
        return _Finding((speaker,), f"Rank {speaker} disagrees with the others. {quoted}")
    sides = tuple(sorted((speaker, failure.peer)))
    text = f"{those(sides, 'disagree', 'disagrees')} with each other. {quoted}"
    return _Finding(sides, text)


def _never_joined(records: Records) -> _Finding | None:
    """Ranks without a record, where the ring did not form."""
    alone = [rank for rank, failure in _failures(records) if failure.kind == "RendezvousError"]
    if not alone or not records.missing:
        return None
    lost = tuple(records.missing)
    quoted = said(dict(_failures(records))[alone[0]])
    text = (
        f"{those(lost, 'are the culprits', 'is the culprit')}: without a record, while "
        f"{those(alone, 'waited', 'waited')} for all to join. Rank {alone[0]}: {quoted}"
    )
    return _Finding(lost, text, tuple(alone))


def _named(records: Records) -> _Finding | None:
    """The rank that others waited for or lost, followed to the end of the chain."""
    naming = _naming(records)
    if not naming:
        return None
    points = {rank: peer for told, _, rank, peer in reversed(naming) if not told}
    path = [naming[0][2], naming[0][3]]
    while (onward := points.get(path[-1])) is not None:
        if onward in path:
            # Each speaks of the next, all round: most voices count, as when one that was
            # stopped complains when it is woken; with none, who is behind decides.
            votes = Counter(peer for _, _, _, peer in naming if peer in path).most_common(2)
            if len(votes) > 1 and votes[0][1] == votes[1][1]:
                return None
            return _blame(records, votes[0][0])
        path.append(onward)
    return _blame(records, path[-1])


def _first_named(records: Records) -> _Finding | None:
    """The rank that the first error names, for want of anything better."""
    naming = _naming(records)
    return _blame(records, naming[0][3]) if naming else None


def _naming(records: Records) -> list[tuple[bool, float, int, int]]:
    """Whether it was told so, when, which rank, names which: those that found it first."""
    return sorted(
        (failure.origin not in (None, rank), failure.when, rank, failure.peer)
        for rank, failure in _failures(records)
        if failure.peer is not None and failure.peer != rank and failure.peer < records.size
    )


def _blame(records: Records, culprit: int) -> _Finding | None:
    namers = [rank for _, _, rank, peer in _naming(records) if peer == culprit]
    failures = dict(_failures(records))
    verbs = {_VERBS.get(failures[rank].kind, "name") for rank in namers}
    verb = verbs.pop() if len(verbs) == 1 else "name"
    named = f"{those(namers, verb, f'{verb}s' if verb == 'name' else verb)} it"
    dump = records.dumps.get(culprit)
    if dump is not None:
        why = f"{named}, and it {was(dump)}{source_of(dump)}"
    elif f"flight-rank{culprit}.json" in records.skipped:
        why = f"{named}, and its record cannot be read"
    else:
        why = f"{named}, and it left no record, so it was killed or ended"
    if culprit in records.log_tails:
        why += f'; its log ends with "{records.log_tails[culprit]}"'
    witness = namers[0]
    text = f"Rank {culprit} is the culprit: {why}. Rank {witness}: {said(failures[witness])}"
    return _Finding((culprit,), text)


def _behind(records: Records) -> _Finding | None:
    """The rank with the fewest calls completed while others wait in the next one."""
    dumps = records.dumps
    waiting = [dump for dump in dumps.values() if call_of(dump) is not None]
    if not waiting:
        return None
    number = max(dump.calls for dump in waiting)
    ahead = [dump for dump in waiting if dump.calls == number]
    waited_s = max(stood_s(dump) for dump in ahead)
    if waited_s < _STILL_S and not _failures(records):
        return None
    told = tuple(dump.rank for dump in ahead)
    waits = (
        f"{those(told, 'wait', 'waits')} in "
        f"{numbered(call_of(ahead[0]), ahead[0])} for {seconds(waited_s)}"
    )
    behind = [
        dump
        for dump in dumps.values()
        if dump.calls < number or (dump.calls == number and call_of(dump) is None)
    ]
    if behind:
        dump = min(behind, key=lambda dump: (dump.calls, dump.since, dump.rank))
        what = "the others have completed that" if call_of(dump) else "it has not called that"
        text = (
            f"Rank {dump.rank} is the culprit: it {was(dump)}{source_of(dump)}, while {waits}; "
            f"{what}."
        )
        return _Finding((dump.rank,), text, told)
    if records.missing and len(ahead) == len(dumps):
        lost = tuple(records.missing)
        text = (
            f"{those(lost, 'are the culprits', 'is the culprit')}, probably: without a record "
            f"(killed, or stopped by SIGSTOP), while {waits}."
        )
        return _Finding(lost, text, told)
    return None


def _different_calls(records: Records) -> _Finding | None:
    """Ranks in different calls with the same number."""
    by_number: dict[int, dict[tuple[str, int], list[int]]] = {}
    for rank, dump in records.dumps.items():
        operation = call_of(dump)
        if operation is not None:
            calls = by_number.setdefault(dump.calls, {})
            calls.setdefault(_identity(operation, dump), []).append(rank)
    for number, calls in sorted(by_number.items()):
        if len(calls) < 2:
            continue
        odd = _odd_one_out(records)
        told = tuple(sorted(rank for ranks in calls.values() for rank in ranks))
        sides = "; ".join(
            f"{those(ranks, 'are', 'is')} in {clean(operation)}"
            + (f" of {in_bytes(nbytes)}" if nbytes > 0 else "")
            for (operation, nbytes), ranks in calls.items()
        )
        text = f"The ranks are out of step in call #{number}: {sides}."
        if odd is not None:
            why = f"Rank {odd} is the culprit{place_of(records.dumps[odd])}. {text}"
            return _Finding((odd,), why, told)
        return _Finding(told, text)
    return None


def _nobody(records: Records) -> str:
    dumps = records.dumps.values()
    longest = max(dumps, key=stood_s)
    if stood_s(longest) < _STILL_S and not records.missing and not _failures(records):
        return (
            f"No culprit found: no rank had stood still for {_STILL_S:g} s, so the job was at work."
        )
    return (
        f"No culprit found. Longest of all, rank {longest.rank} {was(longest)}{source_of(longest)}."
    )


def _odd_one_out(records: Records) -> int | None:
    """The one rank whose present call differs from that of all others, of three or more."""
    calls = {
        rank: (dump.calls, *_identity(operation, dump))
        for rank, dump in records.dumps.items()
        if (operation := call_of(dump)) is not None
    }
    counted = Counter(calls.values()).most_common()
    if len(calls) < 3 or len(counted) != 2 or counted[1][1] != 1:
        return None
    if counted[0][0][0] != counted[1][0][0]:
        return None  # Not the same number: one is ahead.
    return next(rank for rank, call in calls.items() if call == counted[1][0])


def _identity(operation: str, dump: Dump) -> tuple[str, int]:
    # In other calls lengths may differ between ranks.
    return operation, nbytes_of(dump) if operation in ("all_reduce", "reduce_scatter") else -1


def _standings(records: Records, ranks: Sequence[int]) -> str:
    """Where the rest stood, alike ones together."""
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


def _failures(records: Records) -> list[tuple[int, Failure]]:
    return [(rank, dump.failure) for rank, dump in records.dumps.items() if dump.failure]
