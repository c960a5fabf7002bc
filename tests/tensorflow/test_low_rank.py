"""PowerSGD's buckets against a simulation in numpy, flat and on hosts of several ranks."""

from typing import Any

import numpy as np
import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.buckets import BucketPlan, GradientSpec
from ringreduce.tensorflow.low_rank import LowRank, LowRankReducer, PowerSGD
from ringreduce.testing import ring_of_threads
from tests.scope import in_full

pytestmark = pytest.mark.tensorflow

SHAPES = ((40, 30), (7,), (3, 3, 8, 24), (5, 4))
PLAN = BucketPlan.make(
    [GradientSpec(f"v{number}", shape, "float32") for number, shape in enumerate(SHAPES)],
    {"float32": 4},
    1 << 20,
)
RANK, STEPS = 3, 6


def gradient(rank: int, step: int, number: int) -> np.ndarray:
    generator = np.random.default_rng([rank, step, number])
    return generator.standard_normal(SHAPES[number]).astype(np.float32)


def simulated(size: int) -> list[list[np.ndarray]]:
    """The means of each step in float64, by the paper's algorithm 2."""
    lefts = [[np.zeros(shape) for shape in SHAPES] for _ in range(size)]
    across: dict[int, np.ndarray] = {}
    found = []
    for step in range(STEPS):
        means = []
        for number, shape in enumerate(SHAPES):
            own = [gradient(rank, step, number) + lefts[rank][number] for rank in range(size)]
            if step == 0 or number in (1, 3):
                means.append(np.mean(own, axis=0))
                continue
            matrices = [each.reshape(-1, shape[-1]) for each in own]
            if number not in across:
                drawn = np.random.default_rng([shape[-1], number])
                across[number] = drawn.standard_normal((RANK, shape[-1]), np.float32).T
            down = np.mean([each @ across[number] for each in matrices], axis=0)
            # The signs of its columns cancel in the product.
            down, _ = np.linalg.qr(down)
            across[number] = np.mean([each.T @ down for each in matrices], axis=0)
            product = down @ across[number].T
            for rank in range(size):
                lefts[rank][number] = (matrices[rank] - product).reshape(shape)
            means.append(product.reshape(shape))
        found.append(means)
    return found


@pytest.mark.parametrize(
    ("size", "hosts"), [(2, ()), in_full(3, ()), (4, ("here", "there", "here", "there"))]
)
def test_it_is_what_the_simulation_gives(size: int, hosts: tuple[str, ...]) -> None:
    def work(comm: Communicator) -> Any:
        kept = LowRank(PowerSGD(RANK, start_step=1))
        reducer = LowRankReducer(kept, PLAN, [object() for _ in SHAPES])
        (bucket,) = PLAN.buckets
        found = []
        for step in range(STEPS):
            values = np.zeros(bucket.count, np.float32)
            places = {
                slot.gradient: values[slot.start : slot.start + slot.count].reshape(
                    SHAPES[slot.gradient]
                )
                for slot in bucket.slots
            }
            for number, place in places.items():
                place[...] = gradient(comm.rank, step, number)
            reducer.begin_step()
            reducer.reduce(0, values, lambda each: comm.all_reduce(each, "mean"))
            found.append([places[number] for number in range(len(SHAPES))])
        return found

    transport = "auto" if hosts else "zmq"
    results = ring_of_threads(size, work, hosts=hosts, transport=transport)
    for step, right in enumerate(simulated(size)):
        for number, mean in enumerate(right):
            np.testing.assert_allclose(results[0][step][number], mean, atol=2e-4)
            for other in results[1:]:
                np.testing.assert_array_equal(other[step][number], results[0][step][number])


def test_what_travels_is_thin() -> None:
    """Of a matrix, its rows and columns times the rank; a vector and a small matrix as they are."""

    def work(comm: Communicator) -> list[int]:
        kept = LowRank(PowerSGD(RANK, start_step=0))
        reducer = LowRankReducer(kept, PLAN, [object() for _ in SHAPES])
        sizes: list[int] = []
        reducer.begin_step()
        reducer.reduce(
            0, np.ones(PLAN.buckets[0].count, np.float32), lambda each: sizes.append(each.size)
        )
        return sizes

    [sizes] = ring_of_threads(1, work)
    padding = PLAN.buckets[0].count - sum(int(np.prod(shape)) for shape in SHAPES)
    assert sizes == [RANK * (40 + 72) + 7 + 20 + padding, RANK * (30 + 24)]
