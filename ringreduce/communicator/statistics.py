"""Counts of a communicator: calls, bytes, seconds, and which rank or link is slow."""

from dataclasses import dataclass

from ringreduce.pure.slowness import SlowLink, SlowRank
from ringreduce.pure.watcher_messages import SentToNext


@dataclass(frozen=True)
class Statistics:
    """A communicator's counts since it was formed.

    Attributes:
        collectives: calls completed.
        seconds: wall time spent in them.
        frames_received: segments that arrived.
        bytes_sent, bytes_received: payload on this rank's links, headers not counted.
        reducing_s: wall time in which gradients were reduced, in any thread.
        waited_s: wall time in which training steps were blocked for that; the rest of
            `reducing_s` was hidden behind computation, and without forming the ring.
        stopped_s: wall time in which calls stopped this rank's own work: `seconds`, without what
            was hidden behind computation.
        slow_rank: the rank that the others wait for, and for how long; None if they do not differ.
            All ranks find the same, about a second after it has happened.
        slow_link: the same for a link between hosts that is slower than the others.
        hosts: the ranks of each host that share memory, in the order in which the ring passes them.
        sent_to_next: this rank's connections to the next host: bytes that arrived there, and for
            how many seconds data was under way; None where the system does not measure it.
    """

    collectives: int
    seconds: float
    frames_received: int
    bytes_sent: int
    bytes_received: int
    reducing_s: float = 0.0
    waited_s: float = 0.0
    stopped_s: float = 0.0
    slow_rank: SlowRank | None = None
    slow_link: SlowLink | None = None
    hosts: tuple[tuple[int, ...], ...] = ((0,),)
    sent_to_next: SentToNext | None = None
