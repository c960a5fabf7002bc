"""Schedules, proved by running a whole ring of them in plain Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure import schedule
from ringreduce.pure.schedule import FINISH, FORWARD, REDUCE, Schedule

SIZES = range(2, 18)

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


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_leaves_every_chunk_complete_on_every_rank(size):
    memory = contributions(size)
    run_ring(size, schedule.all_reduce, memory)
    assert memory == [[tuple(range(size))] * size] * size


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_finishes_each_chunk_once_and_when_it_is_complete(size):
    """The division of a mean happens exactly once for each element."""
    finished = run_ring(size, schedule.all_reduce, contributions(size))
    assert sorted(chunk for _, chunk, _ in finished) == list(range(size))
    assert {content for _, _, content in finished} == {tuple(range(size))}


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_leaves_chunk_r_complete_on_rank_r(size):
    memory = contributions(size)
    run_ring(size, schedule.reduce_scatter, memory)
    assert [memory[rank][rank] for rank in range(size)] == [tuple(range(size))] * size


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_finishes_chunk_r_on_rank_r(size):
    finished = run_ring(size, schedule.reduce_scatter, contributions(size))
    assert sorted(finished) == [(rank, rank, tuple(range(size))) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_gives_every_rank_each_ranks_own_chunk(size):
    memory: list[list[Content]] = [[()] * size for _ in range(size)]
    for rank in range(size):
        memory[rank][rank] = (rank,)
    run_ring(size, schedule.all_gather, memory)
    assert memory == [[(rank,) for rank in range(size)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_every_rank_the_chunk_of_any_root(size):
    for root in range(size):
        memory: list[list[Content]] = [[(rank,)] for rank in range(size)]
        run_ring(size, partial(schedule.broadcast, root=root), memory)
        assert memory == [[(root,)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_number_of_steps_is_the_least_possible(size):
    for rank in range(size):
        assert len(schedule.reduce_scatter(rank, size).chunks) == size - 1
        assert len(schedule.all_gather(rank, size).chunks) == size - 1
        assert len(schedule.all_reduce(rank, size).chunks) == 2 * (size - 1)


def run_exchange(size: int) -> list[list[int | None]]:
    """Whose rows each rank holds after an exchange; asserts that no row is sent before it came."""
    plan = schedule.exchange(size)
    rows: list[list[int | None]] = [[rank] + [None] * (size - 1) for rank in range(size)]
    for distance, count in zip(plan.distances, plan.counts, strict=True):
        sent = [own[:count] for own in rows]
        assert all(None not in frame for frame in sent)
        for rank, own in enumerate(rows):
            assert own[distance : distance + count] == [None] * count
            own[distance : distance + count] = sent[(rank - distance) % size]
    return rows


@pytest.mark.parametrize("size", SIZES)
def test_exchange_puts_the_row_of_the_rank_j_places_before_in_row_j(size):
    assert run_exchange(size) == [[(rank - j) % size for j in range(size)] for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_exchange_takes_as_many_steps_as_doublings_reach_the_size(size):
    steps = len(schedule.exchange(size).distances)
    assert 2**steps >= size > (2**steps) // 2


def test_describe_step_of_an_exchange_counts_from_one():
    assert schedule.exchange(5).describe_step(2) == "exchange step 3 of 3"


@pytest.mark.parametrize("steps", [schedule.all_reduce, schedule.reduce_scatter])
def test_chunks_and_actions_have_equal_lengths(steps):
    for size in SIZES:
        for rank in range(size):
            own = steps(rank, size)
            assert len(own.chunks) == len(own.actions)


counts = st.integers(0, 2**40)
sizes = st.integers(1, 1000)


@given(counts, sizes)
def test_chunks_partition_the_buffer(count, size):
    bounds = schedule.chunk_bounds(count, size)
    assert len(bounds) == size + 1
    assert (bounds[0], bounds[-1]) == (0, count)
    assert list(bounds) == sorted(bounds)


@given(counts, sizes)
def test_longer_chunks_come_first_and_differ_by_one_element_at_most(count, size):
    bounds = schedule.chunk_bounds(count, size)
    lengths = [end - start for start, end in pairwise(bounds)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(st.integers(1, 2**50), st.integers(64, 2**22))
def test_segments_are_just_enough_for_the_chunk(nbytes, segment_bytes):
    number = schedule.segment_count(nbytes, segment_bytes)
    assert (number - 1) * segment_bytes < nbytes <= number * segment_bytes


@given(st.integers(64, 2**22))
def test_empty_chunk_travels_in_one_segment(segment_bytes):
    assert schedule.segment_count(0, segment_bytes) == 1


@given(st.integers(2, 100), st.data())
def test_describe_step_counts_both_halves_of_an_all_reduce_from_one(size, data):
    own = schedule.all_reduce(data.draw(st.integers(0, size - 1)), size)
    step = data.draw(st.integers(0, size - 2))
    assert own.describe_step(step) == f"reduce-scatter step {step + 1} of {size - 1}"
    assert own.describe_step(step + size - 1) == f"all-gather step {step + 1} of {size - 1}"


@given(st.integers(2, 100), st.data())
def test_describe_step_of_an_all_gather_speaks_of_no_reduction(size, data):
    own = schedule.all_gather(data.draw(st.integers(0, size - 1)), size)
    step = data.draw(st.integers(0, size - 2))
    assert own.describe_step(step) == f"all-gather step {step + 1} of {size - 1}"


@pytest.mark.parametrize("size", SIZES)
def test_describe_step_of_a_broadcast_names_the_hop_from_the_root(size):
    """The root's own frame is hop 1, and so is what the rank after it waits for."""
    names = [schedule.broadcast(rank, size, root=0).describe_step(0) for rank in range(size)]
    assert names == [f"hop {max(1, rank)}" for rank in range(size)]
