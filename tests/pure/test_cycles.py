"""Ranks that wait for each other in sends and recvs: what is said of them."""

from __future__ import annotations

import pytest

from ringreduce.pure.cycles import Waits, describe
from ringreduce.pure.watcher_messages import Pending


def cycle(*sends: bool) -> tuple[Waits, ...]:
    size = len(sends)
    return tuple(Waits(rank, Pending(sends[rank], (rank + 1) % size, 3)) for rank in range(size))


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
