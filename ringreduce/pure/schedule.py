"""Who sends which chunk when: pure index arithmetic, no arrays, no sockets.

A buffer of `count` elements is cut into `size` chunks, one per rank. In each step every rank
receives one chunk from the previous rank and passes a chunk on to the next:

    reduce-scatter, 3 ranks            all-gather
    step   rank 0   rank 1   rank 2    rank 0   rank 1   rank 2
    0      gets 1   gets 2   gets 0    gets 2   gets 0   gets 1
    1      gets 0   gets 1   gets 2    gets 1   gets 2   gets 0

In a reduce-scatter the chunk that arrives is added to the rank's own; after size - 1 steps rank r
holds the whole sum of chunk r. In an all-gather it replaces the rank's own. In both, the chunk
received in one step is sent in the next, so a segment is forwarded once it is processed, and one
compiled loop runs every schedule of this file.

Small messages are faster in an `Exchange`: every rank gets all ranks' rows in ceil(log2(size))
steps. Row j on a rank comes from the rank j positions before it, and each step sends the rows held
so far:

    5 ranks   step 0           step 1            step 2           afterwards
    holds     0                0 1               0 1 2 3          0 1 2 3 4
    sends     0 to rank + 1    0 1 to rank + 2   0 to rank + 4

See: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009; Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE TPDS 1997.
"""

import enum
from typing import NamedTuple

# What a rank does with a chunk that arrives; bits of `Schedule.actions`.
REDUCE = 1  # combine it with this rank's own chunk; without this bit it replaces that chunk
FINISH = 2  # the chunk is complete: apply the last pass (the division of a mean)
FORWARD = 4  # send it on to the next rank


class Action(enum.IntEnum):
    """Actions on the chunks of a buffer in shared memory; values as in ringreduce.h."""

    __hash__ = int.__hash__  # as in `ReduceOp`

    ALL_REDUCE = 1  # every chunk reduced, on all ranks
    REDUCE_SCATTER = 2  # each rank's own chunk reduced, the rest unchanged
    ALL_GATHER = 3  # each chunk copied from the rank it belongs to
    ALL_TO_ALL = 4  # a part of every rank's array copied from it


class Schedule(NamedTuple):
    """One rank's part in a collective."""

    first: int  # chunk sent before anything is received, or -1 for none
    chunks: tuple[int, ...]  # chunk received in each step
    actions: tuple[int, ...]  # for each step, a sum of REDUCE, FINISH and FORWARD
    # The number of this rank's step 0 in frames. It is 0 except in a broadcast, where each rank
    # starts one step after the rank before it.
    offset: int = 0

    def describe_step(self, step: int) -> str:
        """Name of `step` for an error message: ``all-gather step 2 of 3``, counted from 1."""
        if self.first < 0 or not self.chunks:  # a broadcast
            return f"hop {step + self.offset + 1}"
        reducing = sum(1 for action in self.actions if action & REDUCE)
        if step < reducing:
            return f"reduce-scatter step {step + 1} of {reducing}"
        return f"all-gather step {step - reducing + 1} of {len(self.actions) - reducing}"


class Exchange(NamedTuple):
    """An exchange of rows; equal on all ranks.

    Each step sends `counts` rows, from row 0 on, `distances` ranks ahead, and receives as many from
    as far behind, stored as rows ``distance, distance + 1, ...``.
    """

    distances: tuple[int, ...]
    counts: tuple[int, ...]

    def describe_step(self, step: int) -> str:
        """Name of `step` for an error message: ``exchange step 2 of 3``, counted from 1."""
        return f"exchange step {step + 1} of {len(self.distances)}"


def exchange(size: int) -> Exchange:
    """Give every rank the rows of all ranks, in ceil(log2(size)) steps."""
    distances = tuple(1 << step for step in range((size - 1).bit_length()))
    return Exchange(distances, tuple(min(distance, size - distance) for distance in distances))


def channel_distances(size: int, streams: int) -> tuple[int, ...]:
    """How many ranks ahead each channel of a ring leads: the streams, then for the exchanges."""
    return (1,) * streams + exchange(size).distances[1:]


def chunk_bounds(count: int, size: int) -> tuple[int, ...]:
    """Where the chunks of `count` elements begin, and where the last one ends.

    Lengths differ by at most one element and the longer chunks come first; some may be empty.
    """
    base, longer = divmod(count, size)
    return tuple(i * base + min(i, longer) for i in range(size + 1))


def segment_count(nbytes: int, segment_bytes: int) -> int:
    """Number of frames of a chunk of `nbytes`; an empty chunk has one, to compare headers."""
    return max(1, -(-nbytes // segment_bytes))


def reduce_scatter(rank: int, size: int) -> Schedule:
    """Reduce all chunks and leave chunk `rank` complete on each rank, in size - 1 steps."""
    steps = range(size - 1)
    chunks = tuple((rank - step - 2) % size for step in steps)
    actions = tuple(REDUCE | (FORWARD if step < size - 2 else FINISH) for step in steps)
    return Schedule((rank - 1) % size, chunks, actions)


def all_gather(rank: int, size: int) -> Schedule:
    """Give every rank all chunks, from each rank its own, in size - 1 steps."""
    steps = range(size - 1)
    chunks = tuple((rank - step - 1) % size for step in steps)
    actions = tuple(FORWARD if step < size - 2 else 0 for step in steps)
    return Schedule(rank, chunks, actions)


def all_reduce(rank: int, size: int) -> Schedule:
    """Reduce-scatter, then all-gather without a pause between, in 2 (size - 1) steps."""
    scatter, gather = reduce_scatter(rank, size), all_gather(rank, size)
    # The last reduce-scatter step completes the chunk that the all-gather sends first.
    last = (*scatter.actions[:-1], scatter.actions[-1] | FORWARD)
    return Schedule(scatter.first, scatter.chunks + gather.chunks, last + gather.actions)


def broadcast(rank: int, size: int, root: int) -> Schedule:
    """Pass the only chunk, number 0, from `root` along the ring to the rank before `root`.

    The segments are pipelined: the last rank is done size - 2 segments after the first.
    """
    distance = (rank - root) % size
    if distance == 0:
        return Schedule(0, (), ())
    return Schedule(-1, (0,), (FORWARD if distance < size - 1 else 0,), offset=distance - 1)
