"""A ring that passes the hosts in another order than that of ranks gives the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringreduce.communicator import formation
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.reforming import reform
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import Config

SIZE = 5


@pytest.fixture
def two_subnets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even ranks are in one subnet, odd ones in another; all on loopback."""

    def networks(config: Config) -> tuple[str, ...]:
        subnet, number = config.rank % 2 + 1, config.rank // 2 + 1
        return (f"127.{subnet}.0.{number}/16", f"127.9.{config.rank}.1/32")

    monkeypatch.setattr(formation, "own_networks", networks)


def everything(comm: Communicator) -> list[Any]:
    """A result of each collective, of small and of large arrays."""
    rank, size = comm.rank, comm.size
    found: list[Any] = []
    for length in (7, 50_003):
        own = np.arange(length, dtype=np.float64) % 100 + rank
        found.append(comm.all_reduce(own.copy()).tolist())
        found.append(comm.all_reduce(own.astype(np.float16), "mean").tolist())
        found.append(comm.reduce_scatter(own.copy()).tolist())
        found.append(comm.all_gather(own[: length - rank]).tolist())
        found.append(comm.broadcast(own.copy(), root=3 % size).tolist())
        found.append(comm.all_to_all(np.repeat(np.arange(size) + 10.0 * rank, length)).tolist())
    found.append(comm.all_gather_object(rank))
    received = np.zeros(3)
    request = comm.send(np.full(3, float(rank)), (rank + 2) % size, async_op=True)
    comm.recv(received, (rank - 2) % size)
    request.wait()
    # A rank that closes would take the way of the others' messages.
    comm.barrier()
    found.append(received.tolist())
    return found


@pytest.mark.usefixtures("two_subnets")
def test_results_do_not_depend_on_the_order_of_the_ring() -> None:
    def work(comm: Communicator) -> tuple[Any, ...]:
        found = everything(comm)
        group = comm.split("even and 3" if comm.rank in (0, 2, 3, 4) else None, key=-comm.rank)
        in_group = [] if group is None else everything(group)
        orders = [comm.statistics().hosts, () if group is None else group.statistics().hosts]
        reform(comm, [])
        return found, in_group, comm.all_reduce(np.ones(9)).tolist(), orders

    settings = {"transport": "zmq", "hosts": [f"h{rank}" for rank in range(SIZE)]}
    by_rank = ring_of_threads(SIZE, work, ring_order="rank", **settings)
    sorted_ = ring_of_threads(SIZE, work, **settings)
    assert [each[:3] for each in sorted_] == [each[:3] for each in by_rank]
    assert by_rank[0][3] == [((0,), (1,), (2,), (3,), (4,)), ((0,), (1,), (2,), (3,))]
    # Members of the group are ranks 4, 3, 2, 0 of the job.
    assert sorted_[0][3] == [((0,), (2,), (4,), (1,), (3,)), ((0,), (2,), (3,), (1,))]


@pytest.mark.usefixtures("two_subnets")
def test_results_do_not_depend_on_the_order_of_hosts_with_several_ranks() -> None:
    def work(comm: Communicator) -> tuple[Any, ...]:
        return everything(comm), comm.statistics().hosts

    # Host b is in the second subnet; c is in the first.
    hosts = ["a", "b", "a", "b", "c"]
    by_rank = ring_of_threads(SIZE, work, ring_order="rank", hosts=hosts)
    sorted_ = ring_of_threads(SIZE, work, hosts=hosts)
    assert [each[0] for each in sorted_] == [each[0] for each in by_rank]
    assert by_rank[0][1] == ((0, 2), (1, 3), (4,))
    assert sorted_[0][1] == ((0, 2), (4,), (1, 3))
