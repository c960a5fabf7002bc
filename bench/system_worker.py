"""A rank of any system of `peers` and `link`: sums float32 arrays on orders of the driver.

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

from bench.turns import TURN_TIMEOUT_S, Line

Call = Callable[[], Any]


@dataclass(frozen=True)
class Member:
    """A rank that has joined.

    Attributes:
        rank, size: its rank and the number of ranks.
        load: copies initial values and returns a call, which sums over all ranks, in place
            if the system can, and returns the result (anything that numpy reads).
        facts: for the driver.
    """

    rank: int
    size: int
    load: Callable[[np.ndarray], Call]
    facts: dict[str, Any]


def join_ringreduce(arguments: argparse.Namespace) -> Member:
    import ringreduce

    comm = ringreduce.init()

    def load(values: np.ndarray) -> Call:
        buffer = comm.empty(values.shape, values.dtype) if arguments.registered else values.copy()
        buffer[:] = values
        return lambda: comm.all_reduce(buffer, "sum")

    return Member(comm.rank, comm.size, load, {"transport": comm.transport})


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

    def load(values: np.ndarray) -> Call:
        tensor = torch.from_numpy(values.copy())

        def call() -> Any:
            distributed.all_reduce(tensor)
            return tensor

        return call

    return Member(arguments.rank, arguments.size, load, {})


def join_openmpi(arguments: argparse.Namespace) -> Member:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def load(values: np.ndarray) -> Call:
        buffer = values.copy()

        def call() -> np.ndarray:
            world.Allreduce(MPI.IN_PLACE, buffer)
            return buffer

        return call

    return Member(world.rank, world.size, load, {})


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

    def load(values: np.ndarray) -> Call:
        tensor = tf.constant(values)
        # On the CPU a tf.function has run when it returns; there is no in-place form.
        return lambda: step(tensor)

    job = json.loads(os.environ["TF_CONFIG"])
    return Member(job["task"]["index"], len(job["cluster"]["worker"]), load, {})


SYSTEMS = {
    "ringreduce": join_ringreduce,
    "gloo": join_gloo,
    "openmpi": join_openmpi,
    "tf-ring": join_tf_ring,
}


def pattern(count: int, rank: int) -> np.ndarray:
    """Small whole numbers, so that sums are exact and equality is ==."""
    return (np.arange(count) % 5 + 1 + rank % 3).astype(np.float32)


def count_wrong(member: Member, count: int) -> int:
    """Elements of this rank's result that are not the sum of all ranks' patterns."""
    result = np.asarray(member.load(pattern(count, member.rank))())
    expected = sum(pattern(count, rank) for rank in range(member.size))
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
        count = order["count"]
        if order["do"] == "check":
            held = (0, None)
            line.answer(wrong=count_wrong(member, count))
            continue
        if held[0] != count:
            held = (count, member.load(np.zeros(count, np.float32)))
        line.answer(seconds=measure(held[1], order["untimed"], order["calls"]))


if __name__ == "__main__":
    main()
