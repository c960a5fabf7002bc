"""Which limit a wait has reached."""

import pytest

from ringreduce.pure.timeouts import Limit, Timeouts

TIMEOUT, BUSY = Limit("RINGREDUCE_TIMEOUT_S", 30.0), Limit("RINGREDUCE_BUSY_TIMEOUT_S", 600.0)


@pytest.mark.parametrize(
    ("busy_s", "waited_s", "idle_s", "limit"),
    [
        (600.0, 29.9, 29.9, None),
        (600.0, 30.0, 30.0, TIMEOUT),
        (600.0, 599.9, 0.0, None),
        (600.0, 599.9, 29.9, None),  # it came, and now the others may take as long as ever
        (600.0, 599.9, 30.0, TIMEOUT),
        (600.0, 600.0, 0.0, BUSY),
        # The larger of both limits counts.
        (5.0, 29.9, 0.0, None),
        (5.0, 30.0, 0.0, TIMEOUT),
    ],
)
def test_a_rank_in_user_code_has_its_own_limit(busy_s, waited_s, idle_s, limit):
    assert Timeouts(30.0, busy_s).reached(waited_s, idle_s) == limit
