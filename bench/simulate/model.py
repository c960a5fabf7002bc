"""The time of a collective: alpha + beta * bytes for each message, gamma * bytes for the cores.

Hockney's model of a message (Parallel Computing 20, 1994), as Thakur, Rabenseifner and Gropp apply
it to collectives (IJHPCA 19, 2005). The numbers of messages and their sizes are those of
`ringreduce.collectives`; the exchange takes its plan from there.

Pure. Times are in seconds; a collective of one rank takes 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ringreduce.collectives.hierarchical import SLICE_BYTES_MIN
from ringreduce.collectives.ring import SMALL_BYTES_MAX, SMALL_BYTES_MAX_OF_TWO
from ringreduce.pure import schedule
from ringreduce.transport.frames import SEALED_OVERHEAD_BYTES
from ringreduce.transport.loop import EXCHANGE_BYTES_MAX
from ringreduce.vocabulary.config import Config

SEGMENT_BYTES = Config.segment_bytes


@dataclass(frozen=True)
class Link:
    """What a message between two hosts costs.

    Attributes:
        alpha: seconds from a call of send until a message of no bytes is received.
        beta: seconds that the wire is busy with a byte.
        gamma: seconds that a rank's core is busy with a byte which it sends and one which it
            receives: copies, encryption, reduction.
    """

    alpha: float
    beta: float
    gamma: float = 0.0

    def message(self, nbytes: float) -> float:
        """The time of a message that is used when all of it is there."""
        return self.alpha + (nbytes + SEALED_OVERHEAD_BYTES) * self._whole

    @property
    def _whole(self) -> float:
        """Of a byte in a message that must be whole: half of what a core does comes after it.

        The kernel's copies overlap with the wire; decryption and reduction do not.
        """
        return max(self.beta, self.gamma / 2) + self.gamma / 2

    def array(self, nbytes: float) -> float:
        """The time of an array that travels in segments, one behind the other."""
        first = min(nbytes, SEGMENT_BYTES)
        others = _framed(nbytes) - first - SEALED_OVERHEAD_BYTES
        return self.message(first) + others * max(self.beta, self.gamma)

    def step(self, nbytes: float) -> float:
        """The time from step to step of a ring whose chunks have `nbytes`.

        A segment is passed on when it has been reduced, while others are on the wire. So either
        the wire is always busy, or the core, or all wait for the first segment.
        """
        first = self.message(min(nbytes, SEGMENT_BYTES))
        return max(first, _framed(nbytes) * max(self.beta, self.gamma))


def _framed(nbytes: float) -> float:
    """The bytes that travel for an array of `nbytes`, without what TCP adds."""
    frames = schedule.segment_count(math.ceil(nbytes), SEGMENT_BYTES)
    return nbytes + frames * SEALED_OVERHEAD_BYTES


@dataclass(frozen=True)
class Memory:
    """What a call of two ranks in shared memory costs: `alpha`, and `gamma` for each byte."""

    alpha: float
    gamma: float

    def all_reduce(self, ranks: int, nbytes: float) -> float:
        """A sum over the ranks of a host, each of which has a core.

        A rank copies what others reduce, (n - 1) / n of its array, reads its own n-th of all
        arrays, and copies the others' results.
        """
        if ranks == 1:
            return 0.0
        passes = 1 + 2 * (ranks - 1) / ranks
        return self.alpha + self.gamma * nbytes * passes / 2


def is_exchanged(ranks: int, nbytes: int) -> bool:
    """Whether an all-reduce is an exchange of whole buffers, as `Ring` decides it."""
    limit = SMALL_BYTES_MAX_OF_TWO if ranks == 2 else SMALL_BYTES_MAX
    return nbytes <= limit and nbytes * max(schedule.exchange(ranks).counts) <= EXCHANGE_BYTES_MAX


def exchange(ranks: int, nbytes: int, link: Link) -> float:
    """Every rank gets all ranks' `nbytes`, in ceil(log2(ranks)) messages."""
    return sum(link.message(count * nbytes) for count in schedule.exchange(ranks).counts)


def ring(ranks: int, nbytes: int, link: Link) -> float:
    """An all-reduce in 2 (ranks - 1) steps, each of an n-th of the array."""
    chunk, steps = nbytes / ranks, 2 * (ranks - 1)
    return (steps - 1) * link.step(chunk) + link.array(chunk)


def all_reduce(ranks: int, nbytes: int, link: Link) -> float:
    """An all-reduce over sockets, in the way that ringreduce chooses."""
    if ranks == 1:
        return 0.0
    return (exchange if is_exchanged(ranks, nbytes) else ring)(ranks, nbytes, link)


def two_levels(hosts: int, ranks_per_host: int, nbytes: int, link: Link, memory: Memory) -> float:
    """An all-reduce within each host, between the hosts, and within each host again.

    Each rank of a host carries a slice between the hosts; they share the host's link, and each has
    a core.
    """
    lanes = ranks_per_host if nbytes >= SLICE_BYTES_MIN * ranks_per_host else 1
    shared = replace(link, beta=link.beta * lanes)
    within = memory.all_reduce(ranks_per_host, nbytes)
    if within:
        within += memory.alpha  # two calls, which do one half each
    return within + all_reduce(hosts, nbytes // lanes, shared)


def all_to_all(ranks: int, nbytes: int, link: Link) -> float:
    """Each rank sends an n-th of its `nbytes` to each rank, over one distance after the other.

    Before, ranks compare their calls, by an exchange of nothing.
    """
    if ranks == 1:
        return 0.0
    if nbytes <= SMALL_BYTES_MAX and is_exchanged(ranks, nbytes):
        return exchange(ranks, nbytes, link)
    return exchange(ranks, 0, link) + (ranks - 1) * link.array(nbytes / ranks)


def latency_bound_below(ranks: int, link: Link) -> float:
    """The bytes of an array at which a ring spends as long on alpha as on the wire."""
    return ranks * link.alpha / max(link.beta, link.gamma)
