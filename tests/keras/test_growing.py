"""Lost ranks come back: each sample is used once in each epoch, and all ranks end alike."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.launching import run
from tests.processes import clean_environment
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(170)]

PROGRAM = str(Path(__file__).parents[1] / "programs" / "comes_back.py")
OF_TRAINING = "data", "way", "steps", "epochs", "rates", "validates", "normalizes"


def facts(folder):
    """What processes have come to, by rank and life."""
    every = [json.loads(path.read_text()) for path in folder.glob("fact-*")]
    return {(fact["rank"], fact["life"]): fact for fact in every}


def job(folder, size, **case):
    """Run a job of `size` ranks with a case of the program; what its processes have come to."""
    case["size"] = size
    arguments = "-n", str(size), "--elastic", "1", PROGRAM, json.dumps(case), str(folder)
    done = run(folder, *arguments, timeout_s=150.0, RINGREDUCE_TIME_SCALE="0.2")
    assert "Traceback" not in done.stderr or case.get("unlike"), done.stderr
    return facts(folder), done


@cache
def alone(case):
    """What one process trains to."""
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    command = [sys.executable, PROGRAM, case, str(folder)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return facts(folder)[0, 0]


def assert_whole(found, size, case, lives):
    """All ranks of those `lives` have ended alike, as one process does."""
    assert sorted(found) == sorted(lives.items())
    first = found[0, lives[0]] if 0 in lives else next(iter(found.values()))
    for fact in found.values():
        assert sorted(fact["members"]) == [*range(size)]
        assert fact["digest"] == first["digest"]
        assert (fact["history"], fact["epochs"]) == (first["history"], first["epochs"])
        assert fact["fields"] == first["fields"]
        assert fact["kept"] == first["kept"] == 0.0
    expected = alone(json.dumps({k: v for k, v in case.items() if k in OF_TRAINING}))
    for here, there in zip(first["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-5)
    assert first["epochs"] == expected["epochs"]


CASES = {
    "arrays": {},
    "arrays, xla": {"way": "xla"},
    "arrays, eager": {"way": "eager"},
    "arrays, validated": {"validates": True},
    "arrays, rates": {"rates": True, "epochs": 5},
    "dataset": {"data": "dataset", "epochs": 12},
    "dataset, eager": {"data": "dataset", "epochs": 12, "way": "eager"},
    "shuffled": {"data": "shuffled", "epochs": 12},
    "sequence": {"data": "sequence", "epochs": 12},
}
QUICK = "arrays, rates", "shuffled"


@pytest.mark.parametrize("name", [name if name in QUICK else in_full(name) for name in CASES])
def test_a_lost_rank_comes_back_and_all_train_to_what_one_process_trains_to(tmp_path, name):
    case = CASES[name]
    found, done = job(tmp_path, 3, lost=[[1, 7]], **case)
    assert "rank 1 is back in step" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    assert_whole(found, 3, case, {0: 0, 1: 1, 2: 0})
