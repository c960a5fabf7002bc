"""Models with split layers train, are evaluated, saved and loaded as those of one process are."""

import pytest

from tests.facts import facts_in, facts_of
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]


def said(size, case):
    """What each rank said in a case of programs/split.py that usually runs."""
    return [fact for _, fact in sorted(facts_of("split", size)[case].items())]


def said_now(size, case):
    """The same of one that does not."""
    result = run_job(size, ["tests/programs/split.py", case])
    assert result.exit_code == 0, result.errors
    found = [fact for fact in facts_in(result.output) if fact["case"] == case]
    return sorted(found, key=lambda fact: fact["rank"])


@pytest.mark.parametrize("said", [said, in_full(said_now)], ids=["jit", "graph"])
def test_attention_is_drawn_trained_gathered_and_saved_as_the_unsplit_one(said):
    for fact in said(2, "attention"):
        assert fact["found"].pop("loaded") == fact["found"].pop("outputs") == 0.0
        assert max(fact["found"].values()) < 1e-6
        assert [8, 2, 3] in fact["shapes"]  # two of four heads
        assert [8, 1, 2] in fact["shapes"]  # one of two heads of keys


@pytest.mark.parametrize("said", [said, in_full(said_now)], ids=["eager", "graph"])
def test_two_blocks_over_two_pairs_train_as_one_process_does(said):
    for fact in said(4, "deep"):
        assert fact["start"] == 0.0
        assert fact["end"] < 1e-5
        shapes = [[6, 8], [8], *2 * [[8, 6], [6], [6, 8], [8]], [8, 1], [1]]
        assert fact["shapes"] == shapes
        assert len(fact["found"]) == 7
        assert max(fact["found"].values()) < 1e-5


@pytest.mark.parametrize("case", ["global", pytest.param("each", marks=pytest.mark.full)])
def test_what_is_replicated_stays_equal_though_nothing_is_seeded(case):
    facts = said(4, case) if case == "global" else said_now(4, case)
    for steps in zip(*(fact["steps"] for fact in facts), strict=True):
        assert len({of_all for of_all, _ in steps}) == 1
        # With moving averages, frozen weights and states of random generators.
        pairs = [of_pair for _, of_pair in steps]
        assert pairs[0] == pairs[1] != pairs[2] == pairs[3]
    # Heads of other ranks, and rows, get masks of their own; the table is over the data ranks.
    assert len({str(fact["drawn"]) for fact in facts}) == 4
    tables = [fact["table"] for fact in facts]
    assert tables[0] == tables[1] != tables[2] == tables[3]
    for fact in facts:
        if case == "global":
            assert sum(norm**2 for norm in fact["moved"]) ** 0.5 == pytest.approx(0.25, rel=1e-3)
        else:
            # Each at most the rate times the limit, and most have reached it.
            assert max(fact["moved"]) == pytest.approx(0.125, rel=1e-3)
            assert sorted(fact["moved"])[4] == pytest.approx(0.125, rel=1e-3)


def test_an_infinity_in_one_piece_is_skipped_by_all():
    facts = said(4, "infinite")
    for fact in facts:
        assert fact["found"] == [[4.0, 0], [4.0, 1], [2.0, 1]]
        assert fact["norm"] == pytest.approx(1.0, rel=1e-5)
    assert len({fact["shared"] for fact in facts}) == 1


@pytest.mark.parametrize(("size", "count"), [(2, 1), in_full(4, 3)])
def test_it_is_saved_whole_and_goes_on_from_the_file(size, count):
    for fact in said(size, "saved") if size == 2 else said_now(size, "saved"):
        found = fact["found"]
        assert fact["layer"] == "keras.src.layers.core.dense"
        assert found.pop("at save") == found.pop("pointed") == found.pop("pairs") == 0.0
        assert len(found) == count  # loaded into other numbers of pieces
        assert max(found.values()) < 1e-6
        assert "rr.on_rank_zero(lambda: model.save(path))" in fact["outside"]["text"]


@pytest.mark.full
def test_a_job_that_is_started_again_ends_as_one_that_was_not_disturbed():
    for fact in said_now(4, "backed up"):
        assert fact["apart"] == 0.0
        assert fact["steps"] == 4


@pytest.mark.full
def test_all_ranks_do_what_a_callback_of_the_first_decides():
    assert all((fact["epochs"], fact["rate"]) == (1, 0.25) for fact in said_now(4, "stopped"))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("units", "cannot divide dimension 1 of the kernel"),
        ("heads", "cannot divide the 3 heads"),
        ("key heads", "cannot divide the 1 key and value heads"),
        ("scores", "got return_attention_scores"),
        ("softmax", "got activation='softmax'"),
        ("constraint", "got kernel_constraint"),
        ("activity", "got activity_regularizer"),
        ("regularizer", "got the regularizer OrthogonalRegularizer"),
        ("all ranks", "Split both from one"),
        ("lamb", "looks at whole variables"),
        ("jit", "fixes all shapes"),
    ],
)
def test_what_cannot_be_split_is_refused(case, words):
    for fact in said(2, case):
        assert fact["error"] == "ConfigError"
        assert words in fact["text"]


def test_a_layer_that_gets_only_this_ranks_units_is_found_after_a_step():
    for fact in said(2, "half"):
        assert fact["error"] == "MismatchError"
        assert "verify_replicas" in fact["text"]


def test_ranks_of_a_pair_that_read_other_rows_are_told():
    for fact in said(2, "other rows"):
        assert fact["error"] == "MismatchError"
        assert "different arrays" in fact["text"]


@pytest.mark.full
def test_groups_that_do_not_fit_and_shares_that_would_differ_are_refused():
    result = run_job(4, ["tests/programs/split.py", "refused"])
    assert result.exit_code == 0, result.errors
    found = {(fact["case"], fact["rank"]): fact for fact in facts_in(result.output)}
    for rank in range(4):
        assert "same rows" in found["measured", rank]["text"]
        assert "Split both from one" in found["other parent", rank]["text"]
        assert "averages over ranks [0, 1, 2, 3]" in found["all ranks", rank]["text"]
        assert found["other rows", rank]["error"] == "MismatchError"
