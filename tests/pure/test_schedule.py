"""Schedules, proved by running a whole ring of them in plain Python."""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure import schedule
from ringreduce.pure.schedule import FINISH, FORWARD, REDUCE, Schedule

sizes = pytest.mark.parametrize("size", [*range(2, 10), 13, 16, 17])

# A chunk's content: the ranks whose contribution is in it, each as often as it was added.
Content = tuple[int, ...]


def run_ring(
    size: int, make: Callable[[int, int], Schedule], memory: list[list[Content]]
) -> list[tuple[int, int, Content]]:
    """Run every rank's schedule on `memory[rank][chunk]` as the compiled loop does.

    Asserts that what arrives at a step is what the receiver's schedule says is due, and that
    nothing is left over. Returns the chunks that were finished: rank, chunk, content then.
    """
    ranks = [make(rank, size) for rank in range(size)]
    queues: list[deque[tuple[int, int, Content]]] = [deque() for _ in ranks]
    finished = []
    for rank, own in enumerate(ranks):
        if own.first >= 0:
            # A broadcast is all that has an offset, and its root starts at step 0.
            frame = (own.offset, own.first, memory[rank][own.first])
            queues[(rank + 1) % size].append(frame)
    done = [0] * size
    while any(queues):
        for rank, own in enumerate(ranks):
            if not queues[rank]:
                continue
            label, chunk, content = queues[rank].popleft()
            step = done[rank]
            assert step < len(own.chunks), f"rank {rank} of {size} expects nothing more"
            assert (label, chunk) == (step + own.offset, own.chunks[step])
            action = own.actions[step]
            kept = memory[rank][chunk]
            memory[rank][chunk] = tuple(sorted(kept + content)) if action & REDUCE else content
            if action & FINISH:
                finished.append((rank, chunk, memory[rank][chunk]))
            if action & FORWARD:
                queues[(rank + 1) % size].append(
                    (step + own.offset + 1, chunk, memory[rank][chunk])
                )
            done[rank] += 1
    assert done == [len(own.chunks) for own in ranks]
    return finished


def contributions(size: int) -> list[list[Content]]:
    return [[(rank,)] * size for rank in range(size)]


@sizes
def test_all_reduce_leaves_every_chunk_complete_on_every_rank(size):
    """Each is finished once, so that the division of a mean happens once for each element."""
    memory = contributions(size)
    finished = run_ring(size, schedule.all_reduce, memory)
    assert memory == [[tuple(range(size))] * size] * size
    assert sorted(chunk for _, chunk, _ in finished) == list(range(size))
    assert {content for _, _, content in finished} == {tuple(range(size))}


@sizes
def test_reduce_scatter_finishes_chunk_r_on_rank_r_and_leaves_it_there(size):
    memory, complete = contributions(size), tuple(range(size))
    finished = run_ring(size, schedule.reduce_scatter, memory)
    assert [memory[rank][rank] for rank in range(size)] == [complete] * size
    assert sorted(finished) == [(rank, rank, complete) for rank in range(size)]


@sizes
def test_all_gather_gives_every_rank_each_ranks_own_chunk(size):
    memory = [[(rank,) if chunk == rank else () for chunk in range(size)] for rank in range(size)]
    run_ring(size, schedule.all_gather, memory)
    assert memory == [[(rank,) for rank in range(size)]] * size


@sizes
def test_broadcast_gives_every_rank_the_chunk_of_any_root(size):
    for root in range(size):
        memory: list[list[Content]] = [[(rank,)] for rank in range(size)]
        run_ring(size, partial(schedule.broadcast, root=root), memory)
        assert memory == [[(root,)]] * size


@sizes
def test_number_of_steps_is_the_least_possible_and_each_has_an_action(size):
    for make, steps in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
        for rank in range(size):
            plan = getattr(schedule, make)(rank, size)
            assert len(plan.chunks) == len(plan.actions) == steps * (size - 1)


@sizes
def test_exchange_puts_the_row_of_the_rank_j_places_before_in_row_j(size):
    """No row is sent before it came; as many steps as doublings reach the size."""
    plan = schedule.exchange(size)
    rows: list[list[int | None]] = [[rank] + [None] * (size - 1) for rank in range(size)]
    for distance, count in zip(plan.distances, plan.counts, strict=True):
        sent = [own[:count] for own in rows]
        assert all(None not in frame for frame in sent)
        for rank, own in enumerate(rows):
            assert own[distance : distance + count] == [None] * count
            own[distance : distance + count] = sent[(rank - distance) % size]
    assert rows == [[(rank - j) % size for j in range(size)] for rank in range(size)]
    steps = len(plan.distances)
    assert 2**steps >= size > 2**steps // 2


@given(st.integers(0, 2**40), st.integers(1, 1000))
def test_chunks_partition_the_buffer_the_longer_ones_first(count, size):
    bounds = schedule.chunk_bounds(count, size)
    lengths = [end - start for start, end in pairwise(bounds)]
    assert (len(lengths), bounds[0], bounds[-1]) == (size, 0, count)
    assert lengths == sorted(lengths, reverse=True)
    assert 0 <= lengths[0] - lengths[-1] <= 1


@given(st.integers(1, 2**50), st.integers(64, 2**22))
def test_segments_are_just_enough_for_the_chunk(nbytes, segment_bytes):
    number = schedule.segment_count(nbytes, segment_bytes)
    assert (number - 1) * segment_bytes < nbytes <= number * segment_bytes
    assert schedule.segment_count(0, segment_bytes) == 1  # It has a header to compare.


@sizes
def test_steps_are_described_counted_from_one(size):
    scatter, gather = (
        [f"{name} step {step} of {size - 1}" for step in range(1, size)]
        for name in ("reduce-scatter", "all-gather")
    )
    for rank in range(size):
        # The root's own frame is hop 1, and so is what the rank after it waits for.
        for plan, names in (
            (schedule.all_reduce(rank, size), scatter + gather),
            (schedule.all_gather(rank, size), gather),
            (schedule.broadcast(rank, size, root=0), [f"hop {max(1, rank)}"]),
        ):
            assert [plan.describe_step(step) for step in range(len(names))] == names
    assert schedule.exchange(5).describe_step(2) == "exchange step 3 of 3"
