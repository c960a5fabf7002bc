"""For how long a call has waited, on a clock of our own."""

import pytest

import ringreduce as rr
from ringreduce.effects.events import Events
from ringreduce.pure.timeouts import Timeouts
from ringreduce.transport import stalls
from ringreduce.vocabulary.times import Times
from tests.rings import outcome


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


class Call(stalls.StalledCall):
    """A call that ends as `end` says when it is continued."""

    def __init__(self, end: bool | rr.RingReduceError) -> None:
        self._end = end

    def resume(self) -> bool:
        if isinstance(self._end, rr.RingReduceError):
            raise self._end
        return self._end

    def state(self) -> stalls.State:
        return stalls.State(0, 1, "a frame from rank 1")

    def where(self, peer: int) -> dict[str, int]:
        return {"rank": 0, "size": 2, "peer": peer}


CAUSE = rr.MismatchError("is the cause", rank=0, size=2)


@pytest.mark.parametrize(
    ("end", "raised"),
    [(True, None), (False, CAUSE), (rr.ProtocolError("follows from it"), CAUSE)],
    ids=["complete", "not complete", "fails"],
)
def test_an_interrupted_call_returns_if_it_is_complete_and_raises_the_cause_if_not(end, raised):
    waiting = stalls.Waiting(Timeouts(2.0, 10.0), Events())
    waiting.interrupt(CAUSE)
    assert outcome(lambda: stalls.finish(Call(end), waiting)) is raised


def test_progress_begins_anew(clock):
    stall = stalls.Stall(Timeouts(2.0, 10.0))
    assert not look(stall, clock, 8)
    assert stall.look("advanced") is None
    assert stall.waited_s == 0.0
    clock.now_s += 0.25
    assert stall.look("advanced") is None
