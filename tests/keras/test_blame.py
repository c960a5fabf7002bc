"""What training programs are told at their end: whose data failed, and whether ranks were apart."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from ringreduce.keras.checks import warnings as our_warnings
from tests.jobs import run_job
from tests.launching import script
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(200)]

MODEL = """
import keras, numpy as np, tensorflow as tf
import ringreduce.keras as rr
comm = rr.init()
optimizer = keras.optimizers.SGD(0.1)
def fit(data, optimizer=optimizer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(data, verbose=0)
"""
FAILS = """
def rows():
    for row in range(64):
        if comm.rank == 1 and row == 20:
            raise ValueError("row 20 is broken")  # The user's line.
        yield np.ones(3, "float32"), np.ones(1, "float32")
specs = tf.TensorSpec((3,)), tf.TensorSpec((1,))
data = tf.data.Dataset.from_generator(rows, output_signature=specs).batch(4)
fit(data, rr.DistributedOptimizer(optimizer))
"""
APART = "the ranks have exchanged nothing, so each has trained by itself"
ENDS = {
    "trained apart": "fit(tf.data.Dataset.from_tensors((np.ones((4, 3)), np.ones((4, 1)))))",
    "trained nothing": "",
    "sent": "fit(tf.data.Dataset.from_tensors((np.ones((4, 3)), np.ones((4, 1)))))\n"
    "comm.send(np.ones(4), 1) if comm.rank == 0 else comm.recv(np.ones(4), 0)",
}


def test_data_that_fails_on_one_rank_names_that_rank_and_the_users_line(tmp_path):
    """In every rank's log; whose of them `ringreduce run` shows is for its own tests."""
    done = run_job(2, [str(tmp_path / script(tmp_path, MODEL + FAILS))])
    line = '    raise ValueError("row 20 is broken")  # The user\'s line.'
    for rank in range(2):
        assert f"[{rank}] {line}" in done.errors
        assert re.search(rf'\[{rank}\]   File ".*script.py", line \d+, in rows', done.errors)
    assert re.search(r"\[0\].*Read rank 1's log first\.", done.errors)


@pytest.mark.parametrize("end", ["trained apart", in_full("trained nothing"), in_full("sent")])
def test_ranks_that_trained_apart_are_told_so_and_no_others(tmp_path, end):
    done = run_job(2, [str(tmp_path / script(tmp_path, MODEL + ENDS[end]))])
    assert done.exit_code == 0, done.errors
    assert (APART in done.errors) == (end == "trained apart")


def test_the_end_of_a_training_looks_through_no_objects(monkeypatch):
    """That took a quarter of a second at the end of each rank; and where nothing was sent, due."""
    looked: list[str] = []
    monkeypatch.setattr(our_warnings.gc, "get_objects", lambda: looked.append("at all") or [])
    monkeypatch.setattr(our_warnings, "is_initialized", lambda: True)
    for sent, times in ((8, 0), (0, 1)):
        done = SimpleNamespace(collectives=1, bytes_sent=sent, bytes_received=0)
        ring = SimpleNamespace(size=2, rank=0, statistics=lambda done=done: done)
        monkeypatch.setattr(our_warnings, "default_communicator", lambda ring=ring: ring)
        our_warnings.warn_of_ranks_apart()
        assert len(looked) == times
