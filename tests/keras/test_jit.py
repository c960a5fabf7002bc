"""Training steps that XLA compiles, with the ring in them, beside the same steps without XLA.

What is about collectives, sparse gradients and their order is in tests/tensorflow.
"""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ArrayError, ConfigError, MismatchError
from ringreduce.effects import native
from ringreduce.tensorflow import python_calls
from ringreduce.tensorflow.control_flow import refuse_unreachable
from tests.programs.shared import built, difference, digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(native.library() is None, reason="without the native library"),
]

REWRITES_GRAPHS = True

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def on_2_and_3(function):
    return pytest.mark.parametrize("size", [2, in_full(3)])(on_ranks()(function))


def data(count=24):
    """This rank's."""
    inputs = np.random.default_rng(3).normal(size=(count * rr.size(), 4)).astype("float32")
    targets = inputs[:, :2] - inputs[:, 2:] ** 2
    return inputs[rr.rank() :: rr.size()], targets[rr.rank() :: rr.size()]


def make_model():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4,)), *layers])


def compiled(model, inner, jit):
    """With XLA, or eagerly: tracing the reference would take longer."""
    optimizer = rr.DistributedOptimizer(inner)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit, run_eagerly=not jit)
    return model


def optimizer_of(variables, inner=None, **options):
    optimizer = rr.DistributedOptimizer(inner or SGD(1.0), **options)
    optimizer.build(variables)
    return optimizer


def of_other_batches(model):
    """One rank has a last batch of 2, the others of 3: no step is the same program on all."""
    inputs, targets = data(22 if rr.rank() == 0 else 23)
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    history = built(model).fit(inputs, targets, **options).history
    return [*history["loss"], *history["mae"]]


def of_unequal_data(model):
    """With a join, all of a step compiled."""
    count = 24 - 8 * rr.rank() if rr.rank() < 3 else 0
    rows = tf.data.Dataset.from_tensor_slices(tuple(part[:count] for part in data())).batch(6)
    for _ in range(2):
        rr.fit(model, rows, per_rank_data=True, verbose=0)
    assert int(model.optimizer.iterations) == 8
    return []


def with_a_reduction_that_is_not_due_in_each_step(model):
    """In every third, in a branch, and a collective after it in each."""
    optimizer = optimizer_of(model.trainable_variables, Adam(0.01), gradient_accumulation_steps=3)
    inputs, targets = data()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return rr.all_reduce(loss, "mean")

    step = tf.function(step, jit_compile=True) if model.jit_compile else step
    batches = [slice(first, first + 4) for first in range(0, len(inputs), 4)]
    return [float(step(inputs[batch], targets[batch])) for batch in batches]


@pytest.mark.parametrize(
    ("train", "inner", "rate"),
    [
        (of_other_batches, SGD, 0.1),
        in_full(of_unequal_data, Adam, 0.01),
        (with_a_reduction_that_is_not_due_in_each_step, Adam, 0.01),
    ],
)
@on_2_and_3
def test_training_is_that_without_xla(train, inner, rate):
    models = [compiled(make_model(), inner(rate), jit) for jit in (True, False)]
    numbers, expected = map(train, models)
    assert numbers == pytest.approx(expected, rel=1e-5)
    assert difference(*models) < 2e-6
    assert difference(models[0], make_model()) > 0.01
    return digest(models[0].get_weights())


@on_2_and_3
def test_labels_of_one_dimension_of_a_rank_without_any_are_compiled():
    model = compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), SGD(0.1), True)
    inputs, targets = (part[: 6 * (rr.rank() == 0)] for part in data())
    rows = tf.data.Dataset.from_tensor_slices((inputs, targets[:, 0])).batch(4)
    rr.fit(model, rows, per_rank_data=True, verbose=0)
    assert int(model.optimizer.iterations) == 2


@on_2_and_3
def test_large_gradients_are_reduced_where_they_lie_and_hurt_nobody():
    """Of 1 MiB or more; what XLA gives the ring must not be what others still need."""
    rank, mean_rank = rr.rank(), (rr.size() - 1) / 2
    weights = [tf.Variable(tf.zeros(shape)) for shape in ((600, 600), (600, 600), 3)]
    optimizer = optimizer_of(weights)
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
    assert (own[0].numpy() == rank + 1.0).all()
    assert float(own[1][0, 1]) == rank
    assert [float(value) for value in local] == [1200 * (rank + 1), 2 * rank * sum(range(600))]
    ends = [float(weights[0][0, 0]), float(weights[1][599, 599]), float(weights[2][0])]
    expected = [-9 * (mean_rank + 1), -9 * 359999.0 * mean_rank, -3 * mean_rank]
    assert ends == pytest.approx(expected, rel=1e-6)
    return digest(weights)


@on_2_and_3
def test_reductions_that_depend_on_nothing_keep_the_order_of_the_program():
    weights = [tf.Variable(tf.zeros(3)) for _ in range(2)]
    optimizer = optimizer_of(weights, bucket_bytes=8)

    @tf.function(jit_compile=True)
    def steps():
        for turn in range(3):
            values = (rr.rank() + 1) * 10**turn, rr.rank()
            optimizer.apply([tf.fill((3,), float(value)) for value in values], weights)

    for _ in range(3):
        steps()
    mean_rank = (rr.size() - 1) / 2
    for weight, expected in zip(weights, (-3 * 111 * (mean_rank + 1), -9 * mean_rank), strict=True):
        assert weight.numpy().tolist() == [pytest.approx(expected)] * 3


@on_2_and_3
def test_a_mean_that_one_rank_does_not_use_is_computed_all_the_same():
    """XLA drops what has no effect; the rank must take part, step after step."""
    weights = [tf.Variable([1.0]), tf.Variable(tf.ones(100))]
    is_first = rr.rank() == 0

    @tf.function(jit_compile=True)
    def step():
        with rr.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(weights[0]) * (rr.rank() + 1.0) + tf.reduce_sum(weights[1])
        gradients = tape.gradient(loss, weights)
        ignored = rr.all_reduce(tf.ones(5))
        del ignored
        return gradients[0] if is_first else tf.constant([0.0])

    before = rr.init().statistics().collectives
    for _ in range(4):
        assert step().numpy().tolist() == [(rr.size() + 1) / 2 if is_first else 0.0]
    # Rank 0's values in three; in each step a bucket and a tensor; gradients are compared once.
    assert rr.init().statistics().collectives - before == 3 + 4 * 2 + 1


@on_2_and_3
def test_a_loop_communicates_in_each_turn_and_a_branch_of_one_rank_is_refused():
    value = tf.constant([1.0, 2.0])

    @tf.function(jit_compile=True, autograph=False)
    def loop():
        turns = tf.while_loop(
            lambda turn, total: turn < 3,
            lambda turn, total: (turn + 1, rr.all_reduce(total, "sum")),
            (0, value),
        )[1]
        return turns, rr.all_gather(value * float(rr.rank()))

    @tf.function(jit_compile=True, autograph=False)
    def branch(flag):
        return tf.cond(flag, lambda: rr.all_reduce(1.0), lambda: 1.0)

    total, gathered = loop()
    assert total.numpy().tolist() == [rr.size() ** 3, 2.0 * rr.size() ** 3]
    assert gathered.numpy().tolist() == [v * rank for rank in range(rr.size()) for v in (1.0, 2.0)]
    with pytest.raises(ConfigError, match=r"inside a branch of tf\.cond"):
        branch(tf.constant(rr.rank() == 0))


@on_2_and_3
def test_what_a_loop_does_not_change_is_reduced_in_each_turn():
    """XLA takes such things out of loops; what is done must be so in each turn, or in none."""
    weights = [tf.Variable(tf.zeros(4)), tf.Variable(tf.zeros((600, 600)))]
    optimizer = optimizer_of(weights)
    gradients = [tf.fill((4,), rr.rank() + 1.0), tf.fill((600, 600), 2.0 * rr.rank())]

    @tf.function(jit_compile=True)
    def steps(turns):
        total = 0.0
        for _ in tf.range(turns):
            total += rr.all_reduce(tf.constant(8.0), "sum")
            optimizer.apply(gradients, weights)
        return total

    for turns in (0, 2, 0, 3):
        assert float(steps(tf.constant(turns))) == 8.0 * turns * rr.size()
    for weight, mean in zip(weights, ((rr.size() + 1) / 2, rr.size() - 1), strict=True):
        assert (weight.numpy() == -5 * mean).all()


@on_2_and_3
def test_an_error_that_breaks_nothing_leaves_the_program_usable():
    """Such as of an operator that a dtype does not have."""
    turns = []

    def run(array):
        turns.append(len(turns))
        if not turns[-1]:
            raise ArrayError("cannot do this the first time")
        rr.init().all_reduce(array)
        return [array]

    @tf.function(jit_compile=True)
    def step(value):
        return python_calls.call(rr.init(), "try", run, [value], [((2,), tf.float32)])[0]

    with pytest.raises(tf.errors.UnknownError, match="cannot do this the first time"):
        step(tf.constant([1.0, 2.0]))
    assert step(tf.constant([1.0, 2.0])).numpy().tolist() == [rr.size(), 2.0 * rr.size()]


@pytest.mark.parametrize("eager_steps", [0, 1])
@on_2_and_3
def test_a_step_that_one_rank_alone_compiles_is_refused(eager_steps):
    """It would round differently, and weights would drift apart in silence."""
    model, ring = make_model(), rr.init().split(0)
    optimizer = rr.DistributedOptimizer(SGD(0.1), ring)

    def run(jit):
        model.compile(optimizer, "mse", jit_compile=jit)
        model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0)

    for _ in range(eager_steps):
        run(False)
    with pytest.raises(MismatchError, match="with jit_compile=True"):
        run(rr.rank() == 0)


@on_2_and_3
def test_rows_that_differ_are_refused_and_so_is_every_later_step():
    @tf.function(jit_compile=True)
    def gather(rows):
        return rr.all_gather(rows)

    for rows in (2 + (rr.rank() == 0), 2):
        with pytest.raises(MismatchError, match="Under jit_compile=True"):
            gather(tf.ones((rows, 2)))


def refused(name, value):
    """Replace a function of TensorFlow's, for good; return the error's text."""
    if name:
        mock.patch(f"tensorflow.{name}", return_value=value).start()
    with pytest.raises(ConfigError) as raised:
        tf.function(lambda: refuse_unreachable(rr.init()), jit_compile=True, autograph=False)()
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "environment", "reason"),
    [
        ("", None, {"RINGREDUCE_NATIVE": "0"}, "The native library is hidden"),
        ("config.get_visible_devices", ["GPU"], {}, "compiles for the GPU"),
        ("sysconfig.get_lib", "/nowhere", {}, "no libtensorflow_framework in /nowhere"),
    ],
)
def test_where_it_cannot_be_the_reason_is_said(ranks, name, value, environment, reason):
    """And the way out."""
    ring = ranks.ring(2, OF_ITS_OWN=name, **environment)
    for rank, text in enumerate(ring(refused, name, value)):
        assert text.startswith(f"rank {rank} of 2 cannot reduce gradients inside a function")
        assert reason in text
        assert "compile an inner function" in text
