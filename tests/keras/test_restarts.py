"""A job that is killed, or stops, starts again, and ends with the weights of one left alone."""

import json
import secrets
from pathlib import Path

import pytest

from tests.jobs import facts_in
from tests.launching import run
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

PROGRAM = str(Path(__file__).parents[1] / "programs" / "restarted.py")
UNDISTURBED = -1


def digests(folder: Path, seed: int) -> list[tuple[int, int, str]]:
    """Rank, attempt and weights' digest of each rank that has ended well."""
    options = ("-n", "2", "--max-restarts", "1")
    arguments = PROGRAM, str(folder / f"backup{seed}"), str(seed)
    done = run(folder, *options, *arguments, timeout_s=90)
    assert done.returncode == 0, done.stderr
    facts = facts_in(done.stdout)
    return sorted((fact["rank"], fact["attempt"], fact["digest"]) for fact in facts)


@pytest.mark.full
def test_a_rank_killed_at_a_random_step_changes_nothing_in_the_end(tmp_path: Path) -> None:
    (_, _, expected), _ = digests(tmp_path, UNDISTURBED)
    seed = secrets.randbelow(1 << 30)
    found = digests(tmp_path, seed)
    assert found == [(0, 1, expected), (1, 1, expected)], f"with seed {seed}"


def facts_of(folder, size, seed, code=0, **case):
    """What ranks say of a job that ends with `code`."""
    command = "-n", str(size), PROGRAM, str(folder / "backup"), str(seed), json.dumps(case)
    done = run(folder, *command, timeout_s=90, TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return list(facts_in(done.stdout))


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        ((2, 3), {"data": "dataset", "shards": True}),
        in_full((3, 1), {"data": "arrays", "shards": True}),
        in_full((3, 2), {"data": "arrays", "is_compiled": True}),
        in_full((1, 2), {"data": "sequence", "is_compiled": True}),
        in_full((2, 1), {"data": "sequence"}),
        in_full((1, 1), {"data": "dataset"}),
        in_full((2, 3), {"data": "arrays", "accumulated": 4}),
    ],
)
def test_a_job_told_to_stop_at_a_random_step_goes_on_as_one_left_alone(tmp_path, sizes, case):
    (tmp_path / "alone").mkdir()
    expected, *_ = facts_of(tmp_path / "alone", 1, UNDISTURBED, **case | {"shards": False})
    seed = secrets.randbelow(1 << 30)
    assert facts_of(tmp_path, sizes[0], seed, code=143, is_told=True, **case) == []
    found = facts_of(tmp_path, sizes[1], UNDISTURBED, **case)
    assert len(found) == sizes[1]
    for fact in found:
        assert fact["weights"] == pytest.approx(expected["weights"], abs=1e-5), f"seed {seed}"
        for name, values in expected["history"].items():
            assert fact["history"][name] == pytest.approx(values, rel=1e-4), f"seed {seed}"
