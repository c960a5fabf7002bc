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


@pytest.mark.parametrize(
    ("heartbeats", "found"),
    [
        # The one that is least in calls.
        ([beat(0, stopped_s=3.0), beat(1, stopped_s=1.0), beat(2, stopped_s=5.0)], (1, 3.0)),
        # Of different ages: rank 0 has made twice the calls since, and waits as long in each.
        ([beat(0, 200, 4.0), beat(1, 100, 2.0)], None),
        ([beat(0, 200, 4.0), beat(1, 100, 0.0)], (1, 2.0)),
        # Chance: nothing is known, alone, few calls, short, mostly the calls themselves.
        ([], None),
        ([beat(0)], None),
        ([beat(0, 9, 5.0), beat(1, 9, 0.0)], None),
        ([beat(0, stopped_s=0.09), beat(1)], None),
        ([beat(0, stopped_s=40.0), beat(1, stopped_s=31.0)], None),
    ],
)
def test_the_slow_rank_is_named_unless_it_may_be_chance(heartbeats, found):
    assert slow_rank(heartbeats) == (None if found is None else SlowRank(*found))


@pytest.mark.parametrize(
    ("links", "found"),
    [
        (linked(40 * MIB, 100 * MIB, 10 * MIB, 80 * MIB), SlowLink(2, 3, 10 * MIB, 80 * MIB, 3.5)),
        # Nothing is known, alone, nearly as fast, short, few bytes.
        ({}, None),
        (linked(MIB), None),
        (linked(60 * MIB, 100 * MIB), None),
        (linked(10 * MIB, 100 * MIB, seconds=0.09), None),
        (linked(1000, 10 * MIB), None),
    ],
)
def test_the_link_with_the_lowest_rate_is_named_unless_it_may_be_chance(links, found):
    assert slow_link(links) == found
