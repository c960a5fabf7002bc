"""Gradients of several targets: TensorFlow takes them in an order that depends on the whole tape.

Rank 0 records more than the others, as it would for a metric of its own. Says what came out of each
attempt, in the way that is given, until ranks differ.
"""

import sys

import tensorflow as tf
from shared import error_of, say

import ringreduce.keras as rr

COUNT = 6
comm = rr.init()
wrap = {
    "eager": lambda function: function,
    "graph": tf.function,
    "jit": lambda function: tf.function(function, jit_compile=True),
}[sys.argv[1]]
variables = [tf.Variable((1.0, 2.0)) for _ in range(COUNT)]


def step(extra):
    with tf.GradientTape() as tape:
        targets = []
        for power, variable in enumerate(variables):
            for _ in range(extra if comm.rank == 0 else 0):
                tf.reduce_sum(variable * 2.0)
            targets.append(rr.all_reduce(variable, "mean") * 10.0**power)
    return tape.gradient(targets, variables)


def attempt(extra):
    found = []
    error = error_of(lambda: found.extend(g.numpy().tolist() for g in wrap(step)(extra)))
    say(f"attempt {extra}", found=found, **error)
    return error["error"]


any(attempt(extra) for extra in range(8))
