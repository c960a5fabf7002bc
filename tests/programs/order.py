"""Collectives in functions that are called from others, in loops, and in gradients of both.

Each case prints one line of JSON with what came out of a function that TensorFlow runs, one that
XLA compiles, and one of which only the functions in it are compiled. Nothing but the program says
what comes first: all tensors have the same shape, and on each rank another one is late.
"""

import functools

import tensorflow as tf
from shared import say
from ways import WAYS, comm, compiled, late

import ringreduce.keras as rr

rank, size = comm.rank, comm.size


def late_back(value, whose):
    """`value`, whose gradient is `late`."""

    @tf.custom_gradient
    def same(tensor):
        return tf.identity(tensor), lambda upstream: late(upstream, whose)

    return same(value)


def all_ways(case, make, runs=3):
    """What the function that `make` makes returned, each time it was run."""
    found = {}
    for way, (outer, inner) in WAYS.items():
        step = make(outer, inner)
        found[way] = [[part.numpy().tolist() for part in step()] for _ in range(runs)]
    say(case, **found)


def in_turns(count, reduce, start):
    """`reduce` of `reduce` of ... of `start`. XLA needs the maximum for the loop's gradient."""
    return tf.while_loop(
        lambda turn, _: turn < count,
        lambda turn, total: (turn + 1, reduce(total)),
        (0, start),
        maximum_iterations=count,
    )[1]


def value(base):
    """A tensor whose mean over the ranks is `base` everywhere."""
    return tf.fill((2,), tf.cast(base + rank - (size - 1) / 2, tf.float32))


def the_first_collective_is_in_a_later_trace():
    """Where a function may make no variables any more."""

    @tf.function
    def step(tensor, reduce):
        return rr.all_reduce(tensor) if reduce else tensor

    say("later", results=[step(tf.ones(2), reduce).numpy().tolist() for reduce in (False, True)])


def one_function_called_twice(outer, inner):
    mean = inner(lambda tensor: rr.all_reduce(tensor, "mean"))
    return outer(lambda: (mean(late(value(1.0), 0)), mean(late(value(2.0), 1))))


def functions_among_collectives(outer, inner):
    first = inner(lambda tensor: rr.all_reduce(tensor, "mean"))
    second = inner(lambda tensor: rr.all_gather(rr.all_reduce(late(tensor, 0), "mean"))[-2:])

    def step():
        return (
            rr.all_reduce(late(value(1.0), 0), "mean"),
            first(late(value(2.0), 1)),
            rr.all_reduce(value(3.0), "mean"),
            second(late(value(4.0), 2)),
            first(late(value(5.0), 0)),
            rr.all_reduce(late(value(6.0), 1), "mean"),
        )

    return outer(step)


def loops_among_collectives(outer, inner):
    def loop(tensor):
        return in_turns(3, lambda total: rr.all_reduce(total + value(1.0), "mean"), tensor)

    inside = inner(loop)

    def step():
        return (
            loop(late(value(1.0), 0)),
            rr.all_reduce(late(value(2.0), 1), "mean"),
            inside(late(value(3.0), 2)),
            rr.all_reduce(late(value(4.0), 0), "mean"),
            loop(late(value(5.0), 1)),
        )

    return outer(step)


def loop_around_both(outer, inner):
    """In each turn a collective, a function with one and a function with a loop of its own."""
    mean = inner(lambda tensor: rr.all_reduce(tensor, "mean"))
    nested = inner(lambda tensor: in_turns(2, lambda t: rr.all_reduce(t, "mean"), tensor))

    def body(turn, *_):
        return (
            turn + 1,
            mean(late(value(1.0), 0)),
            rr.all_reduce(late(value(2.0), 1), "mean"),
            nested(late(value(3.0), 2)),
            rr.all_reduce(late(value(4.0), 0), "mean"),
        )

    def step():
        start = (0, *(tf.zeros(2) for _ in range(4)))
        return tf.while_loop(lambda turn, *_: turn < 2, body, start)[1:]

    return outer(step)


def turns_that_need_nothing_of_each_other(outer, inner):
    """Each turn reduces what was there before the loop; TensorFlow may run several at a time."""
    mean = inner(lambda tensor: rr.all_reduce(tensor, "mean"))

    def step():
        rows = tf.stack([late(value(float(turn)), turn) for turn in range(6)])

        def body(turn, found):
            return turn + 1, found.write(turn, mean(rows[turn]))

        empty = tf.TensorArray(tf.float32, 6, element_shape=(2,))
        return (tf.while_loop(lambda turn, _: turn < 6, body, (0, empty))[1].stack(),)

    return outer(step)


def gradients(outer, inner):
    """Both functions' backward passes have a collective, which is in a function of its own."""
    variable = tf.Variable((1.0, 2.0))
    double = inner(lambda tensor: rr.all_reduce(late(tensor * 2.0, 0), "mean"))

    def turns(tensor):
        return in_turns(2, lambda total: rr.all_reduce(total * tensor, "mean"), late(tensor, 1))

    # What a loop leaves for its gradient cannot leave what XLA compiles.
    cube = turns if outer is not inner is compiled else inner(turns)

    def step():
        before = rr.all_reduce(late(value(1.0), 2), "mean")
        with tf.GradientTape() as tape:
            # Each rank's own loss: its gradients' mean is what comes out.
            results = (
                late_back(double(variable), 0),
                late_back(rr.all_reduce(variable, "mean"), 1),
                late_back(cube(variable), 2),
            )
            loss = (rank + 1.0) * tf.reduce_sum(tf.add_n(results))
        gradient = tape.gradient(loss, variable)
        return before, gradient, rr.all_reduce(late(gradient, 0), "mean")

    return outer(step)


def gradients_from_outside(outer, inner, persistent=False):
    """The tape is around the function: TensorFlow orders nothing in the backward pass of that."""
    variables = [tf.Variable((1.0, 2.0)) for _ in range(5)]
    mean = inner(lambda tensor: rr.all_reduce(tensor, "mean"))

    @outer
    def forward(one, two, three, four, five):
        return (
            late_back(rr.all_reduce(one, "mean"), 0),
            late_back(mean(two), 1),
            late_back(in_turns(2, lambda total: rr.all_reduce(total, "mean"), three), 2),
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


def gradients_of_functions_in_loops(outer, inner):
    """Their backward passes are functions too, in a loop that sees only what is around it."""
    variable = tf.Variable((1.0, 2.0))
    mean = inner(lambda tensor: rr.all_reduce(late(tensor, 0), "mean"))

    def twice(tensor):
        """Twice what is given, in three collectives: a loop's in a loop, and two functions'."""
        nested = in_turns(1, lambda total: mean(late_back(total, 0)), tensor)
        return late_back(nested, 1) + late_back(rr.all_reduce(mean(tensor), "mean"), 2)

    def step():
        with tf.GradientTape() as tape:
            result = in_turns(2, twice, variable + 0.0)
            loss = (rank + 1.0) * tf.reduce_sum(result)
        return result, tape.gradient(loss, variable)

    return outer(step)


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


the_first_collective_is_in_a_later_trace()
all_ways("twice", one_function_called_twice)
all_ways("among", functions_among_collectives)
all_ways("loops", loops_among_collectives)
all_ways("both", loop_around_both)
all_ways("turns", turns_that_need_nothing_of_each_other)
all_ways("gradients", gradients)
all_ways("outside", gradients_from_outside)
all_ways("persistent", functools.partial(gradients_from_outside, persistent=True))
all_ways("functions in loops", gradients_of_functions_in_loops)
all_ways("second", second_derivatives)
rr.shutdown()
