"""`rr.callbacks.Profile`: what it puts into logs and prints, alone and on a ring of two processes.

What is said of which numbers is tested in tests/pure/test_profile.py.
"""

import contextlib
import io
import logging
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ringreduce.keras as rr
from ringreduce.keras.callbacks import profile as module
from tests.scope import in_full

pytestmark = pytest.mark.timeout(300)

NAMES = ["rr_bytes", "rr_hidden", "rr_slowest_rank", "rr_step_ms", "rr_waiting_ms"]


class Sleeps(keras.callbacks.Callback):
    """In each epoch the rank given for it sleeps before each execution; rank 0 in validation."""

    def __init__(self, *ranks, seconds=0.04):
        super().__init__()
        self.ranks, self.seconds = ranks, seconds

    def on_epoch_begin(self, epoch, logs=None):
        self.is_slow = rr.rank() == self.ranks[epoch]

    def on_train_batch_begin(self, batch, logs=None):
        if self.is_slow:
            time.sleep(self.seconds)

    def on_test_begin(self, logs=None):
        if rr.rank() == 0:
            time.sleep(1.4)


def numbers(count):
    generator = np.random.default_rng(0)
    return generator.integers(0, 50, (count, 3)), generator.normal(size=(count, 1))


def compiled(strategy=None, **options):
    layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(), strategy=strategy)
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def late(folder):
    """Another rank is slower at first, so that no chance makes rank 1 the slowest there too.

    What writes logs to files sees the numbers too.
    """
    board = keras.callbacks.TensorBoard(folder / "board", write_graph=False)
    log = keras.callbacks.CSVLogger(folder / "log.csv")
    x, y = numbers(96)
    options = {"batch_size": 16, "epochs": 3, "verbose": 0, "validation_data": (x, y)}
    callbacks = [log, board, Sleeps(0, 1, 1, seconds=0.2)]
    history = rr.fit(compiled(), x, y, profile=True, callbacks=callbacks, **options).history
    if rr.rank() == 0:
        head, *_, last = (folder / "log.csv").read_text().splitlines()
        row = dict(zip(head.split(","), last.split(","), strict=True))
        assert {*NAMES} < {*row}
        assert float(row["rr_slowest_rank"]) == 1
        events = EventAccumulator(str(folder / "board" / "train"), {"tensors": 0})
        events.Reload()
        for name in (*NAMES, "loss"):
            values = [tf.make_ndarray(at.tensor_proto) for at in events.Tensors(f"epoch_{name}")]
            assert values == pytest.approx(history[name], rel=1e-6)
    return history


def compiled_by_xla(_):
    data = rr.shard(tf.data.Dataset.from_tensor_slices(numbers(128))).batch(8, drop_remainder=True)
    model = compiled(jit_compile=True, steps_per_execution=3)
    callbacks = [rr.callbacks.Together([Sleeps(0, 0, seconds=0.1)])]
    return model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history


def apart(_):
    """Uneven batches, and ranks that meet every fourth step."""
    slow = Sleeps(1, 1, seconds=0.1)
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "callbacks": [slow]}
    return rr.fit(compiled(rr.LocalSGD(4, overlap=1)), *numbers(177), **options).history


def profiled(train, folder):
    """Return the history, and the lines that are printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return train(folder), printed.getvalue().splitlines()


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("train", "slow", "head", "verdict"),
    [
        # Though rank 0 sleeps longer, in validation.
        in_full(late, [0, 1, 1], "3 epochs: 15 steps of ", "Rank 1 is slow from epoch 2 on"),
        # Of the last five steps the first execution is left out, and one of three sleeps.
        (compiled_by_xla, [0, 0], "2 epochs: 10 steps of ", "Rank 0 is slow"),
        (apart, [1, 1], "2 epochs: 22 steps of ", "Rank 1 is slow: it computes"),
    ],
)
def test_rank_0_says_at_the_end_of_each_training_which_rank_is_slow(
    ranks, tmp_path, train, slow, head, verdict
):
    """Steps are those without the first execution of each epoch."""
    ring = ranks.ring(2, RINGREDUCE_PROFILE="1")
    (history, lines), (other, others) = ring(profiled, train, tmp_path)
    assert [other[name] for name in NAMES] == [history[name] for name in NAMES]
    assert {len(history[name]) for name in NAMES} == {len(history["loss"])}
    for step_ms, waiting_ms in zip(history["rr_step_ms"], history["rr_waiting_ms"], strict=True):
        assert 0 <= waiting_ms <= step_ms
    assert all(0 <= part <= 1 for part in history["rr_hidden"])
    assert all(count > 0 for count in history["rr_bytes"])
    assert history["rr_slowest_rank"] == slow
    # A quarter of what it sleeps for each step, since a busy machine hides some; without: below 1.
    assert min(history["rr_waiting_ms"]) > 10
    assert lines[0].startswith(f"profile of 2 ranks in {head}")
    assert sum(line.startswith("profile of ") for line in lines) == 1
    assert verdict in "\n".join(lines)
    assert max(map(len, lines)) <= 75  # With the launcher's "[0] " 79.
    assert not others


# Alone ------------------------------------------------------------------------------------


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
