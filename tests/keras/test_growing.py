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
OF_TRAINING = "data", "way", "steps", "epochs", "rates", "validates", "decays", "anneals"


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
        assert (fact["fields"], fact["factor"]) == (first["fields"], first["factor"])
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
    "shuffled sequence": {"data": "shuffled sequence", "epochs": 12},
    "arrays, decays, anneals": {"decays": True, "anneals": True, "epochs": 4},
}
QUICK = "arrays, rates", "shuffled"


@pytest.mark.parametrize("name", [name if name in QUICK else in_full(name) for name in CASES])
def test_a_lost_rank_comes_back_and_all_train_to_what_one_process_trains_to(tmp_path, name):
    case = CASES[name]
    found, done = job(tmp_path, 3, lost=[[1, 7]], **case)
    assert "rank 1 is back in step" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    assert_whole(found, 3, case, {0: 0, 1: 1, 2: 0})


@pytest.mark.parametrize(
    ("size", "lost"),
    [in_full(3, [[0, 7]]), in_full(4, [[1, 7], [3, 7]]), in_full(4, [[0, 7], [1, 7]])],
)
def test_several_come_back_and_the_first_one_as_the_last(tmp_path, size, lost):
    found, done = job(tmp_path, size, lost=lost, rates=True)
    lives = {rank: int(rank in dict(lost)) for rank in range(size)}
    assert_whole(found, size, {"rates": True}, lives)
    assert done.returncode == 0, done.stderr


POINTS = "prefix", "building", "ready", "forming", "state", "digest", "first step"


@pytest.mark.parametrize("point", [in_full(point) for point in POINTS])
def test_one_that_dies_on_its_way_is_started_again_and_no_step_is_lost(tmp_path, point):
    found, done = job(tmp_path, 3, lost=[[1, 7]], point=point, rates=True)
    assert_whole(found, 3, {"rates": True}, {0: 0, 1: 2, 2: 0})
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_member_that_is_lost_when_one_is_ready_comes_back_too(tmp_path):
    case = {"lost": [[1, 7]], "lost with newcomer": 2, "newcomers": 1}
    found, done = job(tmp_path, 3, **case)
    assert (0, 0) in found, done.stderr
    assert {fact["digest"] for fact in found.values()} == {found[0, 0]["digest"]}
    assert done.returncode == 0, done.stderr


UNLIKE = {
    "loss": "loss is 'mse' on rank 0 and 'mae' on rank 1",
    "optimizer": "beta_1 is 0.9 on rank 0 and 0.8 on rank 1",
    "a row more": "rank 0 has",
    "values": "rank 1 has other values than rank 0",
    "seed": "seed is 0 on rank 0 and 1 on rank 1",
    "epochs": "epochs is 20 on rank 0 and 21 on rank 1",
    "call": "called barrier as its call 2 before training, where the job called",
}


@pytest.mark.parametrize("unlike", [in_full(each) for each in UNLIKE])
def test_another_program_is_refused_by_name_and_disturbs_nobody(tmp_path, unlike):
    # Long enough for what it says to be shown.
    found, done = job(tmp_path, 3, lost=[[1, 7]], unlike=unlike, epochs=20)
    assert UNLIKE[unlike] in done.stderr, done.stderr
    assert sorted(found) == [(0, 0), (2, 0)]
    assert found[0, 0]["digest"] == found[2, 0]["digest"]
    assert done.returncode == 0, done.stderr


SHRINK = {
    "data": ({"data": "generator"}, "its data go on across epochs, or cannot begin at another"),
    "call": ({"early": "split"}, "split was called before training, and what that gives"),
    "of two": ({"early": "send"}, "recv_object was called before training, and what that"),
    "hook": ({"hook": True}, "callbacks call collectives when an epoch begins"),
}


@pytest.mark.full
def test_moving_averages_are_those_of_the_first_rank(tmp_path):
    """What one process trains to is not what ranks with batches of their own do."""
    found, done = job(tmp_path, 3, lost=[[1, 47]], normalizes=True, validates=True)
    assert sorted(found) == [(0, 0), (1, 1), (2, 0)]
    assert len({fact["digest"] for fact in found.values()}) == 1
    assert found[1, 1]["history"] == found[0, 0]["history"]
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [in_full(each) for each in SHRINK])
def test_a_job_that_only_shrinks_says_why_when_a_rank_is_lost(tmp_path, name):
    case, why = SHRINK[name]
    found, done = job(tmp_path, 3, lost=[[1, 47]], newcomers=0, **case)
    assert f"a lost rank is not started again: {why}" in done.stderr, done.stderr
    assert "was started again" not in done.stderr
    assert sorted(found) == [(0, 0), (2, 0)]
    assert done.returncode == 0, done.stderr
