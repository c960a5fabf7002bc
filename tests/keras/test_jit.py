"""Training steps that XLA compiles, with the ring in them: programs/jit.py on real rings."""

from __future__ import annotations

import numpy as np
import pytest

from ringreduce.effects import native
from tests.facts import facts_of
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(native.library() is None, reason="without the native library"),
]


@pytest.fixture(params=[2, in_full(3)], scope="module")
def facts(request):
    """By case and rank, what the program said on a ring of that size."""
    return facts_of("jit", request.param)


def of(facts, case):
    """What every rank said of `case`, in rank order."""
    return [fact for _, fact in sorted(facts[case].items())]


@pytest.mark.parametrize("case", ["retraced", "sparse", "accumulated", "join"])
def test_it_is_the_same_training_as_without(facts, case):
    said = of(facts, case)
    assert len({fact["digest"] for fact in said}) == 1
    for fact in said:
        assert fact["difference"] < 2e-6


def test_ranks_that_compile_again_at_different_steps_go_on(facts):
    """One has a last batch of 2 and the others of 3, so no step is the same program on all."""
    for fact in of(facts, "retraced"):
        assert fact["moved"] > 0.1
        for name, values in fact["expected"].items():
            assert fact["history"][name] == pytest.approx(values, rel=1e-5)


def test_what_comes_after_a_reduction_that_is_not_due_in_each_step_stays_in_order(facts):
    for fact in of(facts, "accumulated"):
        compiled, plain = fact["losses"]
        assert compiled == pytest.approx(plain, rel=1e-5)


def test_an_epoch_has_as_many_steps(facts):
    for fact in of(facts, "join"):
        assert fact["steps"] == [8, 8]


def test_large_gradients_are_reduced_where_they_lie_and_hurt_nobody(facts):
    for rank, fact in enumerate(of(facts, "in place")):
        assert fact["own"] == [True, rank]
        assert fact["local"] == [600 * 2 * (rank + 1), 2 * rank * sum(range(600))]
        for weight in ("first", "second", "third"):
            found, expected = fact[weight]
            assert found == pytest.approx(expected, rel=1e-6)
    assert len({fact["digest"] for fact in of(facts, "in place")}) == 1


def test_two_optimizers_in_one_program_keep_its_order(facts):
    digests = {tuple(fact["digests"]) for fact in of(facts, "two optimizers")}
    assert len(digests) == 1
    first, second = digests.pop()
    assert first == second
    assert facts["two optimizers"][0]["moved"] > 0.1


def test_reductions_that_depend_on_nothing_keep_the_order_of_the_program(facts):
    size = len(facts["linear"])
    ranks = np.arange(size)
    first, second = -3 * 111 * (ranks + 1).mean(), -9 * ranks.mean()
    for fact in of(facts, "linear"):
        assert fact["weights"] == [[pytest.approx(first)] * 3, [pytest.approx(second)] * 3]


def test_a_mean_that_one_rank_does_not_use_is_computed_all_the_same(facts):
    size = len(facts["unused"])
    for rank, fact in enumerate(of(facts, "unused")):
        expected = (size + 1) / 2 if rank == 0 else 0.0
        assert fact["results"] == [[expected]] * 4
        # Rank 0's values in four; in each step a bucket and a tensor; gradients are compared once.
        assert fact["collectives"] == 4 + 4 * 2 + 1


def test_a_loop_communicates_in_each_turn(facts):
    size = len(facts["loop"])
    gathered = [value * rank for rank in range(size) for value in (1.0, 2.0)]
    for fact in of(facts, "loop"):
        assert fact["results"] == [[size**3, 2.0 * size**3], gathered]


def test_what_a_loop_does_not_change_is_reduced_in_each_turn(facts):
    size = len(facts["invariant"])
    small, large = -5 * (size + 1) / 2, -5 * (size - 1)
    for fact in of(facts, "invariant"):
        assert fact["totals"] == [0.0, 16.0 * size, 0.0, 24.0 * size]
        assert fact["ends"] == [small, large, small, large]


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("cond", "ConfigError", "inside a branch of tf.cond"),
        ("refused", "UnknownError", "cannot do this the first time"),
        ("unequal rows", "MismatchError", "Under jit_compile=True"),
        ("afterwards", "MismatchError", "Under jit_compile=True"),
        # It would round otherwise, and weights would drift apart in silence.
        ("one alone 1", "MismatchError", "with jit_compile=True"),
        ("one alone 2", "MismatchError", "with jit_compile=True"),
    ],
)
def test_what_cannot_be_is_said(facts, case, error, text):
    for fact in of(facts, case):
        assert fact["error"] == error, fact["text"]
        assert text in fact["text"]


def test_an_error_that_breaks_nothing_leaves_the_program_usable(facts):
    size = len(facts["after refused"])
    for fact in of(facts, "after refused"):
        assert fact["total"] == [size, 2.0 * size]


REASONS = """
import os
import tensorflow as tf
from ringreduce.communicator.communicator import Communicator
from ringreduce.testing import ring_of_threads
from ringreduce.tensorflow import xla
{prepare}

def refused(comm):
    from ringreduce.tensorflow.control_flow import refuse_unreachable
    try:
        tf.function(lambda: refuse_unreachable(comm), jit_compile=True, autograph=False)()
    except Exception as error:
        return type(error).__name__ + " " + str(error)

print(ring_of_threads(2, refused)[0])
"""


@pytest.mark.parametrize(
    ("prepare", "environment", "reason"),
    [
        ("", {"RINGREDUCE_NATIVE": "0"}, "The native library is hidden"),
        ("tf.config.get_visible_devices = lambda kind=None: [kind]", {}, "compiles for the GPU"),
        ("tf.sysconfig.get_lib = lambda: '/nowhere'", {}, "no libtensorflow_framework in /nowhere"),
    ],
)
def test_where_it_cannot_be_the_reason_and_the_way_out_are_said(
    tmp_path, prepare, environment, reason
):
    program = tmp_path / "refused.py"
    program.write_text(REASONS.format(prepare=prepare))
    result = run_job(1, [str(program)], environment=environment)
    assert result.exit_code == 0, result.errors
    said = result.output.partition("] ")[2]
    assert said.startswith("ConfigError rank 0 of 2 cannot reduce gradients inside a function")
    assert reason in said
    assert "compile an inner function" in said
