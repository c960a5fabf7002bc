"""The ways in which functions within functions are run, and tensors that are late on one rank."""

import functools

import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.tensorflow import xla

comm = rr.init()

compiled = functools.partial(tf.function, jit_compile=True)
# By name, what makes functions of the outer and of the inner ones.
WAYS = {"graph": (tf.function, tf.function)}
if xla.why_not() is None:
    WAYS |= {
        "jit": (compiled, tf.function),
        "jit inside": (tf.function, compiled),
        "jit both": (compiled, compiled),
    }


def late(value, whose):
    """`value`, after some milliseconds of computing on rank `whose` modulo the number of ranks."""
    if comm.rank != whose % comm.size:
        return value
    y = tf.ones((300, 300)) * tf.reduce_sum(value)
    for _ in range(8):
        y = tf.tanh(tf.matmul(y, y))
    return value + tf.cast(tf.reduce_max(y) > 2.0, value.dtype)  # Adds 0; only we know that.


def late_back(value, whose):
    """`value`, whose gradient is `late`."""

    @tf.custom_gradient
    def same(tensor):
        return tf.identity(tensor), lambda upstream: late(upstream, whose)

    return same(value)


def repeated(count, reduce, start):
    """`reduce` of `reduce` of ... of `start`. XLA needs the maximum for the loop's gradient."""
    return tf.while_loop(
        lambda step, _: step < count,
        lambda step, total: (step + 1, reduce(total)),
        (0, start),
        maximum_iterations=count,
    )[1]
