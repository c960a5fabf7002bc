"""What the wrapper does on two ranks beyond plain training; each case prints one line of JSON."""

import keras
import numpy as np
import tensorflow as tf
from shared import error_of, keep_graphs, say

import ringreduce.keras as rr

keep_graphs()
comm = rr.init()
LOSS = keras.losses.MeanSquaredError()


def dense_model(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])


def unbuilt_model_in_fit():
    """Its weights do not exist before the first batch."""
    keras.utils.set_random_seed(10 + comm.rank)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=LOSS)
    model.fit(np.ones((4, 4)) * (comm.rank + 1), np.ones((4, 2)), verbose=0, shuffle=False)
    say("unbuilt model", weights=[w.tolist() for w in model.get_weights()])


def eager_fit_from_different_weights():
    """The first gradients of rank 1 come from weights that are not rank 0's."""
    model = dense_model(20 + comm.rank)
    start = model.get_weights()
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss=LOSS, run_eagerly=True
    )
    inputs, targets = np.ones((2, 4)), np.ones((2, 2))
    # What rank 0 alone would do in this first step.
    alone = keras.models.clone_model(model)
    alone.set_weights(start)
    alone.compile(optimizer=keras.optimizers.SGD(0.5), loss=LOSS, run_eagerly=True)
    alone.fit(inputs, targets, verbose=0)
    model.fit(inputs, targets, verbose=0)
    say(
        "eager first step",
        weights=[w.tolist() for w in model.get_weights()],
        alone=[w.tolist() for w in alone.get_weights()],
    )


def sparse_gradients():
    """An embedding's gradient is IndexedSlices, with duplicates."""
    keras.utils.set_random_seed(30)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(5, 2)])
    model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(1.0)), LOSS, run_eagerly=True)
    before = model.get_weights()[0]
    # Mean squared error of 1 x 3 x 2 values against 0: the gradient of a row is its value
    # times its number of occurrences times 2/6.
    index = np.array([[comm.rank, comm.rank, 4]])
    model.fit(index, np.zeros((1, 3, 2)), verbose=0)
    say("sparse", before=before.tolist(), after=model.get_weights()[0].tolist())


def retraces_at_different_steps():
    """Another batch shape makes one rank trace again where the other does not."""
    model = dense_model(40)
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))

    for number in range(6):
        rows = 2 + (number // 2 if comm.rank else number % 3)
        step(tf.ones((rows, 4)))
    say(
        "retracing",
        traces=step.experimental_get_tracing_count(),
        weights=[w.tolist() for w in model.get_weights()],
    )


def jit_compile():
    model = dense_model(50)
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=True)
    say("jit", **error_of(lambda: model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0)))


def a_condition_of_one_rank_is_refused():
    """In a function that AutoGraph has converted, and in one that it has not."""
    variable = tf.Variable([0.0])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))

    def step(own):
        if own > 0:
            optimizer.apply([tf.ones(1)], [variable])
        return own

    def plain(own):
        def apply():
            optimizer.apply([tf.ones(1)], [variable])
            return own

        return tf.cond(own > 0, apply, lambda: own)

    rank = tf.constant(comm.rank)
    say("cond", **error_of(lambda: tf.function(step)(rank)))
    say("plain cond", **error_of(lambda: tf.function(plain, autograph=False)(rank)))


def gradient_that_is_none_on_one_rank():
    """Must come last: it breaks the ring."""
    model = dense_model(90)
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    variables = model.trainable_variables
    optimizer.build(variables)
    ones = [tf.ones_like(v) for v in variables]
    optimizer.apply(ones, variables)
    if comm.rank == 1:
        ones[2] = None
    say("none", **error_of(lambda: optimizer.apply(ones, variables)))
    say("after", **error_of(lambda: optimizer.apply(ones, variables)))


unbuilt_model_in_fit()
eager_fit_from_different_weights()
sparse_gradients()
retraces_at_different_steps()
jit_compile()
a_condition_of_one_rank_is_refused()
gradient_that_is_none_on_one_rank()
