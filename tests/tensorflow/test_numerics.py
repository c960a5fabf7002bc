"""NaN and infinity in gradients: the rank, the variable and the step are named, in every bridge."""

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ConfigError, NumericsError
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.tensorflow import GradientBridge
from ringreduce.testing import ring_of_threads
from tests.ranks import on_ranks
from tests.scope import in_full
from tests.ways import needs_xla

PATHS = ["first/kernel", "second/bias", "third/scale"]
# By rank, the gradient, the index and the value.
Bad = dict[int, list[tuple[int, Any, float]]]


def gradients(rank: int, bad: Bad) -> list[Any]:
    """Make gradients of three variables, of which some have such values."""
    values = [np.ones((3, 5), np.float32), np.ones(100, np.float32), np.ones((), np.float32)]
    for which, index, value in bad.get(rank, []):
        values[which][index] = value
    return [tf.constant(value) for value in values]


def run(size: int, mode: str, steps: list[Bad], bucket_bytes: int = 1) -> list[Any]:
    """Return what each rank raised, or the means of its last step."""

    def work(comm: Communicator) -> Any:
        made = GradientBridge(bucket_bytes, check_numerics=mode)
        try:
            for bad in steps:
                means = made.mean(comm, gradients(comm.rank, bad), PATHS)
        except NumericsError as error:
            assert comm.failure is not None
            return error
        return [mean.numpy() for mean in means]

    return ring_of_threads(size, work)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("which", "index", "value", "text"),
    [
        (0, (1, 2), np.nan, "nan at [1, 2] of first/kernel: float32 of shape (3, 5)"),
        (1, 99, -np.inf, "-inf at [99] of second/bias: float32 of shape (100,)"),
        (2, (), np.inf, "inf at [] of third/scale: float32 of shape ()"),
    ],
)
def test_every_rank_raises_the_error_that_names_whose_it_was(
    which, index, value, text, bucket_bytes
):
    errors = run(3, "raise", [{}, {}, {1: [(which, index, value)]}], bucket_bytes)
    for rank, error in enumerate(errors):
        assert isinstance(error, NumericsError)
        assert (error.rank, error.size, error.peer) == (rank, 3, 1)
        assert error.origin == (None if rank == 1 else 1)
        assert f"rank 1 of 3 has {text} as its own gradient in step 2" in str(error)
        assert "that rank's batch" in str(error)


def test_the_first_of_several_is_named():
    bad = [(0, (2, 4), np.inf), (0, (1, 3), np.nan), (0, (1, 4), np.nan)]
    for error in run(2, "raise", [{0: bad}]):
        assert "rank 0 of 2 has nan at [1, 3] of first/kernel" in str(error)


def test_finite_gradients_pass_in_every_mode():
    for mode in ("warn", "raise", "off"):
        for means in run(2, mode, [{}]):
            assert all((mean == 1).all() for mean in means)


def test_a_warning_comes_once_and_again_at_the_tenth_bad_step(caplog):
    bad = {1: [(1, 7, np.nan)]}
    with caplog.at_level(logging.WARNING, "ringreduce"):
        results = run(2, "warn", [{}, *[bad] * 12])
    for means in results:
        assert np.isnan(means[1][7])
        assert np.isfinite(means[1][:7]).all()
    own = [record.getMessage() for record in caplog.records]
    assert len(own) == 2  # Of a rank whose own gradients are finite none.
    assert own[0].startswith("[1/2] rank 1 of 2 has nan at [7] of second/bias")
    assert "as its own gradient in step 1," in own[0]
    assert "as its own gradient in step 10," in own[1]
    assert "bad step 10 of this rank" in own[1]


def test_off_says_nothing(caplog):
    with caplog.at_level(logging.WARNING, "ringreduce"):
        results = run(2, "off", [{0: [(0, (0, 0), np.nan)]}])
    assert all(np.isnan(means[0][0, 0]) for means in results)
    assert not caplog.records


def test_a_sum_that_overflows_is_told_from_a_bad_gradient():
    largest = float(np.finfo(np.float32).max)
    for error in run(2, "raise", [{rank: [(1, 3, largest)] for rank in range(2)}]):
        assert isinstance(error, NumericsError)
        assert "inf at [3] of second/bias" in str(error)
        assert "though each rank's was finite: their sum overflows float32" in str(error)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_means_of_large_halves_are_finite(dtype):
    def work(comm: Communicator) -> Any:
        made = GradientBridge(1 << 20, check_numerics="raise")
        largest = tf.fill((50,), tf.cast(60000.0, dtype))
        return made.mean(comm, [largest], ["large"])[0]

    for mean in ring_of_threads(2, work):
        assert bool(tf.reduce_all(tf.math.is_finite(tf.cast(mean, tf.float32))))


def test_what_lies_between_the_gradients_of_a_bucket_does_not_count():
    from ringreduce.pure.buckets import BucketPlan, GradientSpec
    from ringreduce.tensorflow.numerics import NumericsCheck

    specs = [GradientSpec(path, (3,), "float32") for path in ("one", "other")]
    plan = BucketPlan.make(specs, {"float32": 4}, 1 << 20)
    [bucket] = plan.buckets
    values = np.full(bucket.count, np.nan, np.float32)
    for slot in bucket.slots:
        values[slot.start : slot.start + slot.count] = 1.0
    check = NumericsCheck("raise")
    check.begin_step()
    parts = [(plan.gradients[slot.gradient], slot.start, None) for slot in bucket.slots]
    check.check_own(None, values, parts)  # type: ignore[arg-type]  not asked here


def test_another_mode_is_refused():
    with pytest.raises(ConfigError, match="check_numerics is 'maybe'; accepted: warn, raise, off"):
        GradientBridge(1, check_numerics="maybe")


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [pytest.param(True, marks=needs_xla), in_full(False)])
@on_ranks(3)
def test_a_poisoned_gradient_comes_out_of_fit_as_our_error_on_all_ranks(jit_compile):
    poison = tf.Variable(1.0)

    @tf.custom_gradient
    def poisoned(x):
        return tf.identity(x), lambda upstream: upstream * poison

    class Poisoned(keras.layers.Layer):
        def call(self, x):
            return poisoned(x)

    def set_poison(batch, logs):
        if rr.rank() == 2 and batch == 3:
            poison.assign(float("nan"))

    layers = [keras.layers.Dense(8, name="near"), Poisoned(), keras.layers.Dense(8, name="far")]
    model = keras.Sequential([keras.Input((8,)), *layers], name="model")
    optimizer = rr.DistributedOptimizer(
        keras.optimizers.SGD(0.0), bucket_bytes=300, check_numerics="raise"
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    ones = tf.data.Dataset.from_tensors((np.ones((2, 8)), np.ones((2, 8)))).repeat()
    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=set_poison)
    for action in (
        lambda: model.fit(ones, steps_per_epoch=9, verbose=0, callbacks=[callback]),
        default_communicator().barrier,
    ):
        with pytest.raises(NumericsError) as raised:
            action()
        assert raised.value.peer == 2
        assert "rank 2 of 3 has nan at [" in str(raised.value)
        # The layer behind the poison is well.
        assert "] of model/near/" in str(raised.value)
        assert "in step 3, in gradient reduction" in str(raised.value)
