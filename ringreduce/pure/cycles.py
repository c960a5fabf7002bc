"""Ranks that wait for each other in sends and recvs. Pure.

Whether they would wait for ever cannot be known: a thread of a program may yet send what another
one receives. So such a wait ends at ``timeout_s``, as one for a silent rank does.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.pure.actions import Log
from ringreduce.pure.watcher_messages import Pending
from ringreduce.vocabulary.config import TIMES


class Waits(NamedTuple):
    """What a rank waits in."""

    rank: int
    pending: Pending


def describe(cycle: Sequence[Waits]) -> str | None:
    """What to say of ranks each of which waits for the next, the last for the first.

    None for two of which one sends what the other receives.
    """
    sends = [each.pending.sends for each in cycle]
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


class Cycles:
    """Warns of a cycle that stands still, once; on the lowest of its ranks."""

    def __init__(self) -> None:
        self._known: object = None
        self._since_s = 0.0

    def look(self, cycle: Sequence[Waits], progress: object, now_s: float) -> list[Log]:
        """Note the cycle that this rank is in, itself first, and what it has sent and received.

        With no progress here nothing in the cycle progresses, since each rank waits for the next.
        """
        known = tuple(cycle), progress
        if known != self._known:
            self._known, self._since_s = known, now_s
        waited_s = now_s - self._since_s
        is_first = all(cycle[0].rank <= each.rank for each in cycle)
        if not cycle or not is_first or waited_s < TIMES.slow_warning_s:
            return []
        self._since_s = float("inf")
        text = describe(cycle)
        return [] if text is None else [Log(f"has waited {waited_s:.1f} s. {text}")]
