"""Knowledge of other ranks from their heartbeats, and what follows. Pure: no clock, no I/O.

Each rank sends a `Heartbeat` four times a second. Neighbours forward those they have received, with
their ages, so that every rank knows how far every other has come and how long ago that was, without
a common clock (`PeerTable`). So a rank that waits can name the one that holds it up (`Suspicion`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.pure.blame import Finding, RankFacts, Reason, find_culprit
from ringreduce.pure.membership import Membership
from ringreduce.pure.spans import Present
from ringreduce.pure.watcher_messages import Heartbeat, Left, Overdue, Pending, SentToNext
from ringreduce.vocabulary.config import TIMES


class Flow(NamedTuple):
    """Where a link stands, as any thread may ask while a call runs."""

    # For each outgoing connection: receiver, channel, and total frames sent.
    sent: tuple[tuple[int, int, int], ...] = ()
    overdue: tuple[Overdue, ...] = ()  # connections on which a frame has been due for a while
    sent_to_next: SentToNext | None = None  # how fast the connections to the next rank were so far


class Suspicion(NamedTuple):
    """The rank that holds this one up, and how."""

    rank: int
    text: str  # a clause such as ``rank 1 has shown no sign of life for 3.2 s``
    is_silent: bool = False  # it was stopped, or is cut off
    # It is alive, and in user code or something keeps Python's lock there, so that bytes arrive but
    # no heartbeats: it will come if it is given time.
    is_busy: bool = False


class Waits(NamedTuple):
    """A rank, and the send or recv that it waits in."""

    rank: int
    pending: Pending


class _Sighting(NamedTuple):
    heartbeat: Heartbeat
    at_s: float  # when it was sent, on this process's clock


class PeerTable:
    """Keeps one rank's knowledge of the other members, who count as alive at `now_s`."""

    def __init__(self, rank: int, membership: Membership, now_s: float) -> None:
        self._rank = rank
        # By distance ahead of this rank, which is first.
        self._ring = [membership.ahead(rank, distance) for distance in range(membership.size)]
        self._others = sorted(self._ring[1:])
        self._began_s = now_s
        self._seen: dict[int, _Sighting] = {}
        # When a rank was last known to be alive without its own heartbeat.
        self._alive_s: dict[int, float] = {}
        self._left: dict[int, Left] = {}

    def note(self, heartbeat: Heartbeat, age_s: float, now_s: float) -> None:
        """Note a heartbeat that arrived, unless a later one is known or it is our own."""
        known = self._seen.get(heartbeat.rank)
        is_new = known is None or known.heartbeat.number < heartbeat.number
        if is_new and heartbeat.rank != self._rank:
            self._seen[heartbeat.rank] = _Sighting(heartbeat, now_s - age_s)
            for rank in heartbeat.locked:
                self.note_alive(rank, now_s - age_s)

    def note_alive(self, rank: int, at_s: float) -> None:
        """Note that the process of a rank ran at `at_s`, whether or not it sends heartbeats."""
        self._alive_s[rank] = max(at_s, self._alive_s.get(rank, at_s))

    def leave(self, left: Left) -> bool:
        """Note that a rank has left; return whether that is new."""
        is_new = left.rank not in self._left
        self._left.setdefault(left.rank, left)
        return is_new

    def left(self, rank: int) -> Left | None:
        """The message of a rank that has closed its communicator; None if it has not."""
        return self._left.get(rank)

    def absent(self, number: int) -> Left | None:
        """A rank that has left and so will never make call `number`, counted from 0."""
        gone = [left for left in self._left.values() if left.calls <= number]
        return min(gone, key=lambda left: (not left.why, left.calls, left.rank), default=None)

    def heartbeats(self, now_s: float) -> list[tuple[Heartbeat, float]]:
        """All that is known of others, with ages; to forward."""
        return [(seen.heartbeat, max(0.0, now_s - seen.at_s)) for seen in self._seen.values()]

    def last(self) -> list[Heartbeat]:
        """The last heartbeats of the other ranks; from any thread. Empty unless all are known."""
        seen = [self._seen.get(rank) for rank in self._others]
        known = [sighting.heartbeat for sighting in seen if sighting is not None]
        return known if len(known) == len(self._others) else []

    def unheard_s(self, rank: int, now_s: float) -> float:
        seen = self._seen.get(rank)
        return now_s - (self._began_s if seen is None else max(seen.at_s, self._began_s))

    def silent_s(self, rank: int, now_s: float) -> float:
        """For how long there was no sign of life of a rank."""
        return min(self.unheard_s(rank, now_s), now_s - self._alive_s.get(rank, self._began_s))

    def is_silent(self, rank: int, now_s: float) -> bool:
        return self.silent_s(rank, now_s) >= self._limit_s(rank)

    def is_locked(self, rank: int, now_s: float) -> bool:
        """Whether a rank is alive, but sends no heartbeats."""
        is_unheard = self.unheard_s(rank, now_s) >= self._limit_s(rank)
        return is_unheard and not self.is_silent(rank, now_s)

    def _limit_s(self, rank: int) -> float:
        """How late a sign of life may be; each further hop adds a period."""
        ahead = self._ring.index(rank)
        hops = min(ahead, len(self._ring) - ahead)
        return TIMES.silent_s + (hops - 1) * TIMES.heartbeat_s

    def _unreachable(self, now_s: float) -> range:
        """Distances ahead of this rank from which nothing comes, past locked ranks on both sides.

        Those forward nothing, so the silence of the ranks between them proves nothing.
        """
        ahead = range(1, len(self._ring))
        locked = [k for k in ahead if self.is_locked(self._ring[k], now_s)]
        return range(locked[0] + 1, locked[-1]) if locked else range(0)

    def suspect(self, current: Present, now_s: float) -> Suspicion | None:
        """The rank that keeps this one, which is in a collective, waiting; None if none is seen to.

        Heartbeats sent before this rank's own call began say nothing about it and are ignored.
        """
        known = [RankFacts(self._rank, current.calls, current.operation)]
        unreachable = self._unreachable(now_s)
        for rank in self._others:
            if rank in self._left:
                continue
            seen = self._seen.get(rank)
            if seen is not None and seen.heartbeat.calls > current.calls:
                continue  # It has completed this call, so this rank does not wait for it.
            if self.is_locked(rank, now_s):
                calls = 0 if seen is None else seen.heartbeat.calls
                known.append(RankFacts(rank, calls, stood_s=self.unheard_s(rank, now_s)))
            elif self.is_silent(rank, now_s):
                if self._ring.index(rank) not in unreachable:
                    known.append(RankFacts(rank, silent_s=self.silent_s(rank, now_s)))
            elif seen is not None and seen.at_s >= current.since_s:
                heartbeat = seen.heartbeat
                stood_s = heartbeat.since_s + now_s - seen.at_s
                operation = heartbeat.operation or None
                known.append(RankFacts(rank, heartbeat.calls, operation, stood_s=stood_s))
        finding = find_culprit(known)
        return self._suspicion(finding, known, now_s) if finding.culprits else None

    def _suspicion(self, finding: Finding, known: list[RankFacts], now_s: float) -> Suspicion:
        if finding.reason is Reason.OUT_OF_STEP:
            # This rank may be the odd one; the suspicion names one that is in another call.
            operation = known[0].operation
            fact = next(f for f in known if f.rank in finding.witnesses if f.operation != operation)
        else:
            fact = next(fact for fact in known if fact.rank in finding.culprits)
        rank, seen = fact.rank, self._seen.get(fact.rank)
        if finding.reason is Reason.SILENT:
            return Suspicion(rank, self._silence(rank, now_s), is_silent=True)
        if self.is_locked(rank, now_s):
            held = f"Python's lock has been held there for {fact.stood_s:.1f} s{self._last(rank)}"
            return Suspicion(rank, f"rank {rank} is alive, {held}", is_busy=True)
        place = "" if seen is None else _place(seen.heartbeat)
        if finding.reason is Reason.OUT_OF_STEP:
            return Suspicion(rank, f"rank {rank} is {place} instead")
        if fact.operation is None:
            where = "user code" if seen is None else _outside(seen.heartbeat)
            text = f"rank {rank} is alive, in {where} for {fact.stood_s:.1f} s"
            return Suspicion(rank, text, is_busy=True)
        return Suspicion(rank, f"rank {rank} is alive and still {place}")

    def doing(self, rank: int, now_s: float) -> Suspicion:
        """Tell what another rank does that is to send or receive.

        One of which nothing is known counts as busy, and one that is in a message of this rank, by
        way of others perhaps, does not.
        """
        if self.is_silent(rank, now_s):
            return Suspicion(rank, self._silence(rank, now_s), is_silent=True)
        seen = self._seen.get(rank)
        place = "" if seen is None else f", {_place(seen.heartbeat)}"
        is_busy = not self.waits(rank, now_s)
        return Suspicion(rank, f"rank {rank} is alive{place}", is_busy=is_busy)

    def _silence(self, rank: int, now_s: float) -> str:
        silent_s, last = self.silent_s(rank, now_s), self._last(rank)
        return f"rank {rank} has shown no sign of life for {silent_s:.1f} s{last}"

    def _last(self, rank: int) -> str:
        seen = self._seen.get(rank)
        return "" if seen is None else f" (last heard: {_place(seen.heartbeat)})"

    def waits(self, rank: int, now_s: float) -> tuple[Waits, ...]:
        """Ranks that wait for each other's messages, from `rank` on, the last for this one."""
        chain: list[Waits] = []
        while rank != self._rank:
            seen = self._seen.get(rank)
            pending = None if seen is None else seen.heartbeat.pending
            is_over = rank not in self._others or len(chain) > len(self._others)
            is_over = is_over or rank in self._left
            if pending is None or is_over or self.is_silent(rank, now_s):
                return ()
            chain.append(Waits(rank, pending))
            rank = pending.peer
        return tuple(chain)

    def is_cut_off(self, now_s: float) -> bool:
        """Whether all of two or more other ranks are silent, which points at this one."""
        others = [rank for rank in self._others if rank not in self._left]
        return len(others) > 1 and all(self.is_silent(rank, now_s) for rank in others)

    def unanswered(self, now_s: float) -> list[tuple[int, Overdue, float]]:
        """The ranks that wait for a frame of this one, on what, and how long ago they said so."""
        return [
            (rank, overdue, self.unheard_s(rank, now_s))
            for rank, seen in sorted(self._seen.items())
            if self.unheard_s(rank, now_s) < self._limit_s(rank)
            for overdue in seen.heartbeat.overdue
            if overdue.sender == self._rank
        ]


def _place(heartbeat: Heartbeat) -> str:
    calls = f"{heartbeat.calls} call{'' if heartbeat.calls == 1 else 's'}"
    return f"in {heartbeat.operation or _outside(heartbeat)} after {calls}"


def _outside(heartbeat: Heartbeat) -> str:
    """Where a rank is that is in no collective."""
    pending = heartbeat.pending
    return "user code" if pending is None else f"{pending.describe()},"


def describe_cycle(cycle: Sequence[Waits]) -> str | None:
    """Describe ranks each of which waits for the next, the last for the first.

    None for two of which one sends what the other receives. Whether ranks would wait for ever
    cannot be known: a thread of a program may yet send what another one receives. So such a wait
    ends at ``timeout_s``, as one for a silent rank does.
    """
    sends = [waits.pending.sends for waits in cycle]
    if len(cycle) == 2 and sends[0] != sends[1]:
        return None
    who = ", ".join(
        f"rank {rank} {'sends to' if pending.sends else 'receives from'} rank {pending.peer}"
        for rank, pending in cycle
    )
    advice = "make its calls in another order"
    if all(sends):
        advice = "receive first; arrays can be sent with async_op=True"
    elif not any(sends):
        advice = "send first"
    return f"Ranks wait for each other: {who}. Let one of them {advice}."
