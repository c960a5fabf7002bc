"""Which limit a wait has reached."""

from __future__ import annotations

import pytest

from ringreduce.pure.timeouts import Limit, Timeouts

TIMEOUT, BUSY = Limit("RINGREDUCE_TIMEOUT_S", 30.0), Limit("RINGREDUCE_BUSY_TIMEOUT_S", 600.0)


@pytest.mark.parametrize(
    ("waited_s", "idle_s", "limit"),
    [
        (29.9, 29.9, None),
        (30.0, 30.0, TIMEOUT),
        (599.9, 0.0, None),
        (599.9, 29.9, None),  # it came, and now the others may take as long as ever
        (599.9, 30.0, TIMEOUT),
        (600.0, 0.0, BUSY),
    ],
)
def test_a_rank_in_user_code_has_its_own_limit(
    waited_s: float, idle_s: float, limit: Limit | None
) -> None:
    assert Timeouts(30.0, 600.0).reached(waited_s, idle_s) == limit


def test_the_larger_of_both_limits_counts_for_a_rank_in_user_code() -> None:
    timeouts = Timeouts(30.0, 5.0)
    assert timeouts.reached(29.9, 0.0) is None
    assert timeouts.reached(30.0, 0.0) == TIMEOUT
