"""What XLA compiles, on a ring; each case prints one line of JSON.

What must come out is computed beside it, by the same step without XLA, or by plain Keras on the
data of all ranks together.
"""

import keras
import numpy as np
import tensorflow as tf
from shared import built, difference, digest, error_of, say

import ringreduce.keras as rr
from ringreduce import ArrayError
from ringreduce.tensorflow import python_calls

comm = rr.init()
rank, size = comm.rank, comm.size


def data(count=24):
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(count * size, 4)).astype("float32")
    targets = inputs[:, :2] - inputs[:, 2:] ** 2
    return inputs[rank::size], targets[rank::size]


def make_model(*layers):
    keras.utils.set_random_seed(5)
    middle = layers or (keras.layers.Dense(6, activation="tanh"),)
    return keras.Sequential([keras.Input((4,)), *middle, keras.layers.Dense(2)])


def fit(model, inputs, targets, jit, optimizer=None, batch=4, epochs=1, **options):
    wrapped = rr.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1))
    # The reference eagerly: tracing it would take longer.
    model.compile(optimizer=wrapped, loss="mse", jit_compile=jit, run_eagerly=not jit, **options)
    if jit:
        built(model, inputs[:1], targets[:1])
    fit = model.fit(inputs, targets, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return fit.history


def metrics_and_a_last_batch_of_another_size():
    """Each size is compiled by itself: ranks retrace and compile in the middle of an epoch."""
    inputs, targets = data(22 if rank == 0 else 23)
    ends = {}
    for jit in (True, False):
        model = make_model()
        history = fit(model, inputs, targets, jit, epochs=2, metrics=["mae"])
        ends[jit] = model, history
    (model, history), (other, expected) = ends[True], ends[False]
    say(
        "retraced",
        digest=digest(model.get_weights()),
        difference=difference(model, other),
        moved=difference(model, make_model()),
        history=history,
        expected=expected,
    )


def sparse_gradients_become_dense():
    keras.utils.set_random_seed(5)
    inputs = np.array([[0, 1, 1], [2, 1, rank]])
    ends = []
    for jit in (True, False):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Embedding(7, 2), keras.layers.GlobalMaxPooling1D()]
        )
        wrapped = rr.DistributedOptimizer(keras.optimizers.SGD(0.5))
        model.compile(optimizer=wrapped, loss="mse", jit_compile=jit, run_eagerly=not jit)
        model.fit(inputs, np.ones((2, 2)), verbose=0)
        ends.append(model)
    say("sparse", digest=digest(ends[0].get_weights()), difference=difference(*ends))


def large_gradients_stay_where_they_are():
    """Of 1 MiB or more; what XLA gives the ring must not be what others still need."""
    weights = [tf.Variable(tf.zeros((600, 600))) for _ in range(2)] + [tf.Variable(tf.zeros(3))]
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(weights)
    own = [tf.fill((600, 600), rank + 1.0), tf.reshape(tf.range(360000.0), (600, 600)) * rank]

    @tf.function(jit_compile=True)
    def step(gradients):
        # Also an argument, whose memory is the caller's, is used after it is started, and so is
        # what is made of it; a third gradient is packed.
        derived = [gradient * 2.0 for gradient in gradients]
        optimizer.apply([*derived, tf.fill((3,), float(rank))], weights)
        local = [tf.reduce_sum(gradient[0]) for gradient in derived]
        optimizer.apply([*gradients, None], weights)
        return local

    local = [step(own) for _ in range(3)][-1]
    size_mean = sum(range(size)) / size
    say(
        "in place",
        own=[bool(tf.reduce_all(own[0] == rank + 1.0)), float(own[1][0, 1])],
        local=[float(value) for value in local],
        first=[float(weights[0][0, 0]), -9 * (size_mean + 1)],
        second=[float(weights[1][599, 599]), -9 * 359999.0 * size_mean],
        third=[float(weights[2][0]), -3 * size_mean],
        digest=digest(weights),
    )


def two_optimizers_in_one_step():
    """Their buckets must leave in the program's order, though XLA sees two independent halves."""
    first, second = make_model(), make_model()
    optimizers = [rr.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in range(2)]
    for optimizer, model in zip(optimizers, (first, second), strict=True):
        optimizer.build(model.trainable_variables)
    inputs, targets = data()

    @tf.function(jit_compile=True)
    def step(x, y):
        for optimizer, model in zip(optimizers, (first, second), strict=True):
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)

    for _ in range(5):
        step(inputs, targets)
    say(
        "two optimizers",
        digests=[digest(first.get_weights()), digest(second.get_weights())],
        moved=difference(first, make_model()),
    )


def gradients_that_do_not_depend_on_what_was_applied():
    """Nothing but the order of the program says that one reduction comes after another."""
    weights = [tf.Variable(tf.zeros(3)) for _ in range(2)]
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), bucket_bytes=8)
    optimizer.build(weights)

    @tf.function(jit_compile=True)
    def steps():
        for turn in range(3):
            gradients = [tf.fill((3,), float((rank + 1) * 10**turn)), tf.fill((3,), float(rank))]
            optimizer.apply(gradients, weights)

    for _ in range(3):
        steps()
    say("linear", weights=[weight.numpy().tolist() for weight in weights])


def a_mean_that_nobody_uses():
    """XLA drops what has no effect; the rank must take part all the same, step after step."""
    weights = [tf.Variable([1.0]), tf.Variable(tf.ones(100))]

    @tf.function(jit_compile=True)
    def step():
        with rr.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(weights[0]) * (rank + 1.0) + tf.reduce_sum(weights[1])
        gradients = tape.gradient(loss, weights)
        ignored = rr.all_reduce(tf.ones(5))
        del ignored
        return gradients[0] if rank == 0 else tf.constant([0.0])

    before = comm.statistics().collectives
    results = [step().numpy().tolist() for _ in range(4)]
    say("unused", results=results, collectives=comm.statistics().collectives - before)


def in_conditions_and_loops():
    value = tf.constant([1.0, 2.0])

    @tf.function(jit_compile=True, autograph=False)
    def loop():
        turns = tf.while_loop(
            lambda turn, total: turn < 3,
            lambda turn, total: (turn + 1, rr.all_reduce(total, "sum")),
            (0, value),
        )[1]
        return turns, rr.all_gather(value * float(rank))

    say("loop", results=[part.numpy().tolist() for part in loop()])

    @tf.function(jit_compile=True, autograph=False)
    def branch(flag):
        return tf.cond(flag, lambda: rr.all_reduce(value), lambda: value)

    say("cond", **error_of(lambda: branch(tf.constant(rank == 0))))


def what_no_turn_of_a_loop_changes():
    """XLA takes such things out of loops; what is done must be so in each turn, or in none."""
    weights = [tf.Variable(tf.zeros(4)), tf.Variable(tf.zeros((600, 600)))]
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(weights)
    gradients = [tf.fill((4,), rank + 1.0), tf.fill((600, 600), 2.0 * rank)]

    @tf.function(jit_compile=True)
    def steps(turns):
        total = 0.0
        for _ in tf.range(turns):
            total += rr.all_reduce(tf.constant(8.0), "sum")
            optimizer.apply(gradients, weights)
        return total

    totals = [float(steps(tf.constant(turns))) for turns in (0, 2, 0, 3)]
    ends = [float(weight.numpy().min()) for weight in weights]
    ends += [float(weight.numpy().max()) for weight in weights]
    say("invariant", totals=totals, ends=ends)


def accumulation_and_what_comes_after_it():
    """A reduction in every third step, in a branch, and a collective after it in each."""
    model, other = make_model(), make_model()
    ends = []
    inputs, targets = data()
    for subject, jit in ((model, True), (other, False)):
        optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.01), accumulate_steps=3)
        optimizer.build(subject.trainable_variables)

        def step(x, y, optimizer=optimizer, model=subject):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables))
            return rr.all_reduce(loss, "mean")

        step = tf.function(step, jit_compile=True) if jit else step
        losses = [
            float(step(inputs[i : i + 4], targets[i : i + 4])) for i in range(0, len(inputs), 4)
        ]
        ends.append(losses)
    say(
        "accumulated",
        digest=digest(model.get_weights()),
        difference=difference(model, other),
        losses=ends,
    )


def unequal_data():
    """With a join, all of a step compiled."""
    inputs, targets = data()
    count = 24 - 8 * rank if rank < 3 else 0
    inputs, targets = inputs[:count], targets[:count]
    rows = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(6)
    ends = {}
    for jit in (True, False):
        model = make_model()
        wrapped = rr.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer=wrapped, loss="mse", jit_compile=jit, run_eagerly=not jit)
        for _ in range(2):
            rr.fit(model, rows, sharded=True, verbose=0)
        ends[jit] = model
    say(
        "join",
        digest=digest(ends[True].get_weights()),
        difference=difference(ends[True], ends[False]),
        steps=[int(model.optimizer.iterations) for model in ends.values()],
    )


def an_error_that_breaks_nothing():
    """Such as of an operator that a dtype does not have: the next step is as before."""
    turns = []

    def run(array):
        turns.append(len(turns))
        if not turns[-1]:
            raise ArrayError("cannot do this the first time")
        comm.all_reduce(array)
        return [array]

    @tf.function(jit_compile=True)
    def step(value):
        return python_calls.call(comm, "try", run, [value], [((2,), tf.float32)])[0]

    say("refused", **error_of(lambda: step(tf.constant([1.0, 2.0]))))
    say("after refused", total=step(tf.constant([1.0, 2.0])).numpy().tolist())


def one_alone():
    """A step that one rank alone compiles, the first or a later one; each breaks its own ring."""
    for ways in ([rank == 0], [False, rank == 0]):
        ring = comm.split(0)
        model = make_model()
        wrapped = rr.DistributedOptimizer(keras.optimizers.SGD(0.1), ring)

        def run(ways=ways, model=model, wrapped=wrapped):
            for jit in ways:
                model.compile(wrapped, "mse", jit_compile=jit)
                model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0)

        say(f"one alone {len(ways)}", **error_of(run))


def rows_that_differ():
    """Last: it breaks the ring."""

    @tf.function(jit_compile=True)
    def gather(rows):
        return rr.all_gather(rows)

    say("unequal rows", **error_of(lambda: gather(tf.ones((2 + (rank == 0), 2)))))
    say("afterwards", **error_of(lambda: gather(tf.ones((2, 2)))))


metrics_and_a_last_batch_of_another_size()
large_gradients_stay_where_they_are()
sparse_gradients_become_dense()
two_optimizers_in_one_step()
gradients_that_do_not_depend_on_what_was_applied()
a_mean_that_nobody_uses()
in_conditions_and_loops()
what_no_turn_of_a_loop_changes()
accumulation_and_what_comes_after_it()
unequal_data()
an_error_that_breaks_nothing()
one_alone()
rows_that_differ()
