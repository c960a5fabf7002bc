"""Half precision, accumulation, local variables, dropout: on a real ring of two."""

import pytest

from tests.facts import facts_of

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def facts():
    """What each case of programs/steps.py said on ranks 0 and 1."""
    return facts_of("steps", 2)


ACCUMULATIONS = ("adam, clipped, eager", "several steps")


@pytest.mark.parametrize(
    "case",
    [
        "mixed_float16",
        *(f"accumulation {name}" for name in ACCUMULATIONS),
        "accumulation mixed_float16",
        "accumulated infinity",
        "accumulated sparse",
        "frozen",
        "several",
        "dropout graph",
        "dropout eager",
    ],
)
def test_ranks_end_bit_identical(facts, case):
    assert facts[case][0]["digest"] == facts[case][1]["digest"]


@pytest.mark.parametrize("rank", RANKS)
def test_compile_leaves_the_wrapper_outermost(facts, rank):
    fact = facts["mixed_float16"][rank]
    assert fact["is_ours"]
    assert fact["optimizer"] == fact["inner"] == "LossScaleOptimizer"


def test_one_ranks_infinity_skips_the_step_on_all(facts):
    first, other = (facts["mixed_float16"][rank] for rank in RANKS)
    assert first["scale"] == other["scale"] <= 2**14
    assert first["steps"] == other["steps"]
    assert 0 < first["steps"] < 6
    assert first["finite"]
    assert first["moved"] > 0
    assert first["dtypes"] == ["float32"]


@pytest.mark.parametrize("rank", RANKS)
def test_a_loss_scale_optimizer_goes_inside(facts, rank):
    fact = facts["loss scale around"][rank]
    assert fact["ours"]
    assert fact["same"]
    assert fact["plain"]
    assert (fact["scale"], fact["options"]) == (8.0, "bf16")
    assert fact["rate"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ACCUMULATIONS)
def test_accumulated_steps_equal_one_of_the_whole_batch(facts, name):
    fact = facts[f"accumulation {name}"][0]
    assert fact["difference"] < 2e-6 < 1e-2 < fact["moved"]
    assert fact["steps"] == 2
    assert fact["variables"][0] == fact["variables"][1]


def test_accumulation_in_half_precision(facts):
    """Activations are rounded, so that only their digits agree: 11 bits."""
    fact = facts["accumulation mixed_float16"][0]
    assert fact["difference"] < 2e-3
    assert fact["moved"] > 0.1
    assert fact["steps"] == 2


def test_collectives_around_accumulation_keep_the_order_of_the_program(facts):
    size = len(facts["order"])
    for fact in facts["order"].values():
        assert len(set(fact["digests"])) == 1
        assert fact["sums"] == [size]
        assert fact["counter"] == 8 * 2 * size


def test_an_accumulated_infinity_is_forgotten_after_its_update(facts):
    fact = facts["accumulated infinity"][0]
    assert fact["finite"]
    assert (fact["steps"], fact["scale"]) == (2, 2.0)


def test_accumulated_sparse_gradients_equal_the_whole_batch(facts):
    assert facts["accumulated sparse"][0]["difference"] < 1e-6


@pytest.mark.parametrize("case", ["inner accumulation", "inner accumulation, scaled"])
def test_accumulation_by_the_inner_optimizer_is_refused_with_the_reason(facts, case):
    assert facts[case][0]["error"] == "ConfigError"
    assert "accumulate_steps" in facts[case][0]["text"]


def test_a_local_variable_is_each_ranks_own(facts):
    # Two steps with momentum 0.5: 1 + 1.5 times the gradient.
    for rank in RANKS:
        assert facts["local"][rank]["shared"] == [0.0 - 2.5 * 1.5] * 3
        assert facts["local"][rank]["mine"] == [rank - 2.5 * (rank + 1)] * 3


def test_an_accumulated_local_variable_is_too(facts):
    # The mean of 1 and 3 times rank + 1.
    for rank in RANKS:
        assert facts["accumulated local"][rank]["shared"] == [-3.0] * 3
        assert facts["accumulated local"][rank]["mine"] == [-2.0 * (rank + 1)] * 3


def test_callbacks_leave_local_variables_alone(facts):
    first, other = (facts["local layer"][rank] for rank in RANKS)
    assert first["shared"] == other["shared"]
    for name in ("local", "momenta"):
        assert all(a != b for a, b in zip(first[name], other[name], strict=True))


def test_layers_in_eight_bits_are_refused(facts):
    for rank in RANKS:
        assert "inputs_scale, a scale of 8-bit floats" in facts["eight bits"][rank]["text"]


@pytest.mark.parametrize("steps", [1, 2])
def test_variables_that_are_applied_in_parts_begin_alike_and_have_steps_of_their_own(facts, steps):
    for rank in RANKS:
        assert facts[f"sets {steps}"][rank]["values"] == [[-4.0 / steps] * 2] * 2


def test_ranks_that_exchange_other_things_get_a_mismatch(facts):
    assert [facts["one builds"][rank]["error"] for rank in RANKS] == ["MismatchError"] * 2


def test_frozen_layers_stay(facts):
    assert facts["frozen"][0]["same"]
    assert facts["frozen"][0]["difference"] < 2e-6


def test_several_models_and_optimizers_train_in_turns(facts):
    assert facts["several"][0]["difference"] < 2e-6


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_dropout_differs_between_ranks(facts, way):
    first, other = (facts[f"dropout {way}"][rank] for rank in RANKS)
    assert first["state"][0] != other["state"][0]
    assert first["mask"] != other["mask"]


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_seeds_that_differ_stay_as_they_are(facts, way):
    for rank in RANKS:
        assert facts[f"dropout {way}"][rank]["again"]
