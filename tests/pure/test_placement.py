"""Who shares memory with whom, from what the ranks have announced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.placement import place


@pytest.mark.parametrize(
    ("hosts", "memory", "groups", "lanes", "transport"),
    [
        ("aaa", "xxx", ((0, 1, 2),), 3, "shm"),
        ("aaa", ["", "", ""], ((0,), (1,), (2,)), 1, "zmq"),
        ("abc", "xxx", ((0,), (1,), (2,)), 1, "zmq"),
        ("abab", "xxxx", ((0, 2), (1, 3)), 2, "shm+zmq"),
        ("aaab", "xxxx", ((0, 1, 2), (3,)), 1, "shm+zmq"),
        # Containers on one host do not share memory.
        ("aaaa", "xxyy", ((0, 1), (2, 3)), 2, "shm+zmq"),
        # One that cannot share is reached over sockets.
        ("aaa", ["x", "", "x"], ((0, 2), (1,)), 1, "shm+zmq"),
        ("ba", "xx", ((0,), (1,)), 1, "zmq"),
    ],
)
def test_groups_lanes_and_transport(hosts, memory, groups, lanes, transport):
    placement = place(list(hosts), list(memory))
    assert placement.hosts == groups
    assert placement.lanes == lanes
    assert placement.transport == transport


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "x", "y"])), min_size=1))
def test_every_rank_is_in_one_group_and_every_lane_crosses_all(ranks):
    placement = place([host for host, _ in ranks], [domain for _, domain in ranks])
    assert sorted(rank for host in placement.hosts for rank in host) == list(range(len(ranks)))
    for index, host in enumerate(placement.hosts):
        assert list(host) == sorted(host)
        assert all(placement.host_of(rank) == index for rank in host)
        assert len({ranks[rank] for rank in host}) == 1
    for lane in range(placement.lanes):
        members = placement.lane(lane)
        assert [placement.host_of(rank) for rank in members] == list(range(len(placement.hosts)))
