"""N workers of batch B train to the weights of one process of batch N B, and end alike."""

from functools import cache

import numpy as np
import pytest

from ringreduce.effects import native
from tests.jobs import run_job
from tests.models import MUON_TRAINS
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

PROGRAM = "tests/programs/parity.py"
# What each way of programs/parity.py may differ by. float32 sums in another order: after 8 steps
# of SGD the weights differ in the last digits. Adam divides by the root of squared gradients, which
# magnifies that where they are near zero; its relatives do alike.
SUMS, ROOTS = 2e-6, 2e-4
# In half precision each rank's gradients are rounded, to 11 or 8 bits, before they are averaged.
ROUNDED = {"mixed_float16": 5e-3, "mixed_bfloat16": 3e-2}
# Beside each optimizer by itself; what the wrapper does then is the same for all of them.
ACCUMULATED = ("sgd", "adam", "adamw_clipnorm", "lamb")
HALVES = ("adam mixed_float16", "lamb mixed_float16", "sgd mixed_bfloat16", "nadam mixed_bfloat16")
WAYS = {
    **{f"{name} accumulated": ROOTS for name in ACCUMULATED},
    **{name: ROUNDED[name.split()[1]] for name in HALVES},
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
JIT = ("sgd", "adam", "averages", "loss_scale", "adam accumulated", "adam mixed_float16")
if native.library() is not None:
    WAYS |= {f"{name} jit": WAYS[name] for name in JIT}
    # Rounded to 8 bits for the journey.
    WAYS["adam bf16 jit"] = ROUNDED["mixed_bfloat16"]
if not MUON_TRAINS:
    WAYS.pop("muon", None)
# The others are further combinations of what these have one by one, and further optimizers.
QUICK = [
    *("sgd", "adam", "small_buckets", "graph_loop"),
    *("adam mixed_float16", "sgd mixed_bfloat16"),
]
FULL = [way for way in WAYS if way not in QUICK]
PARTS = {"full": FULL, "quick": QUICK}
every_way = pytest.mark.parametrize(
    ("way", "size"),
    [
        *((way, 2) for way in QUICK),
        *(in_full(way, 3) for way in QUICK),
        *(in_full(way, 2) for way in FULL),
    ],
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """`weights(size, way)`: those of each rank; they train when first asked for."""
    folder = tmp_path_factory.mktemp("parity")

    @cache
    def trained(size, part):
        result = run_job(size, [PROGRAM, str(folder), part, *PARTS[part]])
        assert result.exit_code == 0, result.errors
        found = []
        for rank in range(size):
            with np.load(folder / f"{part}-{size}-{rank}.npz") as arrays:
                found.append({name: arrays[name] for name in arrays.files})
        return found

    def of_way(size, way):
        ranks = trained(size, "full" if way in FULL else "quick")
        return [
            [array for name, array in sorted(arrays.items()) if name.split(".")[0] == way]
            for arrays in ranks
        ]

    return of_way


@every_way
def test_ranks_end_bit_identical(weights, way, size):
    first, *others = [[array.tobytes() for array in arrays] for arrays in weights(size, way)]
    assert len(first) == 4
    assert others == [first] * (size - 1)


@every_way
def test_workers_end_where_one_process_does(weights, way, size):
    for alone, shared in zip(weights(1, way)[0], weights(size, way)[0], strict=True):
        np.testing.assert_allclose(shared, alone, rtol=0, atol=WAYS[way])


def test_training_changed_the_weights(weights):
    """And each optimizer in its own way; otherwise equal weights would prove nothing."""
    one, other = (np.concatenate([a.ravel() for a in weights(1, w)[0]]) for w in ("sgd", "adam"))
    assert np.abs(one - other).max() > 0.003


@pytest.mark.parametrize(
    "way",
    [
        in_full("steps_per_execution"),
        "small_buckets",
        "graph_loop",
        *([in_full("sgd jit")] if "sgd jit" in WAYS else []),
    ],
)
def test_the_way_of_calling_does_not_matter(weights, way):
    for expected, actual in zip(weights(2, "sgd")[0], weights(2, way)[0], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
