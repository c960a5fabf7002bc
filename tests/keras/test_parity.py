"""N workers of batch B train to the weights of one process of batch N B, and end alike."""

import itertools
from functools import cache

import numpy as np
import pytest

from ringreduce.effects import native
from tests.jobs import run_job
from tests.models import MUON_TRAINS
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

PROGRAM = "tests/programs/parity.py"
LEFT_OUT = [] if MUON_TRAINS else ["muon"]
# What each way of programs/parity.py may differ by. float32 sums in another order: after 16 steps
# of SGD the weights differ in the last digits. Adam divides by the root of squared gradients, which
# magnifies that where they are near zero; its relatives do alike.
SUMS, ROOTS = 2e-6, 2e-4
# In half precision each rank's gradients are rounded, to 11 or 8 bits, before they are averaged.
ROUNDED = {"mixed_float16": 5e-3, "mixed_bfloat16": 3e-2}
COMMON = ("sgd", "adam", "adamw_clipnorm", "nadam", "lamb", *(["muon"] if MUON_TRAINS else []))
WAYS = {
    **{f"{name} accumulated": ROOTS for name in COMMON},
    **{f"{name} {policy}": ROUNDED[policy] for name in COMMON for policy in ROUNDED},
    "sgd": SUMS,
    "adam": ROOTS,
    "adamw": ROOTS,
    "adamw_clipnorm": ROOTS,
    "nadam": ROOTS,
    "lamb": ROOTS,
    "lion": SUMS,
    "muon": ROOTS,
    "averages": SUMS,
    "loss_scale": SUMS,
    "steps_per_execution": SUMS,
    "small_buckets": SUMS,
    "eager_loop": SUMS,
    "graph_loop": SUMS,
}
# By XLA, for the same bounds: it fuses, and so rounds less often.
JIT = (
    *("sgd", "adam", "adamw", "averages", "loss_scale", "steps_per_execution", "small_buckets"),
    *("adam accumulated", "adam mixed_float16", "sgd mixed_bfloat16"),
)
if native.library() is None:
    LEFT_OUT.append("jit")
else:
    WAYS |= {f"{name} jit": WAYS[name] for name in JIT}
    # Rounded to 8 bits for the journey.
    WAYS["adam bf16 jit"] = ROUNDED["mixed_bfloat16"]
for name in LEFT_OUT:
    WAYS.pop(name, None)
OPTIMIZERS = ("sgd", "adam", "adamw", "adamw_clipnorm", "nadam", "lamb", "lion")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a number of workers, those by rank, way and place; they train when first asked for."""
    folder = tmp_path_factory.mktemp("parity")

    @cache
    def trained(size):
        result = run_job(size, [PROGRAM, str(folder), *LEFT_OUT])
        assert result.exit_code == 0, result.errors
        found = []
        for rank in range(size):
            with np.load(folder / f"{size}-{rank}.npz") as arrays:
                found.append({name: arrays[name] for name in arrays.files})
        return found

    return trained


def of_way(arrays, way):
    return [array for name, array in sorted(arrays.items()) if name.split(".")[0] == way]


@pytest.mark.parametrize("size", [2, in_full(3)])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_end_bit_identical(weights, way, size):
    first = [array.tobytes() for array in of_way(weights(size)[0], way)]
    assert len(first) == 4
    for rank in range(1, size):
        assert [array.tobytes() for array in of_way(weights(size)[rank], way)] == first


@pytest.mark.parametrize("size", [2, in_full(3)])
@pytest.mark.parametrize("way", WAYS)
def test_workers_end_where_one_process_does(weights, way, size):
    for alone, shared in zip(
        of_way(weights(1)[0], way), of_way(weights(size)[0], way), strict=True
    ):
        np.testing.assert_allclose(shared, alone, rtol=0, atol=WAYS[way])


def test_training_changed_the_weights(weights):
    """And each optimizer in its own way; otherwise equal weights would prove nothing."""
    ends = [np.concatenate([a.ravel() for a in of_way(weights(1)[0], way)]) for way in OPTIMIZERS]
    for one, other in itertools.combinations(ends, 2):
        assert np.abs(one - other).max() > 0.003


@pytest.mark.parametrize(
    "way", sorted({"steps_per_execution", "small_buckets", "graph_loop", "sgd jit"} & WAYS.keys())
)
def test_the_way_of_calling_does_not_matter(weights, way):
    for expected, actual in zip(
        of_way(weights(2)[0], "sgd"), of_way(weights(2)[0], way), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
