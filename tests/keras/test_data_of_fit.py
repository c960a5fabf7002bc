"""`rr.fit` is `model.fit`: every argument and form of data, alone and on two ranks."""

from functools import cache

import pytest

from tests.facts import facts_in
from tests.jobs import run_job

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

PROGRAM = "tests/programs/data.py"
# Those that differ from others in how steps are counted or rows are taken.
QUICK = [
    *("initial epoch of steps", "shuffled batches", "two outputs"),
    *("dataset and batch size", "unknown of a pass", "validated by generator"),
    *("py dataset within a pass", "generator read again", "ragged", "sparse"),
]
FULL = [
    *("traced", "steps within a pass", "steps executed by two", "endless py dataset"),
    *("ragged split", "ragged dataset", "sparse dataset", "scipy generator", "list", "endless"),
    *("arrays", "no batch size", "steps of a pass", "steps and no batch size", "executed by two"),
    *("initial epoch", "dict", "tuple", "one weight for two outputs", "no targets", "tensors"),
    *("pandas", "float64", "integers", "sample weights", "class weights", "split"),
    *("split with weights", "every second epoch", "some epochs", "validated"),
    *("validated with weights", "validated in batches", "validated for steps", "dataset"),
    *("dataset within a pass", "dataset beyond a pass", "unknown length"),
    *("unknown within a pass", "unknown beyond a pass", "unknown executed by two"),
    *("dataset with weights", "dataset with class weights", "dataset of inputs"),
    *("dataset of dicts", "validated by dataset", "py dataset", "py dataset with workers"),
    *("py dataset and batch size", "py dataset beyond a pass", "py dataset that grows"),
    *("py dataset with weights", "py dataset with class weights", "generator"),
    *("generator for steps", "generator with weights", "generator of tensors"),
    *("loader", "loader within a pass", "counted loader", "ragged py dataset", "ragged generator"),
    *("sparse split", "scipy", "validated by py dataset", "validated by unknown length"),
    *("validated by loader", "steps beyond a pass", "py dataset that shrinks"),
    *("generator that ends", "counted loader within a pass"),
]
REFUSED = {
    "numbers of Python": "cannot share out list among ranks. Pass arrays",
    "generator of lists": "Yield arrays.",
}
EVALUATED_QUICK = ["evaluate generator"]
EVALUATED_FULL = ["evaluate sparse", "evaluate loader", "evaluate ragged", "evaluate scipy"]


def of_both(quick, full):
    """Some always, others in the full suite."""
    return [*quick, *(pytest.param(name, marks=pytest.mark.full) for name in full)]


@cache
def facts_of_both(is_quick):
    quick = [*QUICK, *EVALUATED_QUICK, *REFUSED]
    full = [*FULL, *EVALUATED_FULL]
    result = run_job(2, [PROGRAM, *(quick if is_quick else full)], timeout_s=60)
    assert result.exit_code == 0, result.errors
    said = {}
    for fact in facts_in(result.output):
        said.setdefault(fact["case"], {})[fact["rank"]] = fact
    return said


def facts_of(case):
    """What plain Keras came to, `rr.fit` alone, and both ranks together."""
    first, second = (facts_of_both(case not in [*FULL, *EVALUATED_FULL])[case][r] for r in (0, 1))
    return first["apart"], second["apart"], first["together"], second["together"]


@pytest.mark.parametrize("case", of_both(QUICK, FULL))
def test_steps_losses_and_weights_are_those_of_keras(case):
    plain, alone, *together = facts_of(case)
    assert sum(plain["steps"]) > 0
    assert alone == plain
    assert together == [plain, plain]


@pytest.mark.parametrize("case", of_both(EVALUATED_QUICK, EVALUATED_FULL))
def test_evaluation_and_prediction_are_those_of_keras(case):
    plain, _, *together = facts_of(case)
    assert plain["outputs"]
    assert together == [plain, plain]


@pytest.mark.parametrize("case", REFUSED)
def test_what_keras_does_not_take_is_refused(case):
    plain, *ours = facts_of(case)
    assert plain["error"] == "ValueError"
    for fact in ours:
        assert fact["error"] == "ConfigError"
        assert REFUSED[case] in fact["text"]
