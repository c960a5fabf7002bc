"""How batches are read: eagerly as TensorFlow's iterators give them, and with which threads."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from ringreduce import Communicator, Config
from ringreduce.keras.data.adapters import feed_of
from ringreduce.keras.data.division import Plan
from ringreduce.keras.training.elements import Reader

X, Y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6, dtype=np.int64)


class Pair(NamedTuple):
    inputs: tf.Tensor
    targets: tf.Tensor


STRUCTURES = {
    "one": lambda x, y: x,
    "pair": lambda x, y: (x, y),
    "counted": lambda x, y: ((x, y), tf.size(y)),
    "dict": lambda x, y: ({"b": x, "a": y}, y),
    "named": lambda x, y: (Pair(x, y), x),
    "list": lambda x, y: ((x, (y,)), {"c": (x, y)}, y),
    "ragged": lambda x, y: (tf.RaggedTensor.from_row_lengths(x, [1, 1]), y),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_elements_are_those_of_tensorflow_s_iterators(kind):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2).map(STRUCTURES[kind])
    reader, iterator = Reader(dataset.element_spec), iter(dataset)
    for expected in dataset:
        read, _ = reader.next(iterator)
        tf.nest.assert_same_structure(read, expected, expand_composites=True)
        parts = [tf.nest.flatten(each, expand_composites=True) for each in (read, expected)]
        for part, wanted in zip(*parts, strict=True):
            assert part.numpy().tolist() == wanted.numpy().tolist()
    with pytest.raises((StopIteration, tf.errors.OutOfRangeError)):
        reader.next(iterator)


def with_options(dataset):
    options = tf.data.Options()
    options.threading.private_threadpool_size = 7
    return dataset.with_options(options)


@pytest.mark.parametrize(
    ("make", "threads"),
    [
        (lambda dataset: dataset, 1),
        (lambda dataset: dataset.shuffle(6, seed=1).repeat(2).cache(), 1),
        # The user's own functions, threads and options.
        (lambda dataset: dataset.map(lambda x, y: (x + 1, y), num_parallel_calls=4), None),
        (lambda dataset: dataset.batch(1, num_parallel_calls=2).unbatch(), None),
        (with_options, 7),
    ],
)
def test_pipelines_of_the_user_s_keep_their_threads(make, threads):
    batches = make(tf.data.Dataset.from_tensor_slices((X, Y))).batch(2)
    with Communicator(Config()) as ring:
        feed = feed_of((batches,), Plan(ring, "data"))
    assert feed.dataset.options().threading.private_threadpool_size == threads
    assert [len(y) for _, y in feed.dataset] == [2] * len(list(batches))
