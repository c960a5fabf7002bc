"""Which rank is to blame, from what is known of each. Pure: facts in, a finding out.

The watcher, the launcher and ``ringreduce report`` all call `find_culprit` with the facts they have
and put the finding into their own words. It suspects in the order of `Reason`.
"""

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ringreduce.vocabulary import errors

# Errors about another rank: the one that raises them is not to blame.
_ABOUT_OTHERS = ("PeerLostError", "PeerTimeoutError", "PeerError", "RendezvousError")
# Only in these calls must the amount be equal on all ranks.
_EQUAL_AMOUNTS = ("all_reduce", "reduce_scatter")


class Reason(enum.Enum):
    """Why a rank is to blame, the surest first; `Finding.witnesses` are the ranks in brackets."""

    OWN_ERROR = "its own error came first"
    ODD_CALL = "it is in another call than all others (the one that found it)"
    DISAGREEMENT = "ranks disagree with each other (the one that found it)"
    NEVER_JOINED = "it never came to the meeting (those that waited)"
    NAMED = "others waited for it or lost it (those, the first to notice first)"
    SILENT = "it shows no sign of life"
    BEHIND = "it has not begun, or is still before, the call (those that wait there)"
    UNKNOWN = "nothing is known of it while others wait (those)"
    OUT_OF_STEP = "ranks are in different calls of one number (those)"
    NOBODY = "nothing points at a rank (the one whose error came first, if any)"


class RankFacts(NamedTuple):
    """Facts known of one rank, now or when it failed."""

    rank: int
    calls: int = 0  # collectives completed
    operation: str | None = None  # the call it is in; None: in user code
    nbytes: int = 0  # payload of that call; 0 if unknown
    stood_s: float = 0.0  # how long it has been there
    silent_s: float = 0.0  # for how long it has shown no sign of life, if that is too long; else 0
    error: errors.ErrorRecord | None = None  # what it failed with
    failed_s: float = 0.0  # when, on a clock that all facts share

    @property
    def call(self) -> tuple[str | None, int]:
        """The part that is equal on all ranks in the same call."""
        return self.operation, self.nbytes if self.operation in _EQUAL_AMOUNTS else 0


class Finding(NamedTuple):
    """The ranks to blame, why, and the ranks that show it; see `Reason`."""

    reason: Reason
    culprits: tuple[int, ...]
    witnesses: tuple[int, ...] = ()


def find_culprit(
    facts: Collection[RankFacts], *, unknown: Sequence[int] = (), still_s: float = 0.0
) -> Finding:
    """The rank to blame, the sides of a disagreement, or nobody.

    There are facts for each rank of which something is known; the others are `unknown`. Where no
    rank has failed, ranks that have waited less than `still_s` count as working.
    """
    known = {fact.rank: fact for fact in sorted(facts, key=lambda fact: fact.rank)}
    failed = _Failed(known, unknown)
    return (
        _own_error(failed)
        or _disagreement(known, failed, unknown)
        or _never_joined(failed, unknown)
        or _named(failed)
        or _silent(known)
        or _behind(known, unknown, still_s=0.0 if failed.errors else still_s)
        or _out_of_step(known)
        or _first_error(failed)
    )


class _Failed:
    """The errors among the facts, and the ranks they name."""

    def __init__(self, known: dict[int, RankFacts], unknown: Sequence[int]) -> None:
        self.errors = [(f.failed_s, f.rank, f.error) for f in known.values() if f.error]
        there = {*known, *unknown}
        # A rank that found its error itself comes before those that were notified.
        self.naming = sorted(
            (error.origin not in (None, rank), failed_s, rank, error.peer)
            for failed_s, rank, error in self.errors
            if error.peer in there and error.peer is not None and error.peer != rank
        )

    def blame(self, culprit: int) -> Finding:
        """The finding that follows from the errors that name `culprit`."""
        namers = tuple(rank for _, _, rank, peer in self.naming if peer == culprit)
        return Finding(Reason.NAMED, (culprit,), namers)


def _own_error(failed: _Failed) -> Finding | None:
    raised = [(failed_s, rank) for failed_s, rank, error in failed.errors if _is_own(rank, error)]
    return Finding(Reason.OWN_ERROR, (min(raised)[1],)) if raised else None


def _is_own(rank: int, error: errors.ErrorRecord) -> bool:
    if error.origin not in (None, rank):
        return False
    if error.kind not in errors.__all__:
        return True  # the program's exception
    if error.kind == "MismatchError":
        return False
    return error.peer == rank or (error.peer is None and error.kind not in _ABOUT_OTHERS)


def _disagreement(
    known: dict[int, RankFacts], failed: _Failed, unknown: Sequence[int]
) -> Finding | None:
    mismatches = [
        (error.origin is not None, failed_s, rank, error)
        for failed_s, rank, error in failed.errors
        if error.kind == "MismatchError"
    ]
    if not mismatches:
        return None
    _, _, rank, error = min(mismatches, key=lambda item: item[:3])
    if error.peer is not None and error.peer in unknown:
        return failed.blame(error.peer)  # It left before a call that the others make.
    odd = _odd_one_out(known)
    if odd is not None:
        return Finding(Reason.ODD_CALL, (odd,), (rank,))
    speaker = rank if error.origin is None else error.origin
    sides = {speaker} if error.peer is None else {speaker, error.peer}
    return Finding(Reason.DISAGREEMENT, tuple(sorted(sides)), (rank,))


def _never_joined(failed: _Failed, unknown: Sequence[int]) -> Finding | None:
    alone = tuple(rank for _, rank, error in failed.errors if error.kind == "RendezvousError")
    return Finding(Reason.NEVER_JOINED, tuple(unknown), alone) if alone and unknown else None


def _named(failed: _Failed) -> Finding | None:
    # From one to the next: in a ring, rank 0 waits for 3 because that waits for 2.
    if not failed.naming:
        return None
    points = {rank: peer for told, _, rank, peer in reversed(failed.naming) if not told}
    path = [failed.naming[0][2], failed.naming[0][3]]
    while (onward := points.get(path[-1])) is not None:
        if onward in path:
            # A cycle: each names the next. The most votes decide, as when a rank that was stopped
            # complains once it runs again; at a tie, the rank that is behind is to blame.
            votes = Counter(peer for *_, peer in failed.naming if peer in path).most_common(2)
            if len(votes) > 1 and votes[0][1] == votes[1][1]:
                return None
            return failed.blame(votes[0][0])
        path.append(onward)
    return failed.blame(path[-1])


def _silent(known: dict[int, RankFacts]) -> Finding | None:
    longest = max(known.values(), key=lambda fact: fact.silent_s, default=None)
    if longest is None or longest.silent_s <= 0:
        return None
    return Finding(Reason.SILENT, (longest.rank,))


def _behind(known: dict[int, RankFacts], unknown: Sequence[int], still_s: float) -> Finding | None:
    waiting = [fact for fact in known.values() if fact.operation is not None]
    number = max((fact.calls for fact in waiting), default=0)
    ahead = [fact for fact in waiting if fact.calls == number]
    if not ahead or max(fact.stood_s for fact in ahead) < still_s:
        return None
    witnesses = tuple(fact.rank for fact in ahead)
    behind = [
        fact
        for fact in known.values()
        if fact.calls < number or (fact.calls == number and fact.operation is None)
    ]
    if behind:
        # Of ranks with equally many calls, those in a call wait for those in user code.
        culprit = min(behind, key=lambda f: (f.calls, f.operation is not None, -f.stood_s, f.rank))
        return Finding(Reason.BEHIND, (culprit.rank,), witnesses)
    if unknown:
        return Finding(Reason.UNKNOWN, tuple(unknown), witnesses)
    return None


def _out_of_step(known: dict[int, RankFacts]) -> Finding | None:
    by_number: dict[int, list[RankFacts]] = {}
    for fact in known.values():
        if fact.operation is not None:
            by_number.setdefault(fact.calls, []).append(fact)
    for _, there in sorted(by_number.items()):
        if len({fact.call for fact in there}) > 1:
            ranks = tuple(fact.rank for fact in there)
            odd = _odd_one_out(known)
            return Finding(Reason.OUT_OF_STEP, ranks if odd is None else (odd,), ranks)
    return None


def _odd_one_out(known: dict[int, RankFacts]) -> int | None:
    """The one rank of three or more whose present call differs from that of all others."""
    there = (fact for fact in known.values() if fact.operation is not None)
    calls = {fact.rank: (fact.calls, fact.call) for fact in there}
    counted = Counter(calls.values()).most_common()
    if len(calls) < 3 or len(counted) != 2 or counted[1][1] != 1:
        return None
    if counted[0][0][0] != counted[1][0][0]:
        return None  # Different numbers: one is ahead.
    return next(rank for rank, call in calls.items() if call == counted[1][0])


def _first_error(failed: _Failed) -> Finding:
    if failed.naming:
        return failed.blame(failed.naming[0][3])
    first = sorted((failed_s, rank) for failed_s, rank, _ in failed.errors)
    return Finding(Reason.NOBODY, (), tuple(rank for _, rank in first[:1]))
