"""Schedules of pipelines, proved by running all stages of one in plain Python."""

import itertools
from collections import deque

import pytest

from ringreduce.pure.pipeline import Pass, schedule

cases = pytest.mark.parametrize(
    ("stages", "micro_batches"), list(itertools.product((1, 2, 3, 5), (1, 2, 4, 5, 9)))
)


def source_of(step: Pass, stage: int, stages: int) -> int | None:
    """The stage whose array must have come before `stage` makes this step; None: no stage."""
    other = stage - 1 if step.is_forward else stage + 1
    return other if 0 <= other < stages else None


def target_of(step: Pass, stage: int, stages: int) -> int | None:
    """The stage that gets an array after `stage` has made this step; None: no stage."""
    return source_of(step._replace(is_forward=not step.is_forward), stage, stages)


class Line:
    """What goes from one stage to a neighbour: `capacity` arrays are on their way at most.

    A send does not wait: what is beyond that stays with the sender, in order.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept: deque[Pass] = deque()
        self.under_way: deque[Pass] = deque()

    def move(self, *, receiver_waits: bool) -> None:
        room = self.capacity - len(self.under_way) + receiver_waits
        while self.kept and room > 0:
            self.under_way.append(self.kept.popleft())
            room -= 1


def run(stages: int, micro_batches: int, capacity: int, *, late: bool) -> list[list[Pass | None]]:
    """What each stage did at each time, with passes of one unit; None: it waited.

    `late` lets the last stage move first at each time, which is another order of threads.
    """
    lines = {
        (one, other): Line(capacity)
        for one in range(stages)
        for other in (one - 1, one + 1)
        if 0 <= other < stages
    }
    plans = [deque(schedule(stage, stages, micro_batches)) for stage in range(stages)]
    done: list[list[Pass | None]] = [[] for _ in range(stages)]
    while any(plans):
        able = []
        for stage, plan in enumerate(plans):
            source = source_of(plan[0], stage, stages) if plan else None
            if source is not None:
                line = lines[source, stage]
                line.move(receiver_waits=True)
                if not line.under_way:
                    continue
                assert line.under_way[0] == plan[0], "another micro-batch than was expected"
            if plan:
                able.append(stage)
        assert able, f"all of {stages} stages wait: {[list(plan)[:2] for plan in plans]}"
        for stage in reversed(able) if late else able:
            step = plans[stage].popleft()
            if (source := source_of(step, stage, stages)) is not None:
                lines[source, stage].under_way.popleft()
            if (target := target_of(step, stage, stages)) is not None:
                lines[stage, target].kept.append(step)
                lines[stage, target].move(receiver_waits=False)
            done[stage].append(step)
        for stage in set(range(stages)) - set(able):
            done[stage].append(None)
    assert not any(line.kept or line.under_way for line in lines.values())
    return done


@cases
@pytest.mark.parametrize("capacity", [0, 1])
def test_no_stage_waits_for_ever_or_gets_another_micro_batch(stages, micro_batches, capacity):
    for late in (False, True):
        run(stages, micro_batches, capacity, late=late)


@cases
def test_it_takes_as_long_as_the_longest_way_through_it(stages, micro_batches):
    done = run(stages, micro_batches, 1, late=False)
    # Forward and backward passes of one unit each.
    assert len(done[0]) == 2 * (micro_batches + stages - 1)


@cases
def test_each_micro_batch_goes_forward_and_then_backward_once_and_in_order(stages, micro_batches):
    """A stage keeps what few forward passes need."""
    for stage in range(stages):
        steps = schedule(stage, stages, micro_batches)
        for is_forward in (True, False):
            numbers = [step.micro_batch for step in steps if step.is_forward == is_forward]
            assert numbers == list(range(micro_batches))
        for number in range(micro_batches):
            assert steps.index(Pass(True, number)) < steps.index(Pass(False, number))
        kept = list(itertools.accumulate(1 if step.is_forward else -1 for step in steps))
        assert max(kept) == min(stages - stage, micro_batches)
        assert kept[-1] == 0
