"""`rr.callbacks.Profile`: what it puts into logs and prints, alone and on a ring of two processes.

What is said of which numbers is tested in tests/pure/test_profile.py.
"""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ringreduce
import ringreduce.keras as rr
from ringreduce.keras.callbacks import profile as module
from tests.facts import facts_in
from tests.jobs import run_job

pytestmark = pytest.mark.timeout(300)

NAMES = ["rr_bytes", "rr_hidden", "rr_slowest_rank", "rr_step_ms", "rr_waiting_ms"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture(scope="module")
def job(folder):
    arguments = ["tests/programs/profiled.py", str(folder)]
    result = run_job(2, arguments, environment={"RINGREDUCE_PROFILE": "1"})
    assert result.exit_code == 0, result.errors
    return result


@pytest.fixture(scope="module")
def histories(job):
    """By case, what each rank's History has."""
    found = {}
    for fact in facts_in(job.output):
        found.setdefault(fact["case"], {})[fact["rank"]] = fact.get("history")
    return found


@pytest.mark.tensorflow
@pytest.mark.parametrize("case", ["late", "jit", "alone"])
def test_logs_are_equal_on_all_ranks_and_add_up(histories, case):
    first, second = (histories[case][rank] for rank in range(2))
    assert {name: first[name] for name in NAMES} == {name: second[name] for name in NAMES}
    for name in NAMES:
        assert len(first[name]) == len(first["loss"])
    for step_ms, waiting_ms in zip(first["rr_step_ms"], first["rr_waiting_ms"], strict=True):
        assert 0 <= waiting_ms <= step_ms
    assert all(0 <= part <= 1 for part in first["rr_hidden"])
    assert all(count > 0 for count in first["rr_bytes"])


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        # Though rank 0 sleeps longer, in validation.
        ("late", [0, 1, 1]),
        # Of the last five steps the first execution is left out, and one of three sleeps.
        ("jit", [0, 0]),
        ("alone", [1, 1]),
    ],
)
def test_the_slow_rank_is_that_of_each_epoch(histories, case, ranks):
    history = histories[case][0]
    assert history["rr_slowest_rank"] == ranks
    # A quarter of what it sleeps for each step, since a busy machine hides some; without: below 1.
    assert min(history["rr_waiting_ms"]) > 10


@pytest.mark.tensorflow
def test_writers_see_them(job):
    [fact] = [fact for fact in facts_in(job.output) if fact["case"] == "csv"]
    row = dict(zip(fact["names"], fact["values"], strict=True))
    assert set(NAMES) < set(row)
    assert float(row["rr_slowest_rank"]) == 1


@pytest.mark.tensorflow
def test_tensorboard_shows_them(job, folder, histories):
    events = EventAccumulator(str(folder / "board" / "train"), {"tensors": 0})
    events.Reload()
    assert {f"epoch_{name}" for name in (*NAMES, "loss")} <= {*events.Tags()["tensors"]}
    for name in NAMES:
        values = [tf.make_ndarray(each.tensor_proto) for each in events.Tensors(f"epoch_{name}")]
        assert values == pytest.approx(histories["late"][0][name], rel=1e-6)


@pytest.mark.tensorflow
def test_rank_0_says_at_the_end_of_each_training_which_rank_is_slow(job):
    lines = [line for line in job.output.splitlines() if line.partition("] ")[2][:1] != "{"]
    assert all(line.startswith("[0] ") for line in lines)
    heads = [line for line in lines if line.startswith("[0] profile of ")]
    counts = [head.partition(": ")[2].partition(" of")[0] for head in heads]
    assert [head.partition(":")[0] for head in heads] == [
        "[0] profile of 2 ranks in 3 epochs",
        *["[0] profile of 2 ranks in 2 epochs"] * 2,
    ]
    # Without the first execution of each epoch.
    assert counts == ["15 steps", "10 steps", "22 steps"]
    text = "\n".join(lines)
    assert "Rank 1 is slow from epoch 2 on" in text
    assert "Rank 0 is slow: it computes" in text
    assert "Rank 1 is slow: it computes" in text
    assert max(map(len, lines)) <= 79


# Alone ------------------------------------------------------------------------------------


@pytest.fixture
def world_of_one():
    """A default communicator of one rank."""
    with ringreduce.init() as communicator:
        yield communicator
    ringreduce.shutdown()


def trained(batch_size, *callbacks, rows=8):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    data = np.ones((rows, 1)), np.ones((rows, 1))
    options = {"batch_size": batch_size, "epochs": 3, "verbose": 0, "callbacks": list(callbacks)}
    return model.fit(*data, **options).history


def test_alone_it_works_and_says_so(world_of_one, capsys):
    seen = []
    looks = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(dict(logs)))
    # In the order given it would come too late.
    history = trained(4, rr.callbacks.Together([looks, rr.callbacks.Profile()]))
    assert sorted(history) == ["loss", *NAMES]
    assert [logs["rr_step_ms"] for logs in seen] == history["rr_step_ms"]
    assert history["rr_hidden"] == [1.0] * 3
    assert history["rr_waiting_ms"] == [0.0] * 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("profile of 1 rank in 3 epochs: 3 steps of ")
    assert lines[1] == "  no other rank to wait for"


def test_an_epoch_of_one_step_that_compiles_is_left_out_of_the_verdict(world_of_one, capsys):
    history = trained(8, rr.callbacks.Profile())
    assert len(history["rr_step_ms"]) == 3
    assert capsys.readouterr().out.startswith("profile of 1 rank in 2 epochs: 2 steps of ")


def test_the_variable_adds_one_where_there_is_none(world_of_one, capsys, monkeypatch):
    monkeypatch.setenv("RINGREDUCE_PROFILE", "1")
    trained(4, rr.callbacks.Together([]))
    trained(4, rr.callbacks.Together([rr.callbacks.Profile()]))
    assert capsys.readouterr().out.count("profile of 1 rank") == 2
    monkeypatch.setenv("RINGREDUCE_PROFILE", "0")
    trained(4, rr.callbacks.Together([]))
    assert capsys.readouterr().out == ""


def test_a_program_that_measures_nothing_is_told(world_of_one, caplog, monkeypatch):
    monkeypatch.setenv("RINGREDUCE_PROFILE", "1")
    monkeypatch.setattr(module, "_has_measured", False)
    with caplog.at_level(logging.WARNING, "ringreduce"):
        module.warn_of_no_profile()
        assert "--profile has measured nothing" in caplog.text
        caplog.clear()
        trained(8, rr.callbacks.Together([]))
        module.warn_of_no_profile()
        assert not caplog.text
