"""Programs in the manner of keras.io, which nobody has changed, on one rank and on several."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from tests.jobs import facts_in, run_job
from tests.scope import in_full

# The first of them runs all programs, on one rank and on several.
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[1] / "programs" / "unchanged"
NAMES = sorted({file.stem for file in FOLDER.glob("*.py")} - {"every"})
HALF = ("mixed",)
QUICK = ("files", "own_step")
RANDOM = ("gan",)  # draws other numbers on each rank, in its steps


@cache
def reports(size: int, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """What the ranks of a job have trained, by program."""
    folder = mkdtemp()
    result = run_job(
        size,
        ["ringreduce/unchanged/__main__.py", str(FOLDER / "every.py"), *names],
        environment={"PROGRAMS_FOLDER": folder, "PYTHONHASHSEED": "0"},
    )
    assert result.exit_code == 0, result.errors
    found: dict[str, list[Any]] = {}
    for report in facts_in(result.output):
        found.setdefault(report["name"], []).append(report)
    if "callbacks" in names:
        written = {path.name for path in Path(folder, "run").iterdir()}
        numbered = {f"{epoch:02}.weights.h5" for epoch in range(1, 5)}
        once = {"best.keras", "final.keras", "final.weights.h5", "log.csv", "results.json"}
        assert written == {*numbered, *once, "board", "exported"}
    return found


@pytest.mark.parametrize("name", [name if name in QUICK else in_full(name) for name in NAMES])
@pytest.mark.parametrize("size", [2, in_full(3)])
def test_ranks_end_alike_and_as_one_does(name, size):
    names = QUICK if name in QUICK and size == 2 else tuple(NAMES)
    (alone,), (first, *others) = (reports(count, names)[name] for count in (1, size))
    assert len(others) == size - 1
    assert others == [first] * (size - 1)
    if name not in RANDOM:
        near = {"rtol": 1e-3, "atol": 5e-4} if name in HALF else {"rtol": 1e-6, "atol": 1e-6}
        np.testing.assert_allclose(first["weights"], alone["weights"], **near)
        np.testing.assert_allclose(first["results"], alone["results"], **near)
