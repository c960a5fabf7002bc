"""Gradients through the bridge on a ring of threads, eagerly; test_routes has all routes."""

import numpy as np
import pytest
import tensorflow as tf

from ringreduce import ArrayError, MismatchError
from ringreduce.communicator.reforming import reform
from ringreduce.pure.buckets import GradientSpec
from ringreduce.pure.spans import SpanKind
from ringreduce.tensorflow import GradientBridge
from ringreduce.testing import ring_of_threads
from tests.recorded import parts_of


def mean_of(size, gradients_of, bucket_bytes=1 << 20):
    """What the bridge returns on each rank; `gradients_of` makes a rank's gradients."""

    def work(comm):
        gradients = gradients_of(comm.rank)
        paths = [f"variable{i}" for i in range(len(gradients))]
        return GradientBridge(bucket_bytes).mean(comm, gradients, paths)

    return ring_of_threads(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
def test_every_gradient_becomes_the_mean(size, bucket_bytes):
    shapes = [(3, 5), (), (0, 4), (17,), (2, 2, 2), (1000,)]
    generators = map(np.random.default_rng, range(size))
    values = [[g.integers(-8, 8, s).astype("float32") * size for s in shapes] for g in generators]
    for means in mean_of(size, lambda rank: list(map(tf.constant, values[rank])), bucket_bytes):
        for mean, *parts in zip(means, *values, strict=True):
            assert mean.shape == parts[0].shape
            assert (mean.numpy() == sum(parts) / size).all()


def test_gradients_of_a_dtype_that_cannot_travel_are_refused():
    with pytest.raises(ArrayError, match="complex64"):
        mean_of(2, lambda rank: [tf.zeros(3, tf.complex64)])


@pytest.mark.parametrize("size", [2, 3])
def test_other_shapes_are_an_error_on_all_ranks_that_names_both(size):
    def gradients(rank):
        return [tf.zeros(4), tf.zeros((3,) if rank else (2,))]

    with pytest.raises(MismatchError) as caught:
        mean_of(size, gradients)
    assert "variable1: float32 of shape (2,)" in str(caught.value)
    assert "variable1: float32 of shape (3,)" in str(caught.value)
    assert len(getattr(caught.value, "__notes__", [None] * (size - 1))) == size - 1


def test_other_gradients_are_told_apart_by_name_after_the_ring_was_formed_anew():
    def work(comm):
        bridge, steps = GradientBridge(1 << 20), [([tf.zeros(4)], ["a"]), ([tf.zeros(4)], ["b"])]
        for step in steps:
            bridge.mean(comm, *step)
        reform(comm, [])
        with pytest.raises(MismatchError) as caught:
            bridge.mean(comm, *steps[comm.rank])
        return str(caught.value)

    for text in ring_of_threads(2, work):
        assert "other gradients than rank" in text
        assert all(f"{name}: float32 of shape (4,)" in text for name in "ab")


def test_a_training_step_is_recorded_when_the_next_one_begins():
    def work(comm):
        bridge = GradientBridge(1 << 20)
        for _ in range(3):
            bridge.mean(comm, [tf.ones(3)], ["v"])
        return [s for s in parts_of(comm._session.events) if s.kind == SpanKind.TRAINING]

    for first, second in ring_of_threads(2, work):
        assert first.began_s < first.ended_s
        assert second.began_s == first.ended_s


def test_a_large_gradient_stays_where_it_is_in_shared_memory_alone():
    bridge, large = GradientBridge(1 << 20), [tf.zeros(1 << 18)]
    specs = (GradientSpec("large", (1 << 18,), "float32"),)
    plans = [bridge._plan(specs, large, 2, over) for over in ("shm", "zmq", None)]
    assert [plan.buckets[0].in_place for plan in plans] == [True, False, False]
