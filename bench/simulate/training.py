"""Steps of training and failures of hosts, drawn at random: what many ranks reach of their speed.

A step, on the slowest of all ranks:

    forward | backward ............................ |
                 bucket 0 | bucket 1 | ...            the engine reduces one after the other,
                   ready      ready                   each once its gradients are there

Pure, apart from the generator of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringreduce.pure.buckets import BUCKET_BYTES, BucketPlan, GradientSpec

ITEMSIZE = 4
DAY_S = 86_400.0


@dataclass(frozen=True)
class Model:
    """A model that is trained.

    Attributes:
        gradients: bytes of each, in the order of the variables.
        compute_s: of a step without communication, on a rank at its usual speed.
    """

    name: str
    gradients: tuple[int, ...]
    compute_s: float

    def buckets(self, bucket_bytes: int = BUCKET_BYTES) -> list[int]:
        """Bytes of the buckets, in the order in which they are reduced, as ringreduce plans it."""
        specs = [
            GradientSpec(str(index), (nbytes // ITEMSIZE,), "float32")
            for index, nbytes in enumerate(self.gradients)
        ]
        plan = BucketPlan.make(specs, {"float32": ITEMSIZE}, bucket_bytes)
        return [bucket.count * ITEMSIZE for bucket in plan.buckets]


@dataclass(frozen=True)
class Conditions:
    """What is assumed of a cluster.

    Attributes:
        jitter: standard deviation of the logarithm of a rank's time for a step.
        slow_share, slow_factor: so many of a rank's steps take so many times as long.
        backward_share: the part of a step's computation in which gradients appear, evenly.
        failures_a_day: of a host.
        checkpoint_s: for which all ranks stand still.
        restart_s: from a failure until training goes on from the last checkpoint.
    """

    jitter: float = 0.03
    slow_share: float = 1e-4
    slow_factor: float = 2.0
    backward_share: float = 2 / 3
    failures_a_day: float = 0.004
    checkpoint_s: float = 10.0
    restart_s: float = 120.0


def slowest(
    ranks: int, steps: int, conditions: Conditions, generator: np.random.Generator
) -> np.ndarray:
    """The time of the slowest of the ranks in each step, shape (steps,); 1 is the usual one."""
    found = np.empty(steps)
    # In blocks, since 4,096 ranks draw millions of numbers.
    block = max(1, (1 << 20) // ranks)
    for start in range(0, steps, block):
        shape = (min(block, steps - start), ranks)
        times = np.exp(conditions.jitter * generator.standard_normal(shape))
        is_slow = generator.random(shape) < conditions.slow_share
        times[is_slow] *= conditions.slow_factor
        found[start : start + block] = times.max(axis=1)
    return found


def step_seconds(
    trained: Model,
    buckets: Sequence[int],
    bucket_seconds: Callable[[int], float],
    factors: np.ndarray,
    backward_share: float,
) -> np.ndarray:
    """The time of each step, shape (steps,), in which the slowest rank needs `factors` as long."""
    total = sum(buckets)
    computed = trained.compute_s * factors
    finished = np.zeros_like(factors)
    there = 0
    for nbytes in buckets:
        there += nbytes
        ready = computed * (1 - backward_share + backward_share * there / total)
        finished = np.maximum(finished, ready) + bucket_seconds(nbytes)
    return np.maximum(finished, computed)


def efficiency(
    trained: Model,
    buckets: Sequence[int],
    bucket_seconds: Callable[[int], float],
    factors: np.ndarray,
    conditions: Conditions,
) -> float:
    """The speed of all ranks, as a share of what as many reach that never wait for each other."""
    steps = step_seconds(trained, buckets, bucket_seconds, factors, conditions.backward_share)
    return trained.compute_s * usual(conditions) / float(steps.mean())


def usual(conditions: Conditions) -> float:
    """The mean time of a rank that waits for no other; 1 without jitter."""
    slow = 1 + conditions.slow_share * (conditions.slow_factor - 1)
    return float(np.exp(conditions.jitter**2 / 2)) * slow


def checkpoint_interval(hosts: int, conditions: Conditions) -> float:
    """The seconds between checkpoints that lose least: Young, Comm. ACM 17 (1974)."""
    between_failures = DAY_S / (hosts * conditions.failures_a_day)
    return float(np.sqrt(2 * conditions.checkpoint_s * between_failures))


def goodput(
    hosts: int,
    interval_s: float,
    conditions: Conditions,
    generator: np.random.Generator,
    failures: int = 20_000,
) -> float:
    """The share of time in which training progresses, if hosts fail independently, at any time.

    After each failure all start again from the last checkpoint. Of the time between two failures
    only whole intervals that ended with a checkpoint count.
    """
    mean = DAY_S / (hosts * conditions.failures_a_day)
    between = generator.exponential(mean, failures)
    running = np.maximum(0.0, between - conditions.restart_s)
    kept = np.floor(running / (interval_s + conditions.checkpoint_s)) * interval_s
    return float(kept.sum() / between.sum())
