"""Which rank and which link the others wait for, from the heartbeats of all ranks. Pure.

A collective ends at about the same time on all ranks. So the rank that computes longest between
calls spends the least time in them, and the others spend as much more as they wait for it. What a
call itself costs is equal on all ranks and drops out.

In a ring every link waits for the slowest. It alone always has data to send; the others have sent
theirs soon, so the kernel's time in which a connection had data under way tells them apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ringreduce.pure.watcher_messages import Heartbeat, SentToNext

_CALLS_MIN, _WAITED_S_MIN, _LINK_BYTES_MIN = 10, 0.1, 1 << 20  # less is chance
_WAITING_MIN = 0.25  # the part of the others' time in calls that is waiting for a slow rank
_RATE_MAX = 0.5  # a slow link has at most this part of the others' rate


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for.

    Attributes:
        rank: its number in the job.
        waited_s: how much longer the other ranks were in calls, on average.
    """

    rank: int
    waited_s: float


@dataclass(frozen=True)
class SlowLink:
    """A connection to the next rank of the ring that carries less than the others.

    Attributes:
        sender, receiver: ranks of the job.
        bytes_per_s: while it had data to send.
        others_bytes_per_s: the same of the other links, their median.
        waited_s: how much longer it took than such a link would have.
    """

    sender: int
    receiver: int
    bytes_per_s: float
    others_bytes_per_s: float
    waited_s: float


def slow_rank(heartbeats: Sequence[Heartbeat]) -> SlowRank | None:
    """The rank that the others wait for; None if there is none, or too little is known."""
    calls = min((heartbeat.calls for heartbeat in heartbeats), default=0)
    if len(heartbeats) < 2 or calls < _CALLS_MIN:
        return None
    # For one call, since heartbeats are of different ages.
    each_s = {heartbeat.rank: heartbeat.stopped_s / heartbeat.calls for heartbeat in heartbeats}
    slowest = min(each_s, key=lambda rank: (each_s[rank], rank))
    others_s = sum(s for rank, s in each_s.items() if rank != slowest) / (len(each_s) - 1)
    waited_s = calls * (others_s - each_s[slowest])
    if waited_s < max(_WAITED_S_MIN, _WAITING_MIN * calls * others_s):
        return None
    return SlowRank(slowest, waited_s)


def slow_link(links: Mapping[int, SentToNext]) -> SlowLink | None:
    """The one of `links`, by sender, that all wait for; None if none, or too little is known."""
    rates = {
        rank: link.nbytes / link.seconds
        for rank, link in links.items()
        if link.nbytes >= _LINK_BYTES_MIN and link.seconds > 0
    }
    if len(rates) < 2:
        return None
    slowest = min(rates, key=lambda rank: (rates[rank], rank))
    link, others = links[slowest], median(r for rank, r in rates.items() if rank != slowest)
    waited_s = link.seconds - link.nbytes / others
    if rates[slowest] > _RATE_MAX * others or waited_s < _WAITED_S_MIN:
        return None
    return SlowLink(slowest, link.receiver, rates[slowest], others, waited_s)
