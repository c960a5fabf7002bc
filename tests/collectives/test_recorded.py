"""What calls record of themselves: the ranks that are waited for."""

import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.pure.spans import Span, SpanKind
from ringreduce.testing import ring_of_threads
from ringreduce.transport import stalls
from tests.processes import wait_until
from tests.recorded import parts_of
from tests.rings import way_of


def of(communicator: rr.Communicator, kind: SpanKind) -> list[Span]:
    return [span for span in parts_of(communicator._session.events) if span.kind == kind]


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_the_rank_that_a_call_waits_for_is_recorded(transport, monkeypatch):
    communicators: dict[int, rr.Communicator] = {}
    looked: list[float] = []
    seen: list[float] = []
    thread: list[int] = []  # rank 0's
    look = stalls.Stall.look

    def note(stall, progress):
        if threading.get_ident() in thread:
            looked.append(time.monotonic())
        return look(stall, progress)

    monkeypatch.setattr(stalls.Stall, "look", note)

    def is_in_call():
        return 0 in communicators and (
            communicators[0]._session.events.current_call().operation is not None
        )

    def work(communicator):
        # After the first such call C begins the next ones.
        communicator.all_reduce(np.ones(4, np.float32))
        communicator.barrier()
        if communicator.rank == 0:
            thread.append(threading.get_ident())
            communicators[0] = communicator
        else:
            wait_until(is_in_call, "rank 0 to begin")
            seen.append(time.monotonic())
            # Rank 0 has checked the clock several times in its call.
            wait_until(lambda: len(looked) > 3, "rank 0 to wait")
        communicator.all_reduce(np.ones(4, np.float32))
        return of(communicator, SpanKind.WAIT), communicator._session.events.calls()[-1]

    (found, call), _ = ring_of_threads(2, work, **way_of(transport))
    # Several, if rank 1 has left the barrier meanwhile.
    spans = [span for span in found if span.number == call.number]
    assert {span.other for span in spans} == {1}
    # From its beginning in C on, also if Python had to go on with it.
    assert call.began_s <= seen[0]
    assert spans[-1].ended_s is not None
    assert spans[0].began_s <= looked[0] < looked[3] <= spans[-1].ended_s
