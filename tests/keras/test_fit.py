"""`rr.fit` on data of every form: what it trains to, on how many ranks, and what it refuses."""

import pytest

from tests.facts import facts_of

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

EXACT = ["arrays", "split", "shares", "shares jit", "eager"]
SAME = {"samples": "arrays", "several steps": "arrays"}
# Not on 2 ranks, to save time.
RARE = [
    *("several steps", "jit", "eager", "shuffled py dataset"),
    *("own step", "own step and callback", "own eager step", "shares jit"),
]
OWN = ["own step", "own step and callback", "own eager step", "own loss"]
SHUFFLED = ["shuffled arrays", "shuffled py dataset"]


def on_2_and_3_ranks(*cases):
    """Each case on 2 ranks and, in the full suite, on 3; tests/keras/test_loop.py has one."""
    return [pytest.param(2, case, id=f"2-{case}") for case in cases if case not in RARE] + [
        pytest.param(3, case, id=f"3-{case}", marks=pytest.mark.full) for case in cases
    ]


def facts_of_all(size, case):
    """What each rank said in a case of programs/fit.py."""
    return [fact for _, fact in sorted(facts_of("fit", size)[case].items())]


@pytest.mark.parametrize(
    ("size", "case"), on_2_and_3_ranks(*dict.fromkeys([*EXACT, *SAME, *SHUFFLED, *OWN, "jit"]))
)
def test_ranks_end_bit_identical_with_one_history(size, case):
    first, *others = facts_of_all(size, case)
    assert all(fact["digest"] == first["digest"] for fact in others)
    assert all(fact["history"] == first["history"] for fact in others)


@pytest.mark.parametrize(("size", "case"), on_2_and_3_ranks(*EXACT))
def test_it_trains_as_one_process_does(size, case):
    fact = facts_of_all(size, case)[0]
    assert fact["difference"] < 2e-6
    assert fact["moved"] > 0.1
    assert fact["history"].keys() == fact["expected"].keys()
    for name, values in fact["expected"].items():
        assert fact["history"][name] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize(("size", "case"), on_2_and_3_ranks(*SAME))
def test_single_samples_and_several_steps_give_the_same_bits(size, case):
    fact, expected = (facts_of_all(size, one)[0] for one in (case, SAME[case]))
    assert fact["digest"] == expected["digest"]
    for name, values in fact["history"].items():
        assert values == pytest.approx(expected["history"][name], rel=1e-5)


@pytest.mark.parametrize(("size", "case"), on_2_and_3_ranks(*OWN))
def test_what_a_user_has_written_runs_in_training_alone(size, case):
    assert facts_of_all(size, case)[0]["difference"] < 2e-6
    for fact in facts_of_all(size, case):
        assert all(type(value) is float for value in fact["seen"])
        # A model that is built by a step with made-up data sees more.
        assert len(fact["seen"]) == (0 if case.startswith("own step") else 2 * 3)


@pytest.mark.parametrize(("size", "case"), on_2_and_3_ranks(*SHUFFLED))
def test_shuffling_is_that_of_one_process_and_follows_from_the_seed(size, case):
    fact = facts_of_all(size, case)[0]
    assert fact["difference"] < 2e-6
    assert fact["other"] > 1e-3


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_unequal_shares_train_exactly_as_one_process_does(size):
    for fact in facts_of_all(size, "exact shares"):
        assert fact["weights"] == fact["expected"]


def test_a_slow_rank_gets_less_of_each_batch_once_that_is_measured():
    first, slow = facts_of_all(2, "measured")
    assert [sum(rows) for rows in zip(first["lengths"], slow["lengths"], strict=True)] == [16] * 20
    assert first["lengths"][:10] == [8] * 10
    assert first["lengths"][-1] > 8
    [line] = first["lines"]
    fast, less = first["lengths"][-1], slow["lengths"][-1]
    assert line == f"batch shares measured over 8 steps: rank 0 {fast}, rank 1 {less} of 16"
    assert slow["lines"] == []
    assert first["difference"] < 2e-6


def test_a_file_that_all_ranks_save_is_whole_and_ranks_other_than_0_are_told():
    for rank, fact in enumerate(facts_of_all(2, "saved")):
        assert fact["broken"] == 0
        assert fact["files"] == ["model.keras"]
        assert len(fact["warnings"]) == min(rank, 1)
        assert all("rr.on_rank_zero(lambda: model.save(...))" in w for w in fact["warnings"])


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("parity", ["norm: each rank normalizes", "drop: each rank draws"]),
        ("apart", ["/frozen/kernel, ", "adapted/mean, what table saves, ", "goes on with its own"]),
        ("apart", ["rr.broadcast_variables(model.variables)", "Normalization.adapt"]),
        ("whole data", ["nothing has divided the data", "rr.fit(model, ...)", "rr.shard(data)"]),
    ],
)
def test_what_is_likely_a_mistake_gets_one_warning_at_the_users_line(case, texts):
    [warning] = facts_of_all(2, case)[0]["warnings"]
    assert all(text in warning for text in texts)
    assert facts_of_all(2, case)[0]["file"][0].endswith("programs/fit.py")
    assert not facts_of_all(2, case)[1]["warnings"]


def test_ranks_that_train_on_the_same_rows_are_told_so():
    for case in ("same rows", "rows of a cache"):
        [text] = facts_of_all(2, case)[0]["texts"]
        assert "ranks 0, 1 have trained on the same rows" in text
        assert '.cache(f"name-{rr.rank()}")' in text
        assert not facts_of_all(2, case)[1]["texts"]
    assert not facts_of_all(2, "own rows")[0]["texts"]
    assert not facts_of_all(2, "no numbers")[0]["texts"]


def test_nothing_is_said_where_nothing_is_wrong_or_again():
    assert "sync_batch" not in facts_of_all(2, "parity")[0]["warnings"][0]
    assert not facts_of_all(2, "once")[0]["warnings"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("numbers", "cannot share out list among ranks. Pass arrays"),
        ("no arrays", "got a batch that begins with array(1.). Yield arrays."),
        ("split of a dataset", "cannot take a validation_split of _BatchDataset"),
        ("split of everything", "cannot split 93 samples"),
        ("small batch", "global batch of 1 samples, fewer than"),
        ("small batches", "global batch of 1 samples, fewer than"),
        ("single samples", "dataset of single samples"),
        ("endless", "endless tf.data.Dataset"),
        ("other rows", "arrays of [92, 93] rows"),
        ("two weights", "class_weight and sample_weight"),
        ("targets beside", "got y or sample_weight beside"),
        ("plain", "DistributedOptimizer(keras.optimizers.SGD(...))"),
        ("shares of own data", "got batch_share with sharded=True. Pass a tf.data.Dataset"),
        ("not compiled", "no compiled model"),
        ("pipeline", "Call its own fit: pipeline.fit(...)."),
    ],
)
def test_what_cannot_be_divided_is_refused_on_all_ranks(case, text):
    for fact in facts_of_all(2, case):
        assert fact["error"] == "ConfigError"
        assert text in fact["text"]


def test_an_error_in_the_users_data_is_raised_as_it_was():
    for fact in facts_of_all(2, "broken"):
        assert fact["text"] == "'no such file'"


def test_different_arrays_end_the_job():
    for fact in facts_of_all(2, "different"):
        assert fact["error"] == "MismatchError"
        assert "rank 1 has other values than rank 0" in fact["text"]
