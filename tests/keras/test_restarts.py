"""A job of which a rank is killed starts again, and ends with the weights of one left alone."""

import secrets
from pathlib import Path

import pytest

from tests.jobs import facts_in
from tests.launching import run

pytestmark = [pytest.mark.tensorflow, pytest.mark.full, pytest.mark.timeout(300)]

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


def test_a_rank_killed_at_a_random_step_changes_nothing_in_the_end(tmp_path: Path) -> None:
    (_, _, expected), _ = digests(tmp_path, UNDISTURBED)
    seed = secrets.randbelow(1 << 30)
    found = digests(tmp_path, seed)
    assert found == [(0, 1, expected), (1, 1, expected)], f"with seed {seed}"
