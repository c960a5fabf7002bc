"""Models with parts train, are evaluated, saved and loaded as those of one process are."""

import pytest

from tests.facts import facts_in, facts_of
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SIZES = [2, in_full(3)]
TRAINED = ["table", "joined", "adagrad", "clipnorm", "global clipnorm"]
# Not on 2 ranks, to save time.
RARE = ["joined", "adagrad", "accumulated", "clipnorm", "experts 33"]


def on_2_and_3(*cases):
    """Each case by number of ranks."""
    usual = [pytest.param(2, case) for case in cases if case not in RARE]
    return usual + [in_full(3, case) for case in cases]


def said(size, case):
    """What each rank said in a case of programs/parts.py."""
    return [fact for _, fact in sorted(facts_of("parts", size)[case].items())]


@pytest.mark.parametrize(("size", "case"), on_2_and_3(*TRAINED))
def test_a_table_in_parts_trains_as_a_whole_one(size, case):
    facts = said(size, case)
    assert all(fact["apart"] < 5e-6 for fact in facts)
    assert all(fact["moved"] for fact in facts)  # the rows that the data uses, and no other
    assert len({fact["shared"] for fact in facts}) == 1
    assert [fact["rows"] for fact in facts] == [-(-(1003 - rank) // size) for rank in range(size)]


@pytest.mark.full
def test_accumulated_steps_are_one_step_on_all_rows():
    assert all(fact["apart"] < 2e-6 for fact in said(3, "accumulated"))


@pytest.mark.parametrize(("size", "case"), on_2_and_3("experts 5", "experts 33"))
def test_experts_learn_from_all_rows_whatever_the_shares(size, case):
    for fact in said(size, case):
        assert fact["expert"] < 1e-6 * max(1.0, fact["moved"])
        assert fact["shared"] < 1e-6 * max(1.0, fact["moved"])
        assert fact["moved"] > 0


@pytest.mark.parametrize("size", SIZES)
def test_a_table_is_the_same_whatever_the_number_of_ranks(size):
    assert all(fact["equal"] for fact in said(size, "drawn"))


def test_an_infinity_in_one_piece_is_one_on_all_ranks():
    # Without the scale, 4 after the first step, 1 + 2 * 2 elements are 8: clipped to a norm of 5.
    once = 8.0 * 5 / (8 * 5**0.5)
    for fact in said(2, "halves"):
        assert fact["found"][0] == [0.0, 0.0, 4.0]
        assert fact["found"][1] == pytest.approx([-once, -once, 4.0])


def test_local_weights_that_other_ranks_use_are_refused_in_uneven_steps():
    for fact in said(2, "local experts"):
        assert fact["error"] == "ConfigError"
        assert "rr.parts.PartLayer.add_part" in fact["text"]


def test_local_weights_are_not_backed_up_for_one_rank_alone_and_not_warned_of():
    for fact in said(2, "local backup"):
        assert fact["error"] == "ConfigError"
        assert "rr.parts.PartLayer.add_part" in fact["text"]
        assert fact["warned"] == 0


@pytest.mark.parametrize("size", SIZES)
def test_local_gradients_may_be_those_of_the_mean(size):
    for rank, fact in enumerate(said(size, "scaled")):
        assert fact["found"] == pytest.approx([-6.0 * (rank + 1), -6.0 * (rank + 1) / size])


# The first eagerly, the second in a graph.
@pytest.mark.parametrize(("name", "value"), [("negative", -1), ("too large", 1003)])
def test_an_id_out_of_range_is_an_error_on_all_ranks(name, value):
    for fact in said(2, name):
        assert fact["error"] == "ArrayError"
        assert f"rank 1 asks for id {value} of table, whose ids are 0 to 1002" in fact["text"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("small", "cannot divide the 1 rows"),
        ("tape", "Use DistributedOptimizer with a plain tape"),
        ("compiled", "jit_compile=False"),
        ("constraint", "got a constraint"),
        ("adafactor", "Adafactor"),
    ],
)
def test_what_cannot_be_had_in_parts_is_refused(case, words):
    for fact in said(2, case):
        assert fact["error"] == "ConfigError"
        assert words in fact["text"]


@pytest.mark.full
def test_a_table_of_another_group_than_the_optimizers_is_refused():
    result = run_job(4, ["tests/programs/parts.py", "refused"], timeout_s=60)
    found = [fact for fact in facts_in(result.output) if fact["case"] == "other group"]
    assert len(found) == 4
    for fact in found:
        assert fact["error"] == "ConfigError"
        assert "Pass the layer and the optimizer one communicator" in fact["text"]


def test_tables_of_unlike_widths_are_looked_up_in_one_exchange():
    first, second = said(2, "looked up")
    ones = [[[4.0] * 2] * 2, [[36.0] * 2, [12.0] * 2]]
    assert first["found"] == [ones, []]
    assert second["found"] == [ones, [[24.0] * 3]]
    # Of 6 times the sum of all elements, the mean over both ranks; rows 0, 2, ... and 1, 3, ...
    assert first["totals"] == [[0.0] * 5, [0.0, 0.0, 0.0, 9.0]]
    assert second["totals"] == [[24.0, 12.0, 0.0, 0.0, 12.0], [0.0] * 3]


@pytest.mark.parametrize("size", SIZES)
def test_vectors_of_several_ids_are_combined(size):
    root = 10**0.5
    for fact in said(size, "combined"):
        assert fact["sum"] == [[3.0, 0.0, 3.0], [7.0, 0.0, 6.0]]
        assert fact["mean"] == [[1.5, 0.0, 3.0], [1.75, 0.0, 3.0]]
        assert fact["sqrtn"][0] == pytest.approx([3 / 2**0.5, 0.0, 3.0])
        assert fact["sqrtn"][1] == pytest.approx([7 / root, 0.0, 3.0])
        assert fact["masked"] == [1.0, 3.0]
        assert fact["warned"] == []


@pytest.mark.parametrize("size", SIZES)
def test_ranks_without_a_batch_answer_in_evaluation(size):
    for fact in said(size, "evaluated"):
        assert max(value for name, value in fact.items() if name not in ("case", "rank")) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_it_is_saved_whole_and_goes_on_from_the_file(size):
    for rank, fact in enumerate(said(size, "saved")):
        assert fact["layer"] == "keras.src.layers.core.embedding"
        assert fact["at_save"] == fact["pointed"] == fact["again"] == 0.0
        assert fact["plain"] < 2e-6
        assert fact["rows"] == -(-(1003 - rank) // size)
        assert "rr.on_rank_zero(lambda: model.save(path))" in fact["outside"]["text"]
        assert fact["in_checkpoint"]["error"] == fact["missing"]["error"] == "ConfigError"


@pytest.mark.parametrize("size", SIZES)
def test_a_job_that_is_started_again_ends_as_one_that_was_not_disturbed(size):
    for fact in said(size, "backed up"):
        assert fact["apart"] == 0.0
        assert fact["steps"] == 4


@pytest.mark.parametrize("kind", [in_full("table"), in_full("experts"), "split"])
def test_a_rank_killed_in_a_step_is_named(kind):
    result = run_job(2, ["tests/programs/lost_part.py", kind])
    [fact] = facts_in(result.output)
    assert fact["error"] == "PeerLostError"
    assert "rank 1" in fact["text"]
