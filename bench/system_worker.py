"""A rank of any system of `peers` and `link`: makes calls on float32 arrays that the driver orders.

``python -m bench.system_worker SYSTEM`` in the environment that the system's launcher sets.
All are measured by the same loop; an entry of `SYSTEMS` joins the system and makes its calls.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.collectives import COLLECTIVES
from bench.turns import TURN_TIMEOUT_S, Line
from ringreduce.pure.schedule import chunk_bounds

Call = Callable[[], Any]


@dataclass(frozen=True)
class Member:
    """A rank that has joined.

    Attributes:
        rank, size: its rank and the number of ranks.
        loads: for each collective that the system has, what copies initial values and returns a
            call, which makes that collective, a sum in place if the system can, and returns the
            result (anything that numpy reads).
        facts: for the driver.
    """

    rank: int
    size: int
    loads: dict[str, Callable[[np.ndarray], Call]]
    facts: dict[str, Any]


def join_ringreduce(arguments: argparse.Namespace) -> Member:
    import ringreduce

    comm = ringreduce.init()

    def filled(values: np.ndarray) -> np.ndarray:
        buffer = comm.empty(values.shape, values.dtype) if arguments.registered else values.copy()
        buffer[:] = values
        return buffer

    def all_reduce(values: np.ndarray) -> Call:
        buffer = filled(values)
        return lambda: comm.all_reduce(buffer, "sum")

    def all_to_all(values: np.ndarray) -> Call:
        buffer, out = filled(values), values.copy()
        return lambda: comm.all_to_all(buffer, out=out)

    def sendrecv(values: np.ndarray) -> Call:
        buffer, out = filled(values), values.copy()
        return lambda: COLLECTIVES["sendrecv"].run(comm, buffer, out, "")

    def reduce_scatter(values: np.ndarray) -> Call:
        buffer = filled(values)
        return lambda: comm.reduce_scatter(buffer, "sum")

    def all_gather(values: np.ndarray) -> Call:
        buffer = filled(values)
        if not arguments.registered:
            bounds = chunk_bounds(buffer.size, comm.size)
            return lambda: comm.all_gather(buffer[bounds[comm.rank] : bounds[comm.rank + 1]])

        def call() -> np.ndarray:
            # In place, as a sharded update gives all ranks the weights.
            comm._session.calls.gather_shares(buffer, 0)
            return buffer

        return call

    loads = {"all_reduce": all_reduce, "all_to_all": all_to_all, "sendrecv": sendrecv}
    loads |= {"reduce_scatter": reduce_scatter, "all_gather": all_gather}
    return Member(comm.rank, comm.size, loads, {"transport": comm.transport})


def join_gloo(arguments: argparse.Namespace) -> Member:
    import torch
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        # A file, since every network namespace can reach it.
        init_method=f"file://{Line.folder() / 'gloo'}",
        rank=arguments.rank,
        world_size=arguments.size,
        timeout=datetime.timedelta(seconds=TURN_TIMEOUT_S),
    )

    def all_reduce(values: np.ndarray) -> Call:
        tensor = torch.from_numpy(values.copy())

        def call() -> Any:
            distributed.all_reduce(tensor)
            return tensor

        return call

    def all_to_all(values: np.ndarray) -> Call:
        tensor = torch.from_numpy(values.copy())
        result = torch.empty_like(tensor)

        def call() -> Any:
            distributed.all_to_all_single(result, tensor)
            return result

        return call

    def sendrecv(values: np.ndarray) -> Call:
        tensor = torch.from_numpy(values.copy())
        result, other = torch.empty_like(tensor), arguments.rank ^ 1

        def call() -> Any:
            if arguments.rank < other:
                distributed.send(tensor, other)
            distributed.recv(result, other)
            if arguments.rank > other:
                distributed.send(tensor, other)
            return result

        return call

    def reduce_scatter(values: np.ndarray) -> Call:
        tensor = torch.from_numpy(values.copy())
        result = torch.empty(len(values) // arguments.size)

        def call() -> Any:
            distributed.reduce_scatter_tensor(result, tensor)
            return result

        return call

    def all_gather(values: np.ndarray) -> Call:
        result = torch.from_numpy(values.copy())
        chunk = result.chunk(arguments.size)[arguments.rank].clone()

        def call() -> Any:
            distributed.all_gather_into_tensor(result, chunk)
            return result

        return call

    loads = {"all_reduce": all_reduce, "all_to_all": all_to_all, "sendrecv": sendrecv}
    loads |= {"reduce_scatter": reduce_scatter, "all_gather": all_gather}
    return Member(arguments.rank, arguments.size, loads, {})


def join_openmpi(arguments: argparse.Namespace) -> Member:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def all_reduce(values: np.ndarray) -> Call:
        buffer = values.copy()

        def call() -> np.ndarray:
            world.Allreduce(MPI.IN_PLACE, buffer)
            return buffer

        return call

    def all_to_all(values: np.ndarray) -> Call:
        buffer, result = values.copy(), values.copy()

        def call() -> np.ndarray:
            world.Alltoall(buffer, result)
            return result

        return call

    def sendrecv(values: np.ndarray) -> Call:
        buffer, result, other = values.copy(), values.copy(), world.rank ^ 1

        def call() -> np.ndarray:
            if world.rank < other:
                world.Send(buffer, other)
            world.Recv(result, other)
            if world.rank > other:
                world.Send(buffer, other)
            return result

        return call

    def reduce_scatter(values: np.ndarray) -> Call:
        buffer, result = values.copy(), np.empty(len(values) // world.size, np.float32)

        def call() -> np.ndarray:
            world.Reduce_scatter_block(buffer, result)
            return result

        return call

    def all_gather(values: np.ndarray) -> Call:
        buffer = values.copy()

        def call() -> np.ndarray:
            world.Allgather(MPI.IN_PLACE, buffer)
            return buffer

        return call

    loads = {"all_reduce": all_reduce, "all_to_all": all_to_all, "sendrecv": sendrecv}
    loads |= {"reduce_scatter": reduce_scatter, "all_gather": all_gather}
    return Member(world.rank, world.size, loads, {})


def join_tf_ring(arguments: argparse.Namespace) -> Member:
    import tensorflow as tf

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    def in_replica(tensor: Any) -> Any:
        context = tf.distribute.get_replica_context()
        # The strategy requires a tensor on a device, which an argument is not. No copy is made.
        placed = tf.identity(tensor)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, placed, options)

    step = tf.function(lambda tensor: strategy.run(in_replica, args=(tensor,)))

    def all_reduce(values: np.ndarray) -> Call:
        tensor = tf.constant(values)
        # On the CPU a tf.function has run when it returns; there is no in-place form.
        return lambda: step(tensor)

    loads = {"all_reduce": all_reduce}
    job = json.loads(os.environ["TF_CONFIG"])
    return Member(job["task"]["index"], len(job["cluster"]["worker"]), loads, {})


SYSTEMS = {
    "ringreduce": join_ringreduce,
    "gloo": join_gloo,
    "openmpi": join_openmpi,
    "tf-ring": join_tf_ring,
}


def pattern(count: int, rank: int) -> np.ndarray:
    """Small whole numbers, so that sums are exact and equality is ==."""
    return (np.arange(count) % 5 + 1 + rank % 3).astype(np.float32)


def count_wrong(member: Member, collective: str, count: int) -> int:
    """Elements of this rank's result that differ from numpy's for all ranks' patterns."""
    inputs = np.stack([pattern(count, rank) for rank in range(member.size)])
    result = np.asarray(member.loads[collective](inputs[member.rank])())
    expected = COLLECTIVES[collective].expected(inputs, member.rank, "sum")
    return int(np.count_nonzero(result != expected))


def measure(call: Call, untimed: int, calls: int) -> list[float]:
    """Seconds of each of `calls` single calls, back to back, after `untimed` others.

    Those also synchronize the ranks, since not every system has a barrier.
    """
    for _ in range(untimed):
        call()
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--registered", action="store_true")
    arguments = parser.parse_args()
    member = SYSTEMS[arguments.system](arguments)
    line = Line(member.rank, **member.facts)
    held: tuple[int, Call | None] = (0, None)
    for order in line.orders():
        count, collective = order["count"], order["collective"]
        if order["do"] == "check":
            held = (0, None)
            line.answer(wrong=count_wrong(member, collective, count))
            continue
        if held[0] != count:
            held = (count, member.loads[collective](np.zeros(count, np.float32)))
        line.answer(seconds=measure(held[1], order["untimed"], order["calls"]))


if __name__ == "__main__":
    main()
