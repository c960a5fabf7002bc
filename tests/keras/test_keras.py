"""The wrapper on a real ring of two: what it does beside plain training."""

import json

import numpy as np
import pytest

from ringreduce.effects import native
from tests.facts import facts_of
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def facts():
    """What each case of programs/behaviour.py said on ranks 0 and 1."""
    return facts_of("behaviour", 2)


@pytest.mark.parametrize("case", ["unbuilt model", "eager first step", "retracing"])
def test_ranks_that_began_differently_end_alike(facts, case):
    assert facts[case][0]["weights"] == facts[case][1]["weights"]


def test_first_eager_step_leaves_out_gradients_of_other_weights(facts):
    fact = facts["eager first step"][0]
    for own, alone in zip(fact["weights"], fact["alone"], strict=True):
        np.testing.assert_allclose(own, alone, rtol=1e-6)


def test_ranks_may_trace_at_different_steps(facts):
    assert facts["retracing"][0]["traces"] == facts["retracing"][1]["traces"] == 3


def test_sparse_gradients_are_averaged_with_duplicates(facts):
    before, after = np.array(facts["sparse"][0]["before"]), np.array(facts["sparse"][0]["after"])
    # Rows 0 and 1 occur twice on one rank each, row 4 once on both; of 2 ranks the mean.
    occurrences = np.array([[2 / 2], [2 / 2], [0], [0], [2 / 2]])
    np.testing.assert_allclose(after, before * (1 - occurrences * 2 / 6), rtol=1e-5)
    assert facts["sparse"][0]["after"] == facts["sparse"][1]["after"]


@pytest.mark.parametrize("rank", [0, 1])
def test_jit_compile_works_or_is_refused_with_advice(facts, rank):
    if native.library() is not None:
        assert facts["jit"][rank]["error"] == ""
    else:
        assert facts["jit"][rank]["error"] == "ConfigError"
        assert "jit_compile=False" in facts["jit"][rank]["text"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["cond", "plain cond"])
def test_a_reduction_inside_a_condition_is_refused(facts, case, rank):
    assert facts[case][rank]["error"] == "ConfigError"
    assert "tf.cond" in facts[case][rank]["text"]


def test_a_gradient_that_is_none_on_one_rank_is_an_error_on_both(facts):
    assert [facts["none"][rank]["error"] for rank in (0, 1)] == ["MismatchError"] * 2
    assert "rank 1" in facts["none"][0]["text"]
    assert "kernel" in facts["none"][1]["text"]
    assert "no gradient (None)" in facts["none"][1]["text"]


def test_after_an_error_every_step_raises_it_again(facts):
    for rank in (0, 1):
        assert facts["after"][rank] == {**facts["none"][rank], "case": "after"}


@pytest.mark.parametrize("size", [2, in_full(4)])
def test_digits_end_to_end(tmp_path, size):
    """The example as a user runs it: equal digests, and it learns."""
    file = tmp_path / "out.json"
    arguments = ["examples/digits.py", "--epochs", "1", "--json", str(file)]
    result = run_job(size, arguments)
    assert result.exit_code == 0, result.errors
    out = json.loads(file.read_text())
    assert len(out["weights_sha256"]) == size
    assert len(set(out["weights_sha256"])) == 1
    assert out["accuracy"] > 0.8
    assert out["samples_per_s"] > 0
