"""Each program of examples/, as a user runs it: two workers that end with equal weights."""

import re
from pathlib import Path

import pytest

from tests.jobs import run_job
from tests.processes import launcher
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
# These have tests of their own, or take no part in a ring.
ELSEWHERE = {"digits", "digits_mirrored", "demo", "elastic", "plain", "ray_digits"}
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py") if file.stem not in ELSEWHERE)
# Models in parts and in half precision, tables, uneven data and loops have tests of their own.
RARE = ("embedding", "hybrid", "mixed_precision", "pipeline", "recommender", "sharded")
RARE += ("custom_loop", "uneven_data")


# One epoch, or as many as a user sees.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ("--epochs", "1")) for name in NAMES if name not in RARE),
        in_full("custom_loop", ("--epochs", "1")),
        *(in_full(name, ()) for name in NAMES),
    ],
)
def test_it_ends_well_and_says_what_all_ended_with(name, options, monkeypatch):
    if name == "mixed_precision":
        # oneDNN takes ten times as long for float16 on processors with AVX512-FP16. TensorFlow
        # reads this when it is imported, which a process that others are forked from has done.
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
        monkeypatch.setenv("RINGREDUCE_TEST_FRESH", "1")
    result = run_job(2, [str(EXAMPLES / f"{name}.py"), *options])
    assert result.exit_code == 0, result.errors
    digests = [line.split()[-1].strip('",') for line in result.output.splitlines()]
    digests = [word for word in digests if len(word) == 64]
    assert len(digests) == 2, result.output
    assert len(set(digests)) == 1


@pytest.mark.full
def test_pairs_of_a_pipeline_train_as_one_of_them_does():
    losses = []
    for size in (2, 4):
        result = run_job(size, [str(EXAMPLES / "pipeline.py"), "--epochs", "3"])
        assert result.exit_code == 0, result.errors
        lines = [line.split() for line in result.output.splitlines() if "loss" in line]
        losses.append([float(line[-1]) for line in lines])
    assert len(losses[0]) == 3
    # Adam makes more of what sums are rounded by.
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.full
def test_losing_two_of_four_ranks_changes_no_weight(tmp_path):
    program = str(EXAMPLES / "elastic.py"), "--epochs", "4"
    with launcher(tmp_path, "run", "-n", "4", "--elastic", "2", *program) as done:
        assert done.wait(200) == 0, done.stderr
    assert "2 of 4 ranks are left: 1, 2" in done.stdout
    assert "made 60 steps; undisturbed: 60" in done.stdout
    [furthest] = re.findall(r"weights differ by at most (\S+) from", done.stdout)
    assert float(furthest) < 1e-6
    assert "ringreduce: ended well without ranks 0, 3" in done.stderr


@pytest.mark.full
def test_two_models_in_pieces_are_saved_as_one_plain_model():
    result = run_job(4, [str(EXAMPLES / "hybrid.py"), "--epochs", "3"])
    assert result.exit_code == 0, result.errors
    lines = [line.split() for line in result.output.splitlines()]
    assert len({line[-1] for line in lines if line[1].startswith('"accuracy')}) == 1
    assert len({line[1].strip(",") for line in lines if len(line[1].strip('",')) == 64}) == 1
    # Only the first of all ranks prints.
    assert {line[0] for line in lines if "Epoch" in line} == {"[0]"}
