"""Collectives stay in the program's order wherever they stand, on real rings.

In functions that are called from others, in loops, and in gradients of both, which TensorFlow runs
or XLA compiles. Nothing but the program says what comes first: all tensors have the same shape, and
on each rank another one is late.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.effects import native
from tests.programs.shared import difference, digest, error_of
from tests.ranks import on_ranks
from tests.scope import in_full
from tests.ways import needs_xla, plain, wrapped

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]
REWRITES_GRAPHS = True

compiled = functools.partial(tf.function, jit_compile=True)
# By name, what makes functions of the outer and of the inner ones.
WAYS = {"graph": (tf.function, tf.function)}
if native.library() is not None:
    WAYS |= {
        "jit": (compiled, tf.function),
        "jit inside": (tf.function, compiled),
        "jit both": (compiled, compiled),
    }


def by_way(usual, rare=()):
    """`size`, and what is made in which `way`: on 2 ranks in the usual one, on 3 in all.

    Those of `rare` in `make test-full` alone.
    """
    cases = [
        in_full(2, make, way) if make in rare else (2, make, way)
        for make, way in usual.items()
        if way in WAYS
    ]
    full = [in_full(3, make, way) for make in usual for way in WAYS]
    return pytest.mark.parametrize(("size", "make", "way"), [*cases, *full])


def late(value, whose):
    """`value`, after some milliseconds of computing on rank `whose` modulo the number of ranks."""
    if rr.rank() != whose % rr.size():
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


def value(base):
    """A tensor whose mean over the ranks is `base` everywhere."""
    return tf.fill((2,), tf.cast(base + rr.rank() - (rr.size() - 1) / 2, tf.float32))


def mean_of(tensor):
    return rr.all_reduce(tensor, "mean")


def same(*values):
    """Each as it comes out of a collective: a tensor of two."""
    return [[value, value] for value in values]


@pytest.mark.parametrize("size", [2, in_full(3)])
@on_ranks(OF_ITS_OWN="1")  # On a ring that has reduced nothing yet.
def test_the_first_collective_may_be_in_a_later_trace():
    """Where a function may make no variables any more."""

    @tf.function
    def step(tensor, reduce):
        return rr.all_reduce(tensor) if reduce else tensor

    assert plain([step(tf.ones(2), reduce) for reduce in (False, True)]) == same(1, rr.size())


def functions_among_collectives(outer, inner):
    first = inner(mean_of)
    second = inner(lambda tensor: rr.all_gather(mean_of(late(tensor, 0)))[-2:])

    def step():
        return (
            mean_of(late(value(1), 0)),
            first(late(value(2), 1)),
            mean_of(value(3)),
            second(late(value(4), 2)),
            first(late(value(5), 0)),
            mean_of(late(value(6), 1)),
        )

    return outer(step), same(1, 2, 3, 4, 5, 6)


def loops_among_collectives(outer, inner):
    def loop(tensor):
        return repeated(3, lambda total: mean_of(total + value(1)), tensor)

    inside = inner(loop)

    def step():
        return (
            loop(late(value(1), 0)),
            mean_of(late(value(2), 1)),
            inside(late(value(3), 2)),
            mean_of(late(value(4), 0)),
            loop(late(value(5), 1)),
        )

    return outer(step), same(4, 2, 6, 4, 8)


def loop_around_both(outer, inner):
    """In each turn a collective, a function with one and a function with a loop of its own."""
    mean = inner(mean_of)
    nested = inner(lambda tensor: repeated(2, mean_of, tensor))

    def body(step, *_):
        return (
            step + 1,
            mean(late(value(1), 0)),
            mean_of(late(value(2), 1)),
            nested(late(value(3), 2)),
            mean_of(late(value(4), 0)),
        )

    def step():
        start = (0, *(tf.zeros(2) for _ in range(4)))
        return tf.while_loop(lambda turn, *_: turn < 2, body, start)[1:]

    return outer(step), same(1, 2, 3, 4)


def turns_that_need_nothing_of_each_other(outer, inner):
    """Each turn reduces what was there before the loop; TensorFlow may run several at a time."""
    mean = inner(mean_of)

    def step():
        rows = tf.stack([late(value(turn), turn) for turn in range(6)])

        def body(step, means):
            return step + 1, means.write(step, mean(rows[step]))

        empty = tf.TensorArray(tf.float32, 6, element_shape=(2,))
        return (tf.while_loop(lambda turn, _: turn < 6, body, (0, empty))[1].stack(),)

    return outer(step), [same(0, 1, 2, 3, 4, 5)]


def gradients(outer, inner):
    """Both functions' backward passes have a collective, which is in a function of its own."""
    variable = tf.Variable((1.0, 2.0))
    double = inner(lambda tensor: mean_of(late(tensor * 2.0, 0)))

    def turns(tensor):
        return repeated(2, lambda total: mean_of(total * tensor), late(tensor, 1))

    # What a loop leaves for its gradient cannot leave what XLA compiles.
    cube = turns if outer is not inner is compiled else inner(turns)

    def step():
        before = mean_of(late(value(1), 2))
        with tf.GradientTape() as tape:
            # Each rank's own loss: its gradients' mean is what comes out.
            results = (
                late_back(double(variable), 0),
                late_back(mean_of(variable), 1),
                late_back(cube(variable), 2),
            )
            loss = (rr.rank() + 1.0) * tf.reduce_sum(tf.add_n(results))
        gradient = tape.gradient(loss, variable)
        return before, gradient, mean_of(late(gradient, 0))

    # The mean loss is (size + 1) / 2 times the sum of 2 v + v + v**3.
    gradient = [(rr.size() + 1) / 2 * (3 + 3 * v**2) for v in (1.0, 2.0)]
    return outer(step), [[1, 1], gradient, gradient]


def gradients_of_functions_in_loops(outer, inner):
    """Their backward passes are functions too, in a loop that sees only what is around it."""
    variable = tf.Variable((1.0, 2.0))
    mean = inner(lambda tensor: mean_of(late(tensor, 0)))

    def twice(tensor):
        """Twice what is given, in three collectives: a loop's in a loop, and two functions'."""
        nested = repeated(1, lambda total: mean(late_back(total, 0)), tensor)
        return late_back(nested, 1) + late_back(mean_of(mean(tensor)), 2)

    def step():
        with tf.GradientTape() as tape:
            result = repeated(2, twice, variable + 0.0)
            loss = (rr.rank() + 1.0) * tf.reduce_sum(result)
        return result, tape.gradient(loss, variable)

    return outer(step), [[4, 8], [2.0 * (rr.size() + 1)] * 2]


@by_way(
    {
        functions_among_collectives: "jit both",
        loops_among_collectives: "jit",
        loop_around_both: "graph",
        turns_that_need_nothing_of_each_other: "graph",
        gradients: "jit inside",
        gradients_of_functions_in_loops: "graph",
    }
)
@on_ranks()
def test_each_gets_what_is_its_own(make, way):
    step, expected = make(*WAYS[way])
    for _ in range(3):
        assert plain(step()) == expected


class Two(keras.Model):
    """Two nets with an optimizer each, trained one after the other in functions of their own."""

    def __init__(self, wrap, steps):
        keras.utils.set_random_seed(5)
        super().__init__()
        self.nets = [
            keras.Sequential(
                [keras.Input((4,)), rr.SyncBatchNormalization(), keras.layers.Dense(2)]
            )
            for _ in range(2)
        ]
        self.optimizers = [
            rr.DistributedOptimizer(keras.optimizers.SGD(0.1), gradient_accumulation_steps=steps)
            for _ in self.nets
        ]
        self.parts = [wrap(functools.partial(self.part, number)) for number in range(2)]

    def part(self, number, x, y):
        net, optimizer = self.nets[number], self.optimizers[number]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(late(x, number), training=True) - y) ** 2)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply(gradients, net.trainable_variables)
        return loss

    def train_step(self, batch):
        x, y = batch
        return {"first": self.parts[0](x, y), "second": self.parts[1](x, -y)}


def two_optimizers(way, steps=1):
    """A model's `train_step` that calls functions; without them it is the same training."""
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(8 * rr.size(), 4)).astype("float32")
    targets = inputs[:, :2] - inputs[:, 2:] ** 2
    outer, inner = WAYS.get(way, (None, lambda function: function))
    model = Two(inner, steps)
    for optimizer, net in zip(model.optimizers, model.nets, strict=True):
        optimizer.build(net.trainable_variables)
    # The reference eagerly: tracing it would take longer.
    model.compile(model.optimizers[0], run_eagerly=outer is None, jit_compile=outer is compiled)
    own = slice(rr.rank(), None, rr.size())
    model.fit(inputs[own], targets[own], batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert difference(model, Two(inner, steps)) > 1e-2
    return model.get_weights()


def several_steps(way):
    return two_optimizers(way, steps=2)


def rows(way, with_tape=False):
    """A sparse gradient that a function returns does not say which shape it stands for."""
    outer, inner = WAYS.get(way, (tf.function, lambda function: function))
    index = tf.constant([[1, 2], [2, 4], [rr.rank(), 0]])
    keras.utils.set_random_seed(5)
    layer = keras.layers.Embedding(5, 3)
    layer.build()
    optimizer = keras.optimizers.SGD(0.5)
    if not with_tape:
        optimizer = rr.DistributedOptimizer(optimizer)
    optimizer.build(layer.trainable_variables)
    looked_up = inner(lambda: tf.reduce_sum(layer(index) ** 2))

    @inner
    def gradients_of():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(index) ** 2)
        return tape.gradient(loss, layer.trainable_variables)

    @outer
    def step():
        if with_tape:
            with rr.DistributedGradientTape() as tape:
                loss = looked_up()
            gradients = tape.gradient(loss, layer.trainable_variables)
        else:
            gradients = gradients_of()
        optimizer.apply(gradients, layer.trainable_variables)

    step()
    return layer.get_weights()


def rows_of_a_tape(way):
    return rows(way, with_tape=True)


# What takes several steps has two optimizers too.
@by_way(
    {two_optimizers: "jit inside", several_steps: "graph", rows: "jit", rows_of_a_tape: "graph"},
    rare=[two_optimizers],
)
@on_ranks()
def test_training_in_functions_of_a_function_is_the_same(make, way):
    weights = make(way)
    for got, wanted in zip(weights, make("without"), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
    return digest(weights)


def attempt(runs, expected):
    """Make each run until one raises, and return that error; what comes out before is expected."""
    error = error_of(lambda: None)
    for run in runs:
        results = []
        error = error_of(lambda run=run, results=results: results.extend(plain(run())))
        if error["error"]:
            break
        assert results == expected
    return error


@pytest.mark.parametrize("how", ["graph", in_full("eager"), in_full("jit")])
@on_ranks(2)
def test_an_order_that_is_tensorflows_is_never_silently_wrong(how):
    """With several targets it depends on what else was recorded, which only rank 0 has more of."""
    variables = [tf.Variable((1.0, 2.0)) for _ in range(6)]

    def step(extra):
        with tf.GradientTape() as tape:
            targets = []
            for power, variable in enumerate(variables):
                for _ in range(extra if rr.rank() == 0 else 0):
                    tf.reduce_sum(variable * 2.0)
                targets.append(mean_of(variable) * 10.0**power)
        return tape.gradient(targets, variables)

    runs = [wrapped(how, functools.partial(step, extra)) for extra in range(8)]
    error = attempt(runs, same(*(10**power for power in range(6))))
    if rr.rank() == 1:
        assert error["error"] == "MismatchError"
        assert "takes the gradient of its tensor collective number" in error["text"]
        assert "Ask the tape for the gradients of one loss" in error["text"]


def gradients_from_outside(outer, inner, persistent=False):
    """The tape is around the function: TensorFlow orders nothing in the backward pass of that."""
    variables = [tf.Variable((1.0, 2.0)) for _ in range(5)]
    mean = inner(mean_of)

    @outer
    def forward(one, two, three, four, five):
        return (
            late_back(mean_of(one), 0),
            late_back(mean(two), 1),
            late_back(repeated(2, mean_of, three), 2),
            late_back(mean(four), 0),
            late_back(mean_of(five), 1),
        )

    def step():
        with tf.GradientTape(persistent=persistent) as tape:
            results = forward(*(variable + 0.0 for variable in variables))
            parts = [10.0**power * part for power, part in enumerate(results)]
            loss = (rr.rank() + 1.0) * tf.reduce_sum(tf.add_n(parts))
        if persistent:
            tape.gradient(loss, variables)
        return tape.gradient(loss, variables)

    return step, same(*((rr.size() + 1) / 2 * 10**power for power in range(5)))


def second_derivatives(outer, inner):
    """They are of the means of v**4 and v**3, times v; each rank's gradient is its own."""
    variable = tf.Variable((1.0, 2.0))
    mean = inner(mean_of)

    def step():
        with tf.GradientTape() as second, tf.GradientTape() as first:
            fourth = late_back(mean(variable**4), 0)
            third = late_back(mean(variable**3), 1)
            loss = tf.reduce_sum((fourth + third) * variable)
            gradient = first.gradient(loss, variable)
        return gradient, second.gradient(gradient, variable)

    first = [5 * v**4 + 4 * v**3 for v in (1, 2)]
    return outer(step), [first, [20 * v**3 + 12 * v**2 for v in (1, 2)]]


@pytest.mark.parametrize(
    ("make", "persistent", "way"),
    [
        (gradients_from_outside, {"persistent": True}, "graph"),
        in_full(gradients_from_outside, {}, "graph"),
        pytest.param(
            *(gradients_from_outside, {"persistent": True}, "jit both"),
            marks=[needs_xla, pytest.mark.full],
        ),
        pytest.param(second_derivatives, {}, "jit inside", marks=needs_xla),
    ],
)
@on_ranks(2)
def test_gradients_that_tensorflow_does_not_order_are_never_silently_wrong(make, persistent, way):
    """They are of a function, by a tape outside of it, or of gradients."""
    run, expected = make(*WAYS[way], **persistent)
    error = attempt([run] * 8, expected)
    # Of the backward pass of a function the error is TensorFlow's, with our text.
    texts = ("tensor collective number", "began another step while gradients")
    is_ours = any(text in error["text"] for text in texts)
    assert error["error"] in ("", "MismatchError") or is_ours, error
