"""Ranks that wait for each other in sends and recvs. Pure.

Whether they would wait for ever cannot be known: a thread of a program may yet send what another
one receives. So such a wait ends at ``timeout_s``, as one for a silent rank does.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.pure.watcher_messages import Pending


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
