"""Programs as strangers write them: alone and on two ranks, which must end alike."""

import numpy as np
import pytest

from tests.jobs import _ROOT as ROOT
from tests.jobs import facts_in, run_job
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

FOLDER = ROOT / "tests" / "programs" / "strangers"
# Draw random numbers in each step, others on each rank.
RANDOM = ("ddim", "gan", "vae")
EQUAL = (
    *("contrastive", "distillation", "dlrm", "imbalanced", "mixture", "own_loop", "recommender"),
    *("series", "transformer", "two_tower"),
)
QUICK = ("own_loop",)
LINES_MAX = 10
# With a model on two ranks, and four to divide data too.
MORE = ("transformer",)

PROGRAMS = sorted((*RANDOM, *EQUAL))


def reports_of(name, size):
    """What each rank reported; the only warning is that ranks draw other random numbers."""
    result = run_job(size, [f"tests/programs/strangers/{name}.py"])
    assert result.exit_code == 0, result.errors
    warned = [line for line in result.errors.splitlines() if "Warning" in line]
    assert len(warned) == (name in RANDOM and size > 1), warned
    assert all("ParityWarning" in line for line in warned)
    reports = list(facts_in(result.output))
    assert len(reports) == size
    return reports


@pytest.mark.parametrize("name", [n if n in QUICK else in_full(n) for n in PROGRAMS])
def test_ranks_end_alike_and_as_one_process_does(name):
    (alone,) = reports_of(name, 1)
    first, *others = reports_of(name, 4 if name in MORE else 2)
    assert others == [first] * len(others)
    assert first.keys() == alone.keys()
    is_equal = name in EQUAL
    for key in first.keys() - {"digest"}:
        # float32 sums in another order, or the same model trained with other noise.
        tolerance = {"atol": 2e-6, "rtol": 2e-6} if is_equal else {"atol": 0.3, "rtol": 0.1}
        np.testing.assert_allclose(first[key], alone[key], **tolerance, err_msg=key)
    assert alone["losses"][-1] < alone["losses"][0]


def test_every_program_is_run_and_has_few_lines_that_differ_from_plain_keras():
    assert {file.stem for file in FOLDER.glob("*.py")} - {"report"} == {*PROGRAMS}
    for name in PROGRAMS:
        lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
        changed = [line for line in lines if line.endswith("# ringreduce")]
        assert all("# ringreduce" in line for line in lines if "rr." in line or "comm." in line)
        assert 3 <= len(changed) <= LINES_MAX, name
