"""Gradients whose collectives TensorFlow may run in any order, in the case and way that are given.

Says what came out of each attempt, until ranks differ.
"""

import functools
import sys

import tensorflow as tf
from shared import error_of, say
from ways import WAYS, comm, late_back, repeated

import ringreduce.keras as rr

rank = comm.rank


def gradients_from_outside(outer, inner, persistent=False):
    """The tape is around the function: TensorFlow orders nothing in the backward pass of that."""
    variables = [tf.Variable((1.0, 2.0)) for _ in range(5)]
    mean = inner(lambda tensor: rr.all_reduce(tensor, "mean"))

    @outer
    def forward(one, two, three, four, five):
        return (
            late_back(rr.all_reduce(one, "mean"), 0),
            late_back(mean(two), 1),
            late_back(repeated(2, lambda total: rr.all_reduce(total, "mean"), three), 2),
            late_back(mean(four), 0),
            late_back(rr.all_reduce(five, "mean"), 1),
        )

    def step():
        with tf.GradientTape(persistent=persistent) as tape:
            results = forward(*(variable + 0.0 for variable in variables))
            parts = [10.0**power * part for power, part in enumerate(results)]
            loss = (rank + 1.0) * tf.reduce_sum(tf.add_n(parts))
        if persistent:
            tape.gradient(loss, variables)
        return tape.gradient(loss, variables)

    return step


def second_derivatives(outer, inner):
    """Of the means of v**4 and v**3, times v; each rank's gradient is its own."""
    variable = tf.Variable((1.0, 2.0))
    mean = inner(lambda tensor: rr.all_reduce(tensor, "mean"))

    def step():
        with tf.GradientTape() as second, tf.GradientTape() as first:
            fourth = late_back(mean(variable**4), 0)
            third = late_back(mean(variable**3), 1)
            loss = tf.reduce_sum((fourth + third) * variable)
            gradient = first.gradient(loss, variable)
        return gradient, second.gradient(gradient, variable)

    return outer(step)


case, way = sys.argv[1:]
make = {
    "outside": gradients_from_outside,
    "persistent": functools.partial(gradients_from_outside, persistent=True),
    "second": second_derivatives,
}[case]
run = make(*WAYS[way])


def attempt():
    found = []
    error = error_of(lambda: found.extend(part.numpy().tolist() for part in run()))
    say(case, found=found, **error)
    return error["error"]


any(attempt() for _ in range(8))
