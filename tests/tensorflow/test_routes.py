"""Gradients through the native ops, on real rings: the same bits as through Python."""

import gc
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from ringreduce import RingReduceError
from ringreduce.communicator.process import default_communicator
from ringreduce.effects import native
from ringreduce.tensorflow import GradientBridge, bridge, ops
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(native.library() is None, reason="needs the native library"),
]
REWRITES_GRAPHS = True
NO_OPS = types.SimpleNamespace(are_available=lambda: False)
SHAPES = [(0,), (), (1,), (7, 3), (1009,), (64, 64), (2, 0, 3), (100_003,)]


def through_graph(gradients, is_native):
    """Means of `gradients` by a fresh bridge, in a function, twice: memory is used again."""
    reducer = GradientBridge(1024)
    paths = [f"variable {number}" for number in range(len(gradients))]
    step = tf.function(lambda *parts: reducer.mean(default_communicator(), list(parts), paths))
    with mock.patch.object(bridge, "ops", ops if is_native else NO_OPS):
        first, again = step(*gradients), step(*gradients)
    assert all(bool(tf.reduce_all(a == b)) for a, b in zip(first, again, strict=True))
    operations = step.get_concrete_function(*gradients).graph.get_operations()
    assert any(op.type == "RingreduceWait" for op in operations) is is_native
    return [part.numpy() for part in first]


def compare_both_bridges():
    rank, size = default_communicator().rank, default_communicator().size
    for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16):
        whole = [
            [tf.cast(tf.reshape(tf.range(int(np.prod(s))) % 7 + 3 * r, s), dtype) for s in SHAPES]
            for r in range(size)
        ]
        means = through_graph(whole[rank], is_native=True)
        for mean, *parts in zip(means, *whole, strict=True):
            total = sum(parts[1:], parts[0])
            due = (tf.cast(total, tf.float64) / size).numpy().astype(dtype.as_numpy_dtype)
            assert (mean.dtype, mean.shape) == (due.dtype, due.shape)
            assert np.array_equal(mean, due), dtype
        tf.random.set_seed(rank)
        noise = [tf.cast(tf.random.normal(shape), dtype) for shape in SHAPES]
        one, other = through_graph(noise, is_native=True), through_graph(noise, is_native=False)
        assert [a.tobytes() for a in one] == [b.tobytes() for b in other], dtype


@pytest.mark.parametrize(
    ("size", "transport"), [(2, "shm"), (2, "zmq"), in_full(3, "shm"), in_full(3, "zmq")]
)
def test_means_of_every_dtype_are_exact_and_alike_through_both_bridges(ranks, size, transport):
    ranks.ring(size, RINGREDUCE_TRANSPORT=transport)(compare_both_bridges)


@on_ranks(2)
def test_gradients_of_several_dtypes_and_none_travel_in_one_step():
    comm, reducer = default_communicator(), GradientBridge(1 << 20)

    @tf.function
    def step(x):
        parts = [x, None, tf.cast(x, tf.float16), tf.cast(x, tf.float64)]
        return [m for m in reducer.mean(comm, parts, ["a", "b", "c", "d"]) if m is not None]

    for number in range(3):
        means = step(tf.ones(5) * (comm.rank + number))
        assert [m.dtype for m in means] == [tf.float32, tf.float16, tf.float64]
        assert all(bool(tf.reduce_all(m == 0.5 + number)) for m in means)
    assert comm.statistics().reducing_s > 0


@on_ranks(2)
def test_a_graph_whose_optimizer_has_gone_says_so():
    comm, reducer = default_communicator(), GradientBridge(1 << 20)
    gc.collect()
    plans = comm._session.engine._plans
    others = len(plans)
    step = tf.function(lambda x: reducer.mean(comm, [x], ["a"]))
    concrete = step.get_concrete_function(tf.TensorSpec([3], tf.float32))
    concrete(tf.ones(3))
    assert len(plans) == others + 1
    reducer._routes.clear()
    gc.collect()
    assert len(plans) == others
    text = "the plan was given up with the optimizer it was made for"
    with pytest.raises((RingReduceError, tf.errors.OpError), match=text):
        concrete(tf.ones(3))
