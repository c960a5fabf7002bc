"""Ranks that wait for each other in sends and recvs: what is said of them, and when."""

from __future__ import annotations

import pytest

from ringreduce.pure import cycles
from ringreduce.pure.cycles import Cycles, Waits, describe
from ringreduce.pure.watcher_messages import Pending
from ringreduce.vocabulary.times import Times


@pytest.fixture(autouse=True)
def full_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "TIMES", Times())


def cycle(*sends: bool, first: int = 0) -> tuple[Waits, ...]:
    size = len(sends)
    return tuple(
        Waits(rank, Pending(sends[rank], (rank + 1) % size, 3))
        for rank in ((first + place) % size for place in range(size))
    )


@pytest.mark.parametrize(
    ("sends", "text"),
    [
        (
            (False, False, False),
            "Ranks wait for each other: rank 0 receives from rank 1, rank 1 receives from rank 2, "
            "rank 2 receives from rank 0. Let one of them send first.",
        ),
        (
            (True, True),
            "Ranks wait for each other: rank 0 sends to rank 1, rank 1 sends to rank 0. Let one of "
            "them receive first; arrays can be sent with async_op=True.",
        ),
        (
            (True, False, False),
            "Ranks wait for each other: rank 0 sends to rank 1, rank 1 receives from rank 2, "
            "rank 2 receives from rank 0. Let one of them make its calls in another order.",
        ),
        # One receives what the other sends.
        ((True, False), None),
    ],
)
def test_a_cycle_is_described_with_what_to_do(sends: tuple[bool, ...], text: str | None) -> None:
    assert describe(cycle(*sends)) == text


def test_a_cycle_that_stands_still_is_warned_of_once_by_its_lowest_rank() -> None:
    lowest, other, stuck = Cycles(), Cycles(), cycle(False, False, False)
    for tick in range(20):
        assert not lowest.look(stuck, "some bytes", 0.25 * tick)
    [log] = lowest.look(stuck, "some bytes", 5.0)
    assert log.text.startswith("has waited 5.0 s. Ranks wait for each other: rank 0 receives from")
    assert not lowest.look(stuck, "some bytes", 20.0)
    for tick in range(40):
        assert not other.look(cycle(False, False, False, first=1), "some bytes", 0.25 * tick)


def test_what_progresses_or_is_interrupted_is_no_cycle_that_stands_still() -> None:
    """A token that goes round looks like one in every heartbeat."""
    known, stuck = Cycles(), cycle(False, False, False)
    for tick in range(100):
        assert not known.look(stuck, tick // 19, 0.25 * tick)
    known = Cycles()
    for tick in range(100):
        assert not known.look(stuck if tick % 19 else (), "some bytes", 0.25 * tick)
