"""Models in stages train as those of one process do, and no rank waits where something is wrong."""

import pytest

from tests.facts import facts_in, facts_of
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

# Two stages, three, and two copies of two.
# Three stages have one in the middle, which receives and sends both ways.
SIZES = [in_full(2), 3, in_full(4)]


def said(size, case):
    """What each rank said in a case of programs/pipeline.py."""
    return [fact for _, fact in sorted(facts_of("pipeline", size)[case].items())]


@pytest.mark.parametrize(
    ("size", "micro_batches"), [(3, 8), *(in_full(s, n) for s in (2, 4) for n in (1, 2, 8))]
)
def test_a_step_is_exactly_that_of_one_process(size, micro_batches):
    for fact in said(size, f"exact {micro_batches}"):
        assert fact["apart"] == 0.0
        assert all(fact["moved"])


@pytest.mark.parametrize("size", SIZES)
def test_epochs_are_those_of_one_process(size):
    for fact in said(size, "trained"):
        assert fact["apart"] < 1e-6
        assert fact["history"] < 1e-6
        assert fact["evaluated"] < 1e-6
        assert fact["predicted"] < 1e-6
        assert len(set(fact["copies"])) == 1
        assert fact["names"]
        assert fact["by_name"] == ["loss", "mae"]
        # Three batches in each of two epochs, of which the last has half as many rows.
        assert fact["batches"] == [["loss", "mae"]] * 6


@pytest.mark.parametrize("size", SIZES)
def test_batches_of_a_dataset_train_a_table(size):
    for fact in said(size, "dataset"):
        assert fact["apart"] < 1e-6
        assert fact["predicted"] == [24, 1]


@pytest.mark.full  # Only 4 ranks have two copies.
def test_copies_with_unequal_shares_count_by_rows():
    for fact in said(4, "unequal"):
        assert fact["apart"] < 1e-6
        assert fact["history"] < 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_makes_its_own_stage_and_no_other(size):
    stages = 3 if size == 3 else 2
    for rank, fact in enumerate(said(size, "functions")):
        assert fact["called"] == [fact["stage"]] == [rank % stages]
        first = rank - rank % stages
        assert fact["chain"] == list(range(first, first + stages))
        assert fact["replicas"] == list(range(rank % stages, size, stages))
        assert len(set(fact["first"])) == stages, "equal layers begin with equal weights"


@pytest.mark.parametrize("size", SIZES)
def test_ranks_agree_on_losses_with_random_layers_in_16_bits(size):
    losses = [fact["losses"] for fact in said(size, "reduced")]
    assert losses == [losses[0]] * size
    assert all(0 < loss < 100 for loss in losses[0])


@pytest.mark.parametrize("size", SIZES)
def test_callbacks_act_alike_and_save_each_stage_as_plain_keras(size):
    for fact in said(size, "stopped"):
        assert fact["epochs"] == 1
        assert fact["same"]
        assert fact["optimizer"] == ["Adam", "keras"]
        assert fact["lines"] == 3  # A head and two epochs, of one rank.
        stages = 3 if size == 3 else 2
        assert fact["files"] == ["log.csv", *(f"stage{number}.keras" for number in range(stages))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no stages", "got [] as stages"),
        ("models", "as a stage, which is no function"),
        ("ranks", "cannot divide"),
        ("micro-batches", "got 0 micro-batches"),
        ("nothing", "it gives None"),
        ("no layers", "it has no layers"),
        ("empty model", "cannot make stage 0 of {stages}: it has no layers"),
        ("no input", "it has no keras.Input, which the first stage needs"),
        ("shapes", "it takes rows of shape (9,), and gets some of shape (4,)"),
        ("numbers", "it gives int32, which has no gradient"),
        ("mask", "it gives a mask"),
        ("any length", "it gives rows of shape (None, 2), which is not fixed"),
        ("not compiled", "Call pipeline.compile(optimizer, loss) first"),
        ("norm", "with global_clipnorm"),
        ("own step", "with its own apply_gradients"),
        ("scale", "with a loss scale"),
        ("arrays", "Use a batch_size, and a number of rows, that are multiples of"),
        ("short", "which cannot be divided into 4 equal micro-batches"),
        ("batched", "got batch_size=16 for"),
        ("one file", "cannot save several stages as model.keras"),
        ("backup", "got a BackupAndRestore"),
    ],
)
def test_bad_input_is_an_error_on_all_ranks(size, case, words):
    for rank, fact in enumerate(said(size, case)):
        assert fact["error"] == "ConfigError"
        assert fact["text"].startswith(f"rank {rank} of {size} ")
        assert words.format(stages=3 if size == 3 else 2) in fact["text"]


@pytest.mark.parametrize("size", SIZES)
def test_stages_with_other_data_are_told_before_training(size):
    for fact in said(size, "other data"):
        assert fact["error"] == "MismatchError"
        assert "found different arrays as the data given to Pipeline.fit" in fact["text"]


@pytest.mark.full  # Only on 4 ranks.
def test_an_optimizer_that_averages_over_other_stages_is_refused():
    for fact in said(4, "whole job"):
        assert fact["error"] == "ConfigError"
        assert "averages over all 4" in fact["text"]


@pytest.mark.parametrize("size", [3, in_full(4)])
def test_a_rank_that_dies_in_a_step_is_named_by_all_others(size):
    result = run_job(size, ["tests/programs/pipeline.py", "killed"])
    assert result.exit_code
    facts = list(facts_in(result.output))
    assert sorted(fact["rank"] for fact in facts) == [rank for rank in range(size) if rank != 1]
    for fact in facts:
        assert fact["error"] == "PeerLostError"
        assert "rank 1" in fact["text"].removeprefix(f"rank {fact['rank']} of {size}")
