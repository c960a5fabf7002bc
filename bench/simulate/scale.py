"""What the model says of many ranks: times of a bucket, efficiency, sizes to choose, failures.

Ranks are alone on their hosts (a ring), or 8 on each (two levels), every rank with a core. Links
have a rate, and a message's alpha is that of sockets within one machine: distance adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.simulate import model, training
from bench.simulate.model import Link, Memory
from bench.simulate.training import Conditions, Model

RANKS = (4, 16, 64, 256, 1024, 4096)
GBITS = (1, 10, 25, 100)
RANKS_PER_HOST = 8
BUCKETS = tuple(size << 20 for size in (1, 4, 16, 64, 256))
STEPS = 400
# Assumed, not measured: gradients as even as those of many equal layers.
MODELS = (
    Model("25 MB, 0.1 s", (500_000,) * 50, 0.1),
    Model("400 MB, 0.4 s", (4_000_000,) * 100, 0.4),
)


@dataclass(frozen=True)
class Parameters:
    """What was fitted: sockets and shared memory of a machine.

    `wire` is how many bytes a link carries for a byte of payload.
    """

    sockets: Link
    memory: Memory
    wire: float

    def link(self, gbit: float) -> Link:
        """A link of that many Gbit/s between machines like this one."""
        return Link(self.sockets.alpha, 8 * self.wire / (gbit * 1e9), self.sockets.gamma)


@dataclass(frozen=True)
class Cluster:
    """Ranks of a job; `each` is how many share a host, if there are as many."""

    parameters: Parameters
    gbit: float
    ranks: int
    each: int

    def all_reduce(self, nbytes: int) -> float:
        """Seconds of an all-reduce."""
        link = self.parameters.link(self.gbit)
        each = min(self.each, self.ranks)
        if each == 1:
            return model.all_reduce(self.ranks, nbytes, link)
        memory = self.parameters.memory
        return model.two_levels(self.ranks // each, each, nbytes, link, memory)


class Scale:
    """Draws of how slow the slowest rank is, and what follows from them."""

    def __init__(self, parameters: Parameters, conditions: Conditions, seed: int = 0) -> None:
        self.parameters, self.conditions = parameters, conditions
        self._generator = np.random.default_rng(seed)
        self._slowest: Mapping[int, np.ndarray] = {
            ranks: training.slowest(ranks, STEPS, conditions, self._generator) for ranks in RANKS
        }

    def efficiency(self, trained: Model, cluster: Cluster, bucket_bytes: int) -> float:
        """The share of the speed that the ranks have if they never wait; see `training`."""
        return training.efficiency(
            trained,
            trained.buckets(bucket_bytes),
            cluster.all_reduce,
            self._slowest[cluster.ranks],
            self.conditions,
        )

    def best(self, trained: Model, cluster: Cluster) -> tuple[int, float]:
        """The bucket size with the highest efficiency, the smallest of equals, and that."""
        found = {size: self.efficiency(trained, cluster, size) for size in BUCKETS}
        most = max(found.values())
        return next((size, share) for size, share in found.items() if share > most - 0.005)

    def alone(self, ranks: int) -> float:
        """The efficiency that the ranks' unequal times leave if communication takes no time."""
        return training.usual(self.conditions) / float(self._slowest[ranks].mean())

    def failures(self, hosts: int) -> tuple[float, float, float, float]:
        """Failures a day, the best interval, goodput with it and with checkpoints each hour."""
        interval = training.checkpoint_interval(hosts, self.conditions)
        best, hourly = (
            training.goodput(hosts, seconds, self.conditions, self._generator)
            for seconds in (interval, 3600.0)
        )
        return hosts * self.conditions.failures_a_day, interval, best, hourly


def exchange_pays_up_to(ranks: int, link: Link) -> int:
    """The largest power of two bytes that an exchange moves no slower than the ring; 0 for none."""
    sizes = [1 << power for power in range(27)]
    return max(
        (
            size
            for size in sizes
            if model.exchange(ranks, size, link) <= model.ring(ranks, size, link)
        ),
        default=0,
    )


def _layers(*counts: int) -> tuple[int, ...]:
    return tuple(4 * count for count in counts)


@dataclass(frozen=True)
class Measured:
    """Training that docs/performance.md lists: 2 hosts, a step, and its computation."""

    trained: Model
    gbit: float
    step_s: float

    def predicted_s(self, parameters: Parameters) -> float:
        """The step that the model expects of it."""
        all_reduce: Callable[[int], float] = Cluster(parameters, self.gbit, 2, 1).all_reduce
        buckets: Sequence[int] = self.trained.buckets()
        share = Conditions.backward_share
        return float(training.step_seconds(self.trained, buckets, all_reduce, np.ones(1), share)[0])


_MLP = _layers(784 * 2048, 2048, 2048 * 2048, 2048, 2048 * 2048, 2048, 20480, 10)
_CNN = _layers(864, 18432, 36864, 73728, 147456, 1280)
_TRANSFORMER = _layers(8192, *(4 * (16384,) + 2 * (65536,)) * 4, 1280)
MEASURED = (
    Measured(Model("mlp", _MLP, 0.0337), 1, 0.3743),
    Measured(Model("mlp, compiled", _MLP, 0.076), 1, 0.414),
    Measured(Model("cnn", _CNN, 0.0612), 1, 0.0716),
    Measured(Model("transformer, compiled", _TRANSFORMER, 0.357), 1, 0.395),
)
