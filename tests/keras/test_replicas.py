"""Weights that differ between ranks are found, named, and end training on all of them."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.layers import Dense
from keras.optimizers import SGD

import ringreduce.keras as rr
from ringreduce import MismatchError
from ringreduce.communicator.process import default_communicator
from ringreduce.testing import ring_of_threads
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = pytest.mark.tensorflow


def variables(**values):
    return [tf.Variable(value, name=name) for name, value in values.items()]


def assert_differ(size, variables_of, *texts):
    """Every rank's error has these texts."""

    def work(comm):
        with pytest.raises(MismatchError) as caught:
            rr.verify_replicas(variables_of(comm.rank), comm)
        assert comm.failure is not None
        return str(caught.value)

    for error in ring_of_threads(size, work):
        assert all(text in error for text in texts)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_equal_variables_of_any_dtype_pass_with_one_collective(size):
    def work(comm):
        numbers = variables(a=np.arange(6.0).reshape(2, 3), b=np.float32(np.nan))
        others = variables(c=tf.constant([1.5, 2], tf.bfloat16), d=[True, False])
        for compared in ([*numbers, *others, *variables(e=np.zeros((0, 4), np.int8))], []):
            before = comm.statistics().collectives
            rr.verify_replicas(compared, comm)
            assert comm.statistics().collectives - before == (size > 1)

    ring_of_threads(size, work)


@pytest.mark.parametrize(
    ("size", "others", "named"),
    [
        (3, {1: 5.0}, "rank 1 has its own value"),
        (3, {0: 5.0}, "rank 0 has its own value"),
        (4, {0: 5.0, 3: 6.0}, "ranks 0, 3 have values of their own"),
        (2, {0: 5.0}, "rank 1 has its own value"),  # a tie: rank 0 is right
        (4, {2: 5.0, 3: 5.0}, "ranks 2, 3 have values of their own"),
        (4, {1: 5.0, 2: 5.0, 3: 6.0}, "ranks 0, 3 have values of their own"),
    ],
)
def test_the_first_variable_and_the_ranks_that_differ_are_named(size, others, named):
    def make(rank):
        value = others.get(rank, 1.0)
        return variables(same=1.0, first=[1.0, value], between=2, second=value)

    text = f"found that {named} of first:0 (float32 of shape (2,) here), and that 2 of 4"
    assert_differ(size, make, text, "a callback that assigns", "a communicator of its own")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (np.zeros(4, np.float32), np.zeros(2, np.float64)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        # As arrays: TensorFlow keeps one constant for Python's 0.0 and -0.0, which are equal.
        (np.array(0.0), np.array(-0.0)),
    ],
)
def test_dtype_shape_and_sign_of_zero_count_as_the_bytes_do(ours, theirs):
    text = "rank 2 has its own value of a:0"
    assert_differ(3, lambda rank: variables(a=theirs if rank == 2 else ours), text)


def test_another_number_of_variables_is_named():
    text = "found 1 variables on rank 1 and 2 on the others"
    assert_differ(3, lambda rank: variables(a=1.0, b=2.0)[: 1 + (rank != 1)], text)


@pytest.mark.parametrize(("every", "batches", "times"), [(1, 4, 5), (2, 5, 3), (10, 5, 1)])
def test_the_callback_compares_every_so_many_batches_and_at_the_end(every, batches, times):
    def work(comm):
        callback = rr.callbacks.VerifyReplicas(every, comm)
        model = keras.Sequential([keras.Input((2,)), Dense(1, kernel_initializer="ones")])
        model.compile(optimizer=SGD(0.1))
        callback.set_model(model)
        before = comm.statistics().collectives
        for batch in range(batches):
            callback.on_train_batch_end(batch)
        callback.on_train_end()
        return comm.statistics().collectives - before

    assert ring_of_threads(2, work) == [times] * 2


def set_rate(model):
    model.optimizer.learning_rate = 0.5


def set_weights(model):
    model.layers[0].kernel.assign_add([[1e-7]])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.layers[2].kernel.assign_add(np.eye(8) * 1e-7), "layer_2/kernel"),
        in_full(lambda model: model.optimizer.iterations.assign_add(1), "iteration"),
        (set_rate, "learning_rate"),
    ],
)
@on_ranks(3, RINGREDUCE_NATIVE="0")
def test_weights_that_one_rank_has_changed_end_training_on_all(change, name):
    batches = []

    def look(batch, logs):
        batches.append(batch)
        if rr.rank() == 1 and batch == 4:
            change(model)

    layers = [Dense(8, name=f"layer_{number}") for number in range(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = rr.DistributedOptimizer(SGD(0.0), bucket_bytes=300)
    model.compile(optimizer, "mse", jit_compile=False)
    ones = tf.data.Dataset.from_tensors((np.ones((2, 8)), np.ones((2, 8)))).repeat()
    lambdas = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    callbacks = [lambdas, rr.callbacks.VerifyReplicas(every=3)]
    text = f"found that rank 1 has its own value of (?s:.*){name}"
    with pytest.raises(MismatchError, match=text) as raised:
        model.fit(ones, steps_per_epoch=20, verbose=0, callbacks=callbacks)
    assert raised.value.peer == 1
    # Found at the next comparison, after the sixth batch.
    assert batches == list(range(6))
    with pytest.raises(MismatchError):
        default_communicator().barrier()


def said_in_fit(hook, change, *, is_inside=True, **options):
    """Train with `Together`, and a change by rank 1; return each rank's error's text, or none."""

    def work(comm):
        model = keras.Sequential([keras.Input((1,)), Dense(1)])
        optimizer = rr.DistributedOptimizer(SGD(0.01), comm, **options)
        model.compile(optimizer, loss="mse", run_eagerly=True)
        optimizer.build(model.trainable_variables)
        hooks = {hook: lambda *_, **__: change(model)} if comm.rank else {}
        sets, x = keras.callbacks.LambdaCallback(**hooks), rr.shard(np.arange(8.0)[:, None], comm)
        inside, before = ([sets], []) if is_inside else ([], [sets])
        together = rr.callbacks.Together(inside, comm)
        try:
            model.fit(x, x, 2, epochs=2, verbose=0, callbacks=[*before, together], shuffle=False)
        except MismatchError as error:
            return str(error)
        return ""

    return ring_of_threads(2, work)


@pytest.mark.parametrize(
    ("change", "text", "hooks"),
    [
        in_full(
            *(set_weights, "rank 1 has its own value of .*dense.*kernel"),
            ["on_epoch_end", "on_train_end"],
        ),
        (
            *(set_rate, "weights have gone apart: the learning rate is 0.01 on rank 0 and 0.5"),
            ["on_epoch_begin", "on_train_batch_begin"],
        ),
    ],
)
def test_what_one_rank_has_changed_is_told_at_the_end(change, text, hooks):
    """Of the epoch where it is the learning rate, else of training."""
    errors = [error for hook in hooks for error in said_in_fit(hook, change)]
    assert all(re.search(text, error) for error in errors)


def test_nothing_is_said_where_ranks_stay_equal_or_may_differ():
    assert said_in_fit("on_epoch_end", set_rate) == ["", ""]
    assert said_in_fit("on_epoch_end", set_rate, is_inside=False) == ["", ""]
    assert said_in_fit("on_epoch_begin", set_rate, strategy=rr.LocalSGD(2)) == ["", ""]
