"""Which variables eager ops write to, found without a look at any of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringreduce.tensorflow.written import Written

pytestmark = pytest.mark.tensorflow


def compiled(write):
    return tf.function(write, autograph=False)


WRITES = {
    "keras": lambda v: v.assign(np.ones(3)),
    "keras, same": lambda v: v.assign(v.value),
    "added": lambda v: v.value.assign_add(tf.ones(3)),
    "subtracted": lambda v: v.value.assign_sub(tf.ones(3)),
    "scattered": lambda v: v.value.scatter_update(tf.IndexedSlices(tf.ones(1), tf.constant([1]))),
    "slice": lambda v: v.value[1:].assign(tf.ones(2)),
    "in a function": lambda v: compiled(lambda: v.value.assign(tf.ones(3)))(),
    "by XLA": lambda v: tf.function(lambda: v.value.assign(tf.ones(3)), jit_compile=True)(),
    "given to a function": lambda v: compiled(lambda x: x.assign(tf.ones(3)))(v.value),
    "by an optimizer": lambda v: keras.optimizers.SGD(0.1).apply([tf.ones(3)], [v]),
}
READS = {
    "value": lambda v: v.numpy(),
    "arithmetic": lambda v: v * 2 + 1,
    "gathered": lambda v: tf.gather(v.value, [0, 2]),
    "shape": lambda v: v.value.sparse_read([0]) + tf.cast(tf.shape(v.value), "float32"),
    "another": lambda v: keras.Variable(np.zeros(3)).assign(v.value),
}


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_is_named(how):
    one, other = (keras.Variable(np.zeros(3, "float32")) for _ in range(2))
    written = Written([one, other])
    with written:
        WRITES[how](one)
    assert (written.is_touched(one), written.is_touched(other)) == (True, False)
    assert written.any_is_changed()


@pytest.mark.parametrize("how", READS)
def test_reading_writes_nothing(how):
    one = keras.Variable(np.zeros(3, "float32"))
    written = Written([one])
    with written:
        READS[how](one)
    assert not written.any_is_changed()


def test_only_what_is_written_in_the_block_counts():
    one = keras.Variable(np.zeros(3, "float32"))
    written = Written([one])
    one.assign(np.ones(3))
    with written:
        pass
    one.assign(np.ones(3))
    assert not written.any_is_changed()
    with pytest.raises(KeyError), written:
        raise KeyError
    one.assign(np.ones(3))
    assert not written.any_is_changed()


def test_a_block_forgets_the_one_before():
    one = keras.Variable(np.zeros(3, "float32"))
    written = Written([one])
    with written:
        one.assign(np.ones(3))
    with written:
        one.numpy()
    assert not written.is_touched(one)
