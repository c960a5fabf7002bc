"""The wrapper on a ring of two: what it does beside plain training."""

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ConfigError, MismatchError
from ringreduce.effects import native
from tests.jobs import run_job
from tests.programs.shared import digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SGD = keras.optimizers.SGD


def make_model(seed=0, is_built=True):
    keras.utils.set_random_seed(seed)
    inputs = [keras.Input((4,))] if is_built else []
    return keras.Sequential([*inputs, keras.layers.Dense(3), keras.layers.Dense(2)])


def fit(model, optimizer, **options):
    """One step; return the new weights."""
    model.compile(optimizer, "mse", **options)
    model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(("is_built", "is_eager"), [(False, False), (True, True)])
@on_ranks(2)
def test_the_first_step_begins_with_rank_0s_weights(is_built, is_eager):
    """Unbuilt, they do not exist before the first batch; the first eager gradients are of others.

    On the same data, rank 0 does what it would do alone.
    """
    model, alone = (make_model(rr.rank(), is_built) for _ in range(2))
    weights = fit(model, rr.DistributedOptimizer(SGD(0.5)), run_eagerly=is_eager)
    for weight, expected in zip(weights, fit(alone, SGD(0.5), run_eagerly=True), strict=True):
        if rr.rank() == 0:
            np.testing.assert_allclose(weight, expected, rtol=1e-6)
        else:
            assert np.abs(weight - expected).max() > 0.01
    return digest(weights)


@on_ranks(2)
def test_sparse_gradients_are_averaged_with_duplicates():
    keras.utils.set_random_seed(30)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(5, 2)])
    model.compile(rr.DistributedOptimizer(SGD(1.0)), "mse", run_eagerly=True)
    before = model.get_weights()[0]
    model.fit(np.array([[rr.rank(), rr.rank(), 4]]), np.zeros((1, 3, 2)), verbose=0)
    # A row's gradient is its value times 2/6 for each occurrence: rows 0 and 1 occur twice on one
    # rank each, row 4 once on both.
    occurrences = np.array([[2 / 2], [2 / 2], [0], [0], [2 / 2]])
    after = model.get_weights()[0]
    np.testing.assert_allclose(after, before * (1 - occurrences * 2 / 6), rtol=1e-5)
    return digest([after])


@on_ranks(2)
def test_ranks_may_trace_at_different_steps():
    """Another batch shape makes one rank trace again where the other does not."""
    model = make_model()
    optimizer = rr.DistributedOptimizer(SGD(0.1))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))

    for number in range(6):
        step(tf.ones((2 + (number // 2 if rr.rank() else number % 3), 4)))
    assert step.experimental_get_tracing_count() == 3
    return digest(model.get_weights())


@on_ranks(2)
def test_jit_compile_works_or_is_refused_with_advice():
    refusal = pytest.raises(ConfigError, match="jit_compile=False")
    with contextlib.nullcontext() if native.library() else refusal:
        fit(make_model(), rr.DistributedOptimizer(SGD(0.1)), jit_compile=True)


@pytest.mark.parametrize("autograph", [True, False])
@on_ranks(2)
def test_a_reduction_inside_a_condition_is_refused(autograph):
    """In a function that AutoGraph has converted, and in one that it has not."""
    variable = tf.Variable([0.0])
    optimizer = rr.DistributedOptimizer(SGD(0.1))

    def converted(rank):
        if rank > 0:
            optimizer.apply([tf.ones(1)], [variable])
        return rank

    def plain(rank):
        def apply():
            optimizer.apply([tf.ones(1)], [variable])
            return rank

        return tf.cond(rank > 0, apply, lambda: rank)

    step = tf.function(converted if autograph else plain, autograph=autograph)
    with pytest.raises(ConfigError, match=r"tf\.cond"):
        step(tf.constant(rr.rank()))


@on_ranks(2)
def test_a_gradient_that_is_none_on_one_rank_fails_this_step_and_all_later_ones():
    variables = make_model().trainable_variables
    optimizer = rr.DistributedOptimizer(SGD(0.1))
    ones = [tf.ones_like(v) for v in variables]
    optimizer.apply(ones, variables)
    gradients = [*ones[:2], None if rr.rank() == 1 else ones[2], ones[3]]
    with pytest.raises(MismatchError) as failure:
        optimizer.apply(gradients, variables)
    for words in ["rank 1"] if rr.rank() == 0 else ["kernel", "no gradient (None)"]:
        assert words in str(failure.value)
    with pytest.raises(MismatchError) as later:
        optimizer.apply(ones, variables)
    assert str(later.value) == str(failure.value)


@pytest.mark.parametrize("size", [2, in_full(4)])
def test_digits_end_to_end(tmp_path, size):
    """The example as a user runs it: equal digests, and it learns."""
    file = tmp_path / "out.json"
    result = run_job(size, ["examples/digits.py", "--epochs", "1", "--json", str(file)])
    assert result.exit_code == 0, result.errors
    out = json.loads(file.read_text())
    assert out["weights_sha256"] == [out["weights_sha256"][0]] * size
    assert out["accuracy"] > 0.8
    assert out["samples_per_s"] > 0
