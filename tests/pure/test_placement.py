"""Who shares memory with whom, from what the ranks have announced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.placement import Placement, in_ring_order, place


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


@pytest.mark.parametrize(
    ("networks", "order"),
    [
        # Two subnets, interleaved.
        ([["10.1.0.1/24"], ["10.2.0.1/24"], ["10.1.0.2/24"], ["10.2.0.2/24"]], [0, 2, 1, 3]),
        # All share one, whatever else they have.
        (
            [["10.9.0.1/16", "10.1.0.1/24"], ["10.9.0.2/16"], ["10.9.0.3/16", "10.1.0.3/24"]],
            [0, 1, 2],
        ),
        # None do, or there are only addresses.
        ([["10.1.0.1/24"], ["10.2.0.1/24"], ["10.3.0.1/24"]], [0, 1, 2]),
        ([["10.1.0.1/32"], ["10.2.0.1/24"], ["10.1.0.2/32"]], [0, 1, 2]),
        # Host 2 leads from the first subnet to the second.
        (
            [["10.1.0.1/24"], ["10.2.0.1/24"], ["10.1.0.2/24", "10.2.0.2/24"], ["10.1.0.3/24"]],
            [0, 2, 1, 3],
        ),
        # Each host has this docker0.
        (
            [["172.17.0.1/16", "10.1.0.1/24"], ["172.17.0.1/16"], ["172.17.0.1/16", "10.1.0.2/24"]],
            [0, 2, 1],
        ),
        # IPv6 alone joins 0 and 2.
        (
            [["10.1.0.1/24", "fd00::1/64"], ["10.2.0.1/24"], ["10.3.0.2/24", "fd00::2/64"]],
            [0, 2, 1],
        ),
    ],
)
def test_hosts_of_a_subnet_follow_each_other(networks, order):
    hosts = tuple((rank,) for rank in range(len(networks)))
    found = in_ring_order(Placement(hosts), networks)
    assert [host[0] for host in found.hosts] == order
    assert found.is_in_rank_order is (order == sorted(order))


def test_ranks_of_a_host_stay_together_in_any_order():
    placement = place(list("ababcc"), ["x"] * 6)
    networks = [["10.1.0.1/24"], ["10.2.0.1/24"]] * 2 + [["10.1.0.3/24"]] * 2
    assert in_ring_order(placement, networks).hosts == ((0, 2), (4, 5), (1, 3))


def test_many_hosts_are_sorted_at_once():
    networks = [[f"10.{number % 7}.{number // 7}.1/16"] for number in range(1000)]
    hosts = tuple((rank,) for rank in range(1000))
    found = [host[0] for host in in_ring_order(Placement(hosts), networks).hosts]
    assert found == sorted(range(1000), key=lambda number: (number % 7, number))
