"""What calls of tensors and models give before training, at a rank that comes back."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.communicator.coming import coming
from ringreduce.communicator.journal import Replay, begin_training, journal_of, keep_calls
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import MismatchError
from tests.pure.test_results import same

pytestmark = pytest.mark.timeout(120)
X = np.arange(20, dtype=np.float32).reshape(10, 2) / 8
Y = np.arange(10, dtype=np.float32).reshape(10, 1) % 2


def make_model():
    inputs = keras.Input((2,))
    dense = keras.layers.Dense(1, kernel_initializer="ones", name="dense")
    twice = keras.layers.Rescaling(2.0, name="twice")
    model = keras.Model(inputs, (dense(inputs), twice(inputs)))
    model.compile(loss=["mse", None], metrics=[["mae"], []], run_eagerly=True)
    return model


def program(comm, model):
    """What a program may do before `rr.fit`."""
    mean = rr.all_reduce(tf.constant([1.5, comm.rank]), "mean", communicator=comm)
    gathered = rr.all_gather(tf.fill([comm.rank + 1], comm.rank), communicator=comm)
    rr.broadcast_variables(model.variables, communicator=comm)
    rr.verify_replicas(model.variables, communicator=comm)
    return [
        mean.numpy(),
        gathered.numpy(),
        rr.evaluate(model, X, Y, batch_size=4, communicator=comm),
        rr.evaluate(model, X, Y, batch_size=4, communicator=comm, return_dict=True),
        rr.predict(model, X, batch_size=4, communicator=comm),
    ]


def test_they_are_given_again_with_their_bits_and_structures():
    """And nothing is computed for them: not even by a model that fails."""
    models = [make_model() for _ in range(2)]
    broadcast = []

    def work(comm):
        journal = keep_calls(comm)
        results = program(comm, models[comm.rank])
        begin_training(comm)
        return results, journal.encoded()

    (_, encoded), (expected, _) = ring_of_threads(2, work)

    def gives(number, variables):
        broadcast.append((number, [*map(id, variables)]))
        return []

    config = Config(rank=1, size=2, rendezvous="127.0.0.1:9", job_id="a")
    how = {"transport": "shm", "local_rank": 1, "local_size": 2}
    with coming(config, Replay.of(encoded, gives), **how) as comm:
        model = make_model()
        model.evaluate = model.predict = model.predict_on_batch = None
        results = program(comm, model)
        begin_training(comm)
    assert type(expected[-1]) is tuple
    assert all(map(same, results, expected))
    assert broadcast == [(2, [*map(id, model.variables)])]


class Sums(keras.layers.Layer):
    """A collective of each batch, in a graph."""

    def __init__(self, ring):
        super().__init__()
        self.ring = ring

    def call(self, inputs):
        return rr.all_reduce(inputs, communicator=self.ring)


def test_a_collective_in_a_graph_ends_growing_but_within_an_evaluation():
    def work(comm):
        journal = keep_calls(comm)
        model = keras.Sequential([keras.Input((2,)), Sums(comm)])
        model.compile(loss="mse")
        rr.evaluate(model, X[:8], Y[:8], batch_size=4, communicator=comm)
        assert journal.ends_growing is None

        @tf.function
        def reduced(value):
            return rr.all_reduce(value, communicator=comm)

        assert reduced(tf.constant(1.0)) == 2
        return journal_of(comm).ends_growing

    for reason in ring_of_threads(2, work):
        assert reason.startswith(
            "a collective in a tf.function, to reduce a tensor, before training"
        )


def test_at_a_newcomer_a_collective_in_a_graph_is_another_call_than_the_job_s():
    config = Config(rank=1, size=2, rendezvous="127.0.0.1:9", job_id="a")
    how = {"transport": "shm", "local_rank": 1, "local_size": 2}
    with coming(config, Replay([], lambda *_: []), **how) as comm:
        function = tf.function(lambda value: rr.all_reduce(value, communicator=comm))
        with pytest.raises(MismatchError, match=r"called a collective in a tf\.function"):
            function(tf.constant(1.0))
