"""Which rank and which link are named slow, from heartbeats as ranks send them."""

import pytest

from ringreduce.pure.slowness import SlowLink, SlowRank, slow_link, slow_rank
from ringreduce.pure.watcher_messages import Heartbeat, SentToNext

MIB = 1 << 20


def beat(rank, calls=100, stopped_s=0.0):
    return Heartbeat(rank, 1, calls, "", 0.0, stopped_s=stopped_s)


def linked(*rates, seconds=4.0):
    size = len(rates)
    return {
        rank: SentToNext((rank + 1) % size, int(rate * seconds), seconds)
        for rank, rate in enumerate(rates)
    }


def test_the_rank_that_is_least_in_calls_is_slow():
    found = slow_rank([beat(0, stopped_s=3.0), beat(1, stopped_s=1.0), beat(2, stopped_s=5.0)])
    assert found == SlowRank(1, 3.0)


def test_heartbeats_of_different_ages_are_compared_by_call():
    """Rank 0 has made twice the calls since, and waits as long in each."""
    assert slow_rank([beat(0, 200, 4.0), beat(1, 100, 2.0)]) is None
    assert slow_rank([beat(0, 200, 4.0), beat(1, 100, 0.0)]) == SlowRank(1, 2.0)


@pytest.mark.parametrize(
    "heartbeats",
    [
        [],
        [beat(0)],
        [beat(0, 9, 5.0), beat(1, 9, 0.0)],
        [beat(0, stopped_s=0.09), beat(1)],
        [beat(0, stopped_s=40.0), beat(1, stopped_s=31.0)],
    ],
    ids=["nothing known", "alone", "few calls", "short", "mostly the calls themselves"],
)
def test_chance_names_no_rank(heartbeats):
    assert slow_rank(heartbeats) is None


def test_the_link_with_the_lowest_rate_is_slow():
    assert slow_link(linked(40 * MIB, 100 * MIB, 10 * MIB, 80 * MIB)) == SlowLink(
        2, 3, 10 * MIB, 80 * MIB, 3.5
    )


@pytest.mark.parametrize(
    "links",
    [
        {},
        linked(MIB),
        linked(60 * MIB, 100 * MIB),
        linked(10 * MIB, 100 * MIB, seconds=0.09),
        linked(1000, 10 * MIB),
    ],
    ids=["nothing known", "alone", "nearly as fast", "short", "few bytes"],
)
def test_chance_names_no_link(links):
    assert slow_link(links) is None
