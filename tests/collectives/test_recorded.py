"""What calls record of themselves: steps of a pass, and the ranks that are waited for."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.effects import native
from ringreduce.pure.spans import Span, SpanKind
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import TIMES
from tests.processes import wait_until


def of(communicator: Communicator, kind: SpanKind) -> list[Span]:
    return [span for span in communicator._session.events.parts() if span.kind == kind]


def test_the_steps_of_a_long_pass_are_recorded_one_after_the_other() -> None:
    size, count = 3, 1 << 16

    def work(communicator: Communicator) -> tuple[list[Span], list[Span]]:
        communicator.all_reduce(np.ones(1000, np.float32))  # too short
        communicator.all_reduce(np.ones(count, np.float32))
        return of(communicator, SpanKind.STEP), communicator._session.events.calls()

    for steps, calls in ring_of_threads(size, work, transport="zmq"):
        assert [step.other for step in steps] == list(range(2 * (size - 1)))
        call = calls[-1]
        assert {step.number for step in steps} == {call.number}
        assert call.ended_s is not None
        ends = [call.began_s]
        for step in steps:
            assert step.ended_s is not None
            ends += [step.began_s, step.ended_s]
        ends.append(call.ended_s)
        assert all(one <= other for one, other in itertools.pairwise(ends))
        assert all(one.ended_s == other.began_s for one, other in itertools.pairwise(steps))


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_the_rank_that_a_call_waits_for_is_recorded(transport: str) -> None:
    if transport == "shm" and native.library() is None:
        pytest.skip(native.why_missing())
    communicators: dict[int, Communicator] = {}

    def work(communicator: Communicator) -> list[Span]:
        communicators[communicator.rank] = communicator
        communicator.barrier()
        if communicator.rank == 1:
            others = communicators[0]._session.events
            # For some checks of the clock.
            wait_until(
                lambda: (
                    others.standing().operation == "all_reduce"
                    and others.calls()[-1].ended_s is None
                    and time.monotonic() - others.standing().since_s > 5 * TIMES.poll_s
                ),
                "rank 0 to wait",
            )
        communicator.all_reduce(np.ones(4, np.float32))
        return of(communicator, SpanKind.WAIT)

    found, _ = ring_of_threads(2, work, transport=transport)
    last = found[-1]
    assert (last.other, last.number) == (1, 2)
    assert last.ended_s is not None
    assert last.ended_s - last.began_s >= 3 * TIMES.poll_s
