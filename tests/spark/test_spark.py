"""Jobs on a real Spark cluster of two executors: `ringreduce.spark`, as its users call it."""

import importlib
import json
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import ringreduce
from tests.processes import Process, clean_environment

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.full,
    pytest.mark.timeout(700),
    pytest.mark.skipif(find_spec("pyspark") is None, reason="Spark is not installed"),
    pytest.mark.skipif(
        shutil.which("java") is None and "JAVA_HOME" not in os.environ, reason="there is no Java"
    ),
]

PROGRAM = Path(__file__).parents[1] / "programs" / "spark_jobs.py"
# A third of it on an idle machine of two cores.
LIMIT_S = 600.0


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """By case, what the program has said; and its lines of text, and what is left of it."""
    folder = tmp_path_factory.mktemp("spark")
    # Spark's files, and its processes, whose working directories lie in it.
    own = tempfile.mkdtemp(prefix="rr-")
    environment = clean_environment(
        SPARK_LOCAL_IP="127.0.0.1",
        SPARK_LOCAL_DIRS=own,
        SPARK_WORKER_DIR=own,
        PYSPARK_PYTHON=sys.executable,
        PYTHONWARNINGS="ignore",  # pyspark's about pandas
    )
    try:
        command = [sys.executable, str(PROGRAM), str(folder)]
        with Process(command, folder, environment=environment) as process:
            tree = psutil.Process(process.pid)
            try:
                code = process.wait(LIMIT_S)
            finally:
                left = children_of(tree)
                for each in left:
                    each.kill()
            assert code == 0, process.stdout + process.stderr
            lines = process.stdout.splitlines()
            facts = [json.loads(line) for line in lines if line.startswith("{")]
            found: dict[str, dict] = {}
            for fact in facts:
                found.setdefault(fact.pop("case"), {}).update(fact)
            return {**found, "output": process.stdout, "errors": process.stderr, "left": left}
    finally:
        shutil.rmtree(own, ignore_errors=True)


def children_of(process):
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def test_a_function_runs_on_every_rank_and_the_cluster_is_used_again(said):
    ranks = [(place, sums) for place, sums, *_ in said["run"]["results"]]
    assert ranks == [([rank, 2, 2, "shm", "yes"], [3.0] * 3) for rank in range(2)]
    # The variable of the environment was the first job's.
    assert said["again"]["results"][0][0] == [0, 1, 1, "none", None]
    assert said["after"]["results"][1][0] == [1, 2, 2, "shm", None]
    for case, timeout_s in (("run", 25.0), ("again", 33.0), ("after", 25.0)):
        assert [facts for *_, facts in map(tuple, said[case]["results"])] == [timeout_s] * (
            1 if case == "again" else 2
        )
        assert all(has_secret for *_, has_secret, _ in said[case]["results"])


def test_lines_of_rank_0_appear_at_the_driver_and_no_others(said):
    assert said["output"].count("[0] 0 writes") == 3
    assert said["errors"].count("[0] 0 complains") == 3
    assert "1 writes" not in said["output"]
    assert "1 complains" not in said["errors"]


def test_it_trains_to_what_ringreduce_run_trains_to(said):
    assert said["trained"] == said["launched"]


def test_a_killed_rank_changes_nothing_in_the_end(said):
    """Its job is started again, and goes on after the last whole epoch."""
    for begun, undisturbed in zip(
        said["backup"]["results"], said["trained"]["results"], strict=True
    ):
        assert begun[:2] == undisturbed[:2]
        assert begun[2] == 1
    assert [restart for _, restart in said["once"]["results"]] == [1, 1]
    assert "starting all again (1 of 2)" in said["errors"]


@pytest.mark.parametrize(
    ("case", "kind", "peer", "text"),
    [
        ("raise", "WorkerError", 1, "rank 1 of 2 failed first (ValueError: no such luck); all "),
        ("exit", "WorkerError", 1, "rank 1 of 2 failed first (SystemExit: 3 in spark_jobs.py:"),
        ("result", "WorkerError", 1, "cannot pickle '_thread.lock' object); all workers were sto"),
        ("early", "WorkerError", 1, "rank 1 of 2 failed first (KeyError: 'too early'); all work"),
        ("kill", "WorkerError", 1, " was lost: Python worker exited unexpectedly (crashed)); all"),
        ("executor", "WorkerError", 1, " was lost: ExecutorLostFailure (executor "),
        ("room", "ConfigError", None, "had no room for 5 tasks at once for 3 s; Spark computes 2 "),
        ("unknown", "ConfigError", None, "unknown setting colour"),
        ("no dataframe", "ConfigError", None, "dataframe is a list of builtins; accepted: a Data"),
    ],
)
def test_what_fails_first_is_named_and_what_cannot_be(said, case, kind, peer, text):
    error = said[case]
    assert (error["kind"], error["peer"]) == (kind, peer)
    assert text in error["text"]
    assert "\tat " not in error["text"]  # Java's frames


def test_a_rank_that_fails_before_the_ring_is_there_ends_those_that_wait_for_it(said):
    assert said["early"]["took"] < 100  # of 300 that they would wait


def test_a_traceback_begins_in_the_user_s_function(said):
    lines = said["raise"]["text"].splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert "spark_jobs.py" in lines[2]
    assert lines[-1] == "ValueError: no such luck"


def test_each_rank_has_the_rows_of_a_partition(said):
    ranks = said["shard"]["results"]
    assert sorted(label for _, labels, _ in ranks for label in labels) == [
        float(i) for i in range(9)
    ]
    for kinds, labels, _ in ranks:
        rows = len(labels)
        assert kinds == [["float64", [rows, 3]], ["float64", [rows]], ["object", [rows]]]
    assert len({digest for *_, (digest, *_) in ranks}) == 1
    assert [(same, size) for *_, (_, same, size) in ranks] == [(True, 2)] * 2


def test_a_rank_without_rows_trains_along(said):
    ranks = said["few"]["results"]
    assert sorted(len(labels) for _, labels, _ in ranks) == [0, 1]
    assert len({digest for *_, (digest, *_) in ranks}) == 1


def test_columns_that_are_no_arrays_are_refused_by_name(said):
    [[texts, lists]] = said["refusals"]["results"]
    assert [text.split(".")[0] for text in texts] == [
        "the lists of column 'ragged' have 1 to 2 numbers",
        "1 of 2 values of column 'holes' are missing",
        "the DataFrame has no column 'absent'",
    ]
    assert lists[0] == "object"


def test_no_process_is_left(said):
    assert said["left"] == []


@pytest.mark.parametrize("args", [4, "ab"])
def test_a_number_of_ranks_among_the_arguments_is_refused_before_spark_starts(args):
    spark = importlib.import_module("ringreduce.spark")
    with pytest.raises(ringreduce.ConfigError, match=r"num_proc: run\(function, num_proc=4\)"):
        spark.run(print, args)
