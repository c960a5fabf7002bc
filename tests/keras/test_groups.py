"""Groups train as jobs of their own do, whatever the other groups of the job do."""

import functools

import pytest

from tests.facts import facts_in
from tests.jobs import run_job
from tests.scope import in_full
from tests.tensor_facts import WAYS

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]


@functools.cache
def said(size, *arguments):
    """What each rank said, by case and rank."""
    result = run_job(size, ["tests/programs/groups.py", *arguments])
    assert result.exit_code == 0, result.errors
    return {(fact.pop("case"), fact.pop("rank")): fact for fact in facts_in(result.output)}


def of_four(case, *arguments):
    """What each rank of a job with two groups of two said."""
    return [said(4, *arguments)[case, rank] for rank in range(4)]


@pytest.mark.parametrize(
    ("arguments", "number"), [((), 1), in_full((), 0), *(in_full(("fit",), n) for n in (0, 1))]
)
def test_a_group_trains_as_a_job_of_its_own(arguments, number):
    alone = said(2, str(number), *arguments)
    assert len(alone) == (10 if arguments else 4)
    for (case, rank), fact in alone.items():
        assert of_four(case, *arguments)[2 * number + rank] == fact, case


@pytest.mark.parametrize("case", ["loop", in_full("fit"), in_full("join"), in_full("loaded")])
def test_groups_train_apart(case):
    weights = [fact["weights"] for fact in of_four(case, *(["fit"] * (case != "loop")))]
    assert weights[0] == weights[1] != weights[2] == weights[3]


def test_a_layer_of_a_model_may_communicate():
    for fact in of_four("calls"):
        assert fact["layer"] == [[[0.0] * 3, [1.0] * 3], [None, 3]]


@pytest.mark.parametrize("how", WAYS)
def test_collectives_of_the_job_and_of_a_group_take_turns(how):
    # Each value is v = (1, 2); the job's sum is 10 v, and rank r adds r v and exchanges halves
    # with its partner: s is what the four elements' squares and the sum give, by each v.
    for rank, fact in enumerate(of_four("mixed")):
        whole, parts, gradient = fact[how]
        assert whole == [10.0, 20.0]
        own, first = rank % 2, 2 * (rank // 2)
        assert parts == [(10.0 + each) * (own + 1) for each in (first, first + 1)]
        assert gradient == expected_gradient(rank)


def expected_gradient(rank):
    """By this rank's v: of the sum over all ranks of both terms of the loss."""

    def by_sum(element):
        # Of rank r, which exchanges 10 v + r v: twice what it gives to its pair's sum, of which
        # both members have one; and the job's sum itself, once on each rank.
        return [4.0 * (10 + r) * (element + 1) + 1 for r in range(4)]

    return [
        (rank + 1) * sum(by_sum(element)) + rank * 4.0 * (10 + rank) * (element + 1)
        for element in range(2)
    ]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("other optimizer", "DistributedOptimizer"),
        ("other layer", "SyncBatchNormalization"),
    ],
)
def test_what_averages_over_all_is_refused_where_a_group_trains(case, name):
    for rank, fact in enumerate(of_four(case)):
        assert fact["error"] == "ConfigError"
        assert f"rank {rank} of 4" in fact["text"]
        assert f"{name}(..., communicator=" in fact["text"]


def test_errors_of_a_group_name_the_ranks_of_the_job():
    for rank, fact in enumerate(of_four("root")):
        assert fact["text"].startswith(f"rank {rank} of 4 got root 3")
    for rank, fact in enumerate(of_four("rows")):
        first = 2 * (rank // 2)
        assert fact["error"] == "MismatchError"
        expected = f"different data: rows is 4 on rank {first} and 5 on rank {first + 1}"
        # One of a group may receive the other's error first.
        assert fact["text"].startswith(f"rank {rank} of 4")
        assert expected in fact["text"]


@pytest.mark.parametrize("how", WAYS)
def test_gradients_of_tensors_between_two_ranks_go_back_to_the_sender(how):
    # With v = (1, 2): 6 v and 7 v are sent; the receiver's loss is the sum of (6 v)^2 v + 3 (7 v).
    sender = [3.0, [1.0 + 2 * 6 * v * v * 6 + 3 * 7 for v in (1, 2)]]
    receiver = [36.0 * (1 + 8) + 21.0 * 3, [36.0 * v * v for v in (1, 2)]]
    for rank, fact in enumerate(of_four("stages")):
        assert fact[how] == [receiver if rank % 2 else sender] * 2


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("no rank to send to", "ArrayError", "got rank 2 to send to or receive from in a group"),
        ("unknown shape", "ArrayError", "of shape (None, 2)"),
        ("second", "ConfigError", "a gradient of a gradient of send or recv"),
    ],
)
def test_what_cannot_be_sent_or_received_is_refused(case, error, text):
    # The sender asks for second derivatives of what it sent.
    for fact in of_four(case)[:: 2 if case == "second" else 1]:
        assert fact["error"] == error
        assert text in fact["text"]


def test_other_process_sets_on_some_ranks_are_a_mismatch():
    for fact in of_four("other sets"):
        assert fact["error"] == "MismatchError"
        assert "process sets: ranks is [0] on rank 0 and [1] on rank 1" in fact["text"]


def test_process_sets_do_what_horovods_do():
    for rank, fact in enumerate(of_four("process sets")):
        first, last = rank % 2, rank % 2 + 2
        total, own = float(first + last), rank // 2
        assert fact == {
            "mean": [[total / 2] * 2],
            "several": [[[total] * 2]] * 2,
            "gathered": [[float(first)] * 2] * 3 + [[float(last)] * 2] * 3,
            "by_gathered": [[1.0] * 2] * 3,
            "exchanged": [
                [[float(first)] * 2] * (own + 1) + [[float(last)] * 2] * (own + 1),
                [own + 1] * 2,
            ],
            "equal": [[float(first)] * 2, [float(last)] * 2],
            "sent": [[float(last)] * 2],
            "part": [[total] * 2],
            "objects": [first, last],
            "object": last,
            "variable": float(last),
            # The set's first rank has its value.
            "optimized": [first - 1.0],
            # Its variable too; the other's gradient is left out of the first step.
            "by_source": [(first + 1) * 4.0 * first],
            "normalized": [total / 2] * 2,
            "own": [own, 2, [first, last], True, False],
            "counted": [[2, 2, 4], [1, 0, 1]],
            "ids": [first + 1, 2 - first, 0],
        }


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("not added", "ProcessSet([1, 3]) has not been added, or was removed"),
        ("outside", "in which it is not"),
        ("outside optimizer", "in which it is not"),
        ("other root", "which is not in ProcessSet("),
        ("no rank", "cannot add ProcessSet([3, 4]): ranks are 0 to 3"),
        ("removed", "has not been added, or was removed"),
    ],
)
def test_mistakes_with_process_sets_are_named(case, text):
    for rank, fact in enumerate(of_four(case)):
        assert fact["error"] == "ConfigError"
        assert fact["text"].startswith(f"rank {rank} of 4")
        assert text in fact["text"]
    assert all(fact["removed"] == [False, True, False] for fact in of_four("removed"))
