"""What a communicator has done, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistics:
    """What a communicator has done since it was formed.

    Attributes:
        collectives: calls completed.
        seconds: wall time spent in them.
        frames_received: segments that arrived.
        bytes_sent, bytes_received: payload on this rank's links, headers not counted.
        reducing_s: wall time in which gradients were reduced, in any thread.
        waited_s: wall time in which training steps were blocked for that; the rest of
            `reducing_s` was hidden behind computation.
        hosts: the ranks of each host that share memory, in the order in which the ring passes them.
    """

    collectives: int
    seconds: float
    frames_received: int
    bytes_sent: int
    bytes_received: int
    reducing_s: float = 0.0
    waited_s: float = 0.0
    hosts: tuple[tuple[int, ...], ...] = ((0,),)
