"""Collectives in functions that are called from others, in loops, and in gradients of both.

Each case prints one line of JSON with what came out of a function that TensorFlow runs, one that
XLA compiles, and one of which only the functions in it are compiled. Nothing but the program says
what comes first: all tensors have the same shape, and on each rank another one is late.
"""

import tensorflow as tf
from shared import say
from ways import WAYS, comm, compiled, late, late_back, repeated

import ringreduce.keras as rr

rank, size = comm.rank, comm.size


def all_ways(case, make, usual, runs=3):
    """What the function that `make` makes returned, each time it was run, in all ways.

    On two ranks only in the `usual` one, since most of the time goes into compiling.
    """
    found = {}
    for way, (outer, inner) in WAYS.items():
        if size == 2 and way != usual and usual in WAYS:
            continue
        step = make(outer, inner)
        found[way] = [[part.numpy().tolist() for part in step()] for _ in range(runs)]
    say(case, **found)


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
        return repeated(3, lambda total: rr.all_reduce(total + value(1.0), "mean"), tensor)

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
    nested = inner(lambda tensor: repeated(2, lambda t: rr.all_reduce(t, "mean"), tensor))

    def body(step, *_):
        return (
            step + 1,
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

        def body(step, found):
            return step + 1, found.write(step, mean(rows[step]))

        empty = tf.TensorArray(tf.float32, 6, element_shape=(2,))
        return (tf.while_loop(lambda turn, _: turn < 6, body, (0, empty))[1].stack(),)

    return outer(step)


def gradients(outer, inner):
    """Both functions' backward passes have a collective, which is in a function of its own."""
    variable = tf.Variable((1.0, 2.0))
    double = inner(lambda tensor: rr.all_reduce(late(tensor * 2.0, 0), "mean"))

    def turns(tensor):
        return repeated(2, lambda total: rr.all_reduce(total * tensor, "mean"), late(tensor, 1))

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


def gradients_of_functions_in_loops(outer, inner):
    """Their backward passes are functions too, in a loop that sees only what is around it."""
    variable = tf.Variable((1.0, 2.0))
    mean = inner(lambda tensor: rr.all_reduce(late(tensor, 0), "mean"))

    def twice(tensor):
        """Twice what is given, in three collectives: a loop's in a loop, and two functions'."""
        nested = repeated(1, lambda total: mean(late_back(total, 0)), tensor)
        return late_back(nested, 1) + late_back(rr.all_reduce(mean(tensor), "mean"), 2)

    def step():
        with tf.GradientTape() as tape:
            result = repeated(2, twice, variable + 0.0)
            loss = (rank + 1.0) * tf.reduce_sum(result)
        return result, tape.gradient(loss, variable)

    return outer(step)


the_first_collective_is_in_a_later_trace()
all_ways("twice", one_function_called_twice, "jit both")
all_ways("among", functions_among_collectives, "jit inside")
all_ways("loops", loops_among_collectives, "jit")
all_ways("both", loop_around_both, "graph")
all_ways("turns", turns_that_need_nothing_of_each_other, "graph")
all_ways("gradients", gradients, "jit inside")
all_ways("functions in loops", gradients_of_functions_in_loops, "graph")
rr.shutdown()
