"""Jobs on a real Ray cluster of two nodes: `ringreduce.ray`, as its users call it."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.on_ray import output_of

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.full,
    pytest.mark.timeout(450),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

PROGRAM = Path(__file__).parents[1] / "programs" / "ray_jobs.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_digits.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """By case, what the program has said."""
    folder = tmp_path_factory.mktemp("ray")
    lines = output_of(folder, PROGRAM, str(folder)).splitlines()
    facts = [json.loads(line) for line in lines if line.startswith("{")]
    return {fact.pop("case"): fact for fact in facts}


def test_a_function_runs_on_every_rank_and_node_and_again(said):
    # Three ranks on nodes of two CPUs: two share a host.
    places = [place for place, _ in said["run"]["first"]]
    assert sorted(places) in ([[0, 0, 2], [1, 1, 2], [2, 0, 1]], [[0, 0, 1], [1, 0, 2], [2, 1, 2]])
    assert [sums for _, sums in said["run"]["first"]] == [[33.0] * 3] * 3
    assert [sums for _, sums in said["run"]["second"]] == [[63.0] * 3] * 3


def test_each_job_has_a_secret_of_its_own_that_no_log_shows(said):
    assert said["run"]["secrets"] == [1, 1]
    assert said["run"]["same"] is False
    assert said["logs"]["files"] > 10
    assert said["logs"]["secrets"] == 0


@pytest.mark.parametrize(
    ("case", "kind", "peer", "text"),
    [
        ("raised", "WorkerError", 1, "rank 1 of 2 failed first (ValueError: no such luck); all "),
        ("died", "WorkerError", 1, "rank 1 of 2 failed first (its process ended); all workers "),
        ("too many", "ConfigError", None, "with 4 CPU, has had no room for 9 workers with {'CPU'"),
        ("unknown", "ConfigError", None, "unknown setting colour"),
    ],
)
def test_run_names_the_rank_that_failed_first_and_what_cannot_be(said, case, kind, peer, text):
    error = said[case]
    assert (error["kind"], error["peer"]) == (kind, peer)
    assert text in error["text"]


def test_a_training_function_that_raises_ends_the_others_and_is_quoted(said):
    failures = said["failed"]["failures"]
    assert "no such luck" in failures["1"]
    # Ray may look before rank 0 has failed too.
    assert set(failures) <= {"0", "1"}


def test_ray_trains_over_both_nodes(said):
    for rank, fact in enumerate(said["undisturbed"]["ranks"]):
        assert (fact["ranks"], fact["sizes"], fact["locals"]) == ([rank, rank], [2, 2], [0, 1])
        assert (fact["timeout_s"], fact["epochs"]) == (25.0, [0, 1, 2, 3])
    assert said["undisturbed"]["metrics"] == ["loss"]
    assert "model.keras" in said["undisturbed"]["files"]


def test_a_killed_worker_changes_nothing_in_the_end(said):
    expected = {fact["digest"] for fact in said["undisturbed"]["ranks"]}
    one, other = said["killed"]["ranks"]
    assert {one["digest"], other["digest"]} == expected
    assert len(expected) == 1
    # Two epochs were whole; Ray may not have seen the second one's checkpoint yet.
    assert one["epochs"] == other["epochs"]
    assert one["epochs"] in ([2, 3], [1, 2, 3])
    assert [(fact["restart"], fact["continued"]) for fact in (one, other)] == [(1, True)] * 2


def test_shards_of_ray_data_of_different_lengths_are_all_used(said):
    ranks = said["undisturbed"]["ranks"]
    assert [fact["read"] for fact in ranks] == [4, 16]
    assert [fact["loss"] for fact in ranks] == [[4.0], [4.0]]
    assert [fact["steps"] for fact in ranks] in ([4, 4], [5, 5])


def test_the_example_ends_with_equal_weights(tmp_path):
    output = output_of(tmp_path, EXAMPLE, "--epochs", "2", "--storage", str(tmp_path))
    text = output[output.index("{\n") : output.index("\n}") + 2]
    result = json.loads(text)
    assert result["workers"] == 2
    assert result["accuracy"] > 0.5
    assert len(set(result["weights_sha256"])) == 1
    (checkpoint,) = [line for line in output.splitlines() if line.startswith("checkpoint: ")]
    assert (Path(checkpoint.partition(": ")[2]) / "model.keras").is_file()
