"""N workers of batch B train to the weights of one process of batch N B, and end alike."""

import numpy as np
import pytest

from ringreduce.testing import ring_of_processes

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(240)]

PROGRAM = "tests/programs/parity.py"
WAYS = (
    "sgd",
    "adam",
    "adamw",
    "steps_per_execution",
    "small_buckets",
    "eager_loop",
    "graph_loop",
)
# float32 sums in another order: after 16 steps of SGD the weights differ in the last digits.
# Adam divides by the root of squared gradients, which magnifies that where they are near zero.
TOLERANCE = {"adam": 2e-4, "adamw": 2e-4}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights by size, rank and way, after training alone and as 2 and 3 workers."""
    folder = tmp_path_factory.mktemp("parity")
    for size in (1, 2, 3):
        result = ring_of_processes(size, [PROGRAM, str(folder)])
        assert result.exit_code == 0, result.errors
    found = {}
    for file in folder.glob("*.npz"):
        size, rank = map(int, file.stem.split("-"))
        with np.load(file) as arrays:
            found[size, rank] = {name: arrays[name] for name in arrays.files}
    return found


def of_way(arrays, way):
    return [array for name, array in sorted(arrays.items()) if name.split(".")[0] == way]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_end_bit_identical(weights, way, size):
    first = [array.tobytes() for array in of_way(weights[size, 0], way)]
    assert len(first) == 4
    for rank in range(1, size):
        assert [array.tobytes() for array in of_way(weights[size, rank], way)] == first


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_workers_end_where_one_process_does(weights, way, size):
    for alone, shared in zip(
        of_way(weights[1, 0], way), of_way(weights[size, 0], way), strict=True
    ):
        np.testing.assert_allclose(shared, alone, rtol=0, atol=TOLERANCE.get(way, 2e-6))


def test_training_changed_the_weights(weights):
    """Otherwise equal weights would prove nothing."""
    first, other = of_way(weights[1, 0], "sgd"), of_way(weights[1, 0], "adam")
    assert max(np.abs(a - b).max() for a, b in zip(first, other, strict=True)) > 0.01


@pytest.mark.parametrize("way", ["steps_per_execution", "small_buckets", "graph_loop"])
def test_the_way_of_calling_does_not_matter(weights, way):
    for expected, actual in zip(
        of_way(weights[2, 0], "sgd"), of_way(weights[2, 0], way), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
