"""Ranks with batches of unequal numbers and lengths: what they train to, and when they end."""

import pytest

from tests.facts import facts_of
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SIZE = 2
# Batches that Keras reports in each epoch, of 5 steps.
WAYS = {
    "known": 5,
    "unknown": 5,
    "adam": 5,
    "several steps": 3,
    "one execution": 1,
    "eager": 5,
}
RARE = ("adam", "one execution", "eager")
ON_RANKS = [
    *((SIZE, case) for case in WAYS if case not in RARE),
    *(in_full(3, case) for case in WAYS),
]
# Mostly eager on 2 ranks; on 3 in graphs.
IN_BOTH = [SIZE, in_full(3)]


@pytest.fixture(scope="module")
def facts():
    """What each case of programs/uneven.py said, by rank."""
    return facts_of("uneven", SIZE)


@pytest.mark.parametrize("size", IN_BOTH)
@pytest.mark.parametrize(
    "case", ["parts", "synchronized", "empty infinity", "accumulated", "own loop"]
)
def test_ranks_end_bit_identical(size, case):
    digests = {facts_of("uneven", size)[case][rank]["digest"] for rank in range(size)}
    assert len(digests) == 1


@pytest.mark.parametrize(("size", "case"), ON_RANKS)
def test_all_train_as_one_process_on_the_batches_of_all(size, case):
    found = [facts_of("uneven", size)[case][rank] for rank in range(size)]
    assert len({fact["digest"] for fact in found}) == 1
    assert found[0]["difference"] < 2e-6
    assert found[0]["moved"] > 0.1


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (SIZE, "unknown"),
        *(in_full(3, case) for case in ("known", "adam")),
    ],
)
def test_a_step_is_traced_once(size, case):
    """What it keeps from step to step is no variable of its trace."""
    facts = facts_of("uneven", size)[case]
    assert [facts[rank]["traces"] for rank in range(size)] == [1] * size


@pytest.mark.parametrize("size", IN_BOTH)
def test_normalization_over_all_ranks_leaves_out_who_has_no_data(size):
    assert facts_of("uneven", size)["synchronized"][0]["difference"] < 2e-6


@pytest.mark.parametrize("size", IN_BOTH)
def test_a_model_of_parts_trains_as_one_process_does(size):
    """Its optimizers are built too, and a slow copy of its weights follows in empty steps."""
    fact = facts_of("uneven", size)["parts"][0]
    assert fact["difference"] < 2e-6
    assert fact["count"] == 6


@pytest.mark.parametrize("case", ["across ranks eager", "across ranks graph"])
def test_gradients_that_cross_ranks_count_by_the_samples_of_their_loss(facts, case):
    for rank in range(SIZE):
        assert facts[case][rank]["difference"] < 1e-6
        assert facts[case][rank]["digest"] == facts[case][0]["digest"]


@pytest.mark.parametrize("size", IN_BOTH)
@pytest.mark.parametrize("case", ["accumulated", "own loop"])
def test_loops_and_accumulation_weight_by_samples_too(size, case):
    assert facts_of("uneven", size)[case][0]["difference"] < 2e-6


@pytest.mark.parametrize(("size", "case"), ON_RANKS)
def test_epochs_end_together(size, case):
    """After the longest rank's 5 batches, and nothing counts the step that found no data."""
    for rank in range(size):
        fact = facts_of("uneven", size)[case][rank]
        assert fact["counts"] == [WAYS[case]] * 2
        assert fact["iterations"] == 10
        assert len(fact["loss"]) == 2


def test_empty_steps_leave_no_trace_in_metrics_and_moving_averages(facts):
    for rank in range(SIZE):  # All show the metrics of the only one that has data.
        fact = facts["metrics"][rank]
        assert fact["mae"] == fact["expected"]
        assert fact["norm"] == fact["norm_alone"]


def test_an_infinity_of_an_empty_step_does_not_count(facts):
    """In no weight, and in no log, where TerminateOnNaN would end training."""
    for rank in range(SIZE):
        assert facts["empty infinity"][rank]["finite"]
        assert facts["empty infinity"][rank]["counts"] == [5]


@pytest.mark.parametrize("rank", range(SIZE))
def test_an_empty_step_logs_what_the_last_real_one_did(facts, rank):
    fact = facts["empty infinity"][rank]
    assert fact["largest"] == pytest.approx(fact["expected"])


def test_a_weight_ends_with_its_block(facts):
    """Weights 1 and 2 of gradients 0 and 1; the same around others; none."""
    for rank in range(SIZE):
        assert facts["nested weights"][rank]["moved"] == pytest.approx([-2 / 3, -2 / 3, -0.5])


def test_a_loop_is_told_how_many_samples_are_real(facts):
    seen = [facts["own loop"][rank]["seen"] for rank in range(SIZE)]
    assert seen == [[4, 4, 4, 4, 2], [4, 4, 1, 0, 0]]


def test_a_weight_of_zero_leaves_out_even_nan(facts):
    # Rank 1's gradient of 1, once eagerly and once more in a function.
    for rank in range(SIZE):
        assert facts["own weight"][rank]["eager"] == pytest.approx([-1])
        assert facts["own weight"][rank]["graph"] == pytest.approx([-2])


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("no dataset", "tf.data.Dataset"),
        ("not batched", "Batch it"),
        ("sharded arrays", "got ndarray as x with sharded=True"),
        ("sharded steps", "got batch_size, steps_per_epoch with sharded=True"),
    ],
)
def test_what_cannot_be_joined_is_refused(facts, case, word):
    for rank in range(SIZE):
        assert facts[case][rank]["error"] == "ConfigError"
        assert word in facts[case][rank]["text"]
