"""For how long a call has waited, on a clock of our own."""

import pytest

from ringreduce.pure.timeouts import Timeouts
from ringreduce.transport import stalls
from ringreduce.vocabulary.times import Times


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stalls, "time", clock)
    monkeypatch.setattr(stalls, "TIMES", Times())
    return clock


def look(stall: stalls.Stall, clock: Clock, times: int, every_s: float = 0.25) -> list[str]:
    """The limits that were reached, one look after the other without progress."""
    found = []
    for _ in range(times):
        clock.now_s += every_s
        limit = stall.look("the same")
        found += [limit.variable] if limit else []
    return found


def test_time_that_a_call_could_not_look_is_no_waiting(clock):
    stall = stalls.Stall(Timeouts(2.0, 10.0))
    assert not look(stall, clock, 2)
    # Another thread of this process has kept Python's lock: frames may have arrived meanwhile.
    clock.now_s += 45.0
    assert not look(stall, clock, 1)
    assert stall.waited_s == 0.25 + 0.5
    assert look(stall, clock, 5) == ["RINGREDUCE_TIMEOUT_S"]


def test_a_rank_that_is_busy_has_the_longer_limit_and_the_whole_one_from_then_on(clock):
    timeouts = Timeouts(2.0, 10.0)
    other = stalls.Stall(timeouts)
    timeouts.is_busy = True
    assert not look(other, clock, 40)
    assert look(other, clock, 1) == ["RINGREDUCE_BUSY_TIMEOUT_S"]
    stall = stalls.Stall(timeouts)
    assert not look(stall, clock, 21)
    timeouts.is_busy = False
    assert not look(stall, clock, 7)
    assert look(stall, clock, 1) == ["RINGREDUCE_TIMEOUT_S"]


def test_progress_begins_anew(clock):
    stall = stalls.Stall(Timeouts(2.0, 10.0))
    assert not look(stall, clock, 8)
    assert stall.look("advanced") is None
    assert stall.waited_s == 0.0
    clock.now_s += 0.25
    assert stall.look("advanced") is None
