"""Collectives under Horovod's names: what comes out and its gradients, as Horovod has them."""

import importlib
import importlib.util
import sys
from functools import partial
from types import ModuleType
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce import ArrayError, ConfigError
from tests.ranks import on_ranks
from tests.scope import in_full
from tests.ways import assert_equal, by, outcomes, plain

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]
REWRITES_GRAPHS = True

every_size = pytest.mark.parametrize("size", [in_full(1), 2, in_full(3)])
both_ways = by("eager", "graph")


@both_ways
def test_gradients_under_horovods_names_are_horovods(how):
    """Factors are in them too."""
    size, rank = rr.size(), rr.rank()
    mean = (size + 1) / 2

    def gradient(collective, rows=size):
        def differentiate():
            value = tf.fill((rows, 2), 1.0 + rank)
            with tf.GradientTape() as tape:
                tape.watch(value)
                loss = tf.reduce_sum(collective(value)) * (rank + 1)
            return tape.gradient(loss, value)[:, 0]

        return differentiate

    received = [1.0 + other for other in range(size) for _ in range(other + 1)]
    returned = [1.0 + other for other in range(size) for _ in range(rank + 1)]
    assert_equal(
        how,
        (gradient(hvd.allgather), [mean] * size),
        (gradient(lambda x: hvd.broadcast(x, size - 1)), [mean * (rank == size - 1)] * size),
        (gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)[:1]), np.arange(1, size + 1) * size),
        (gradient(lambda x: hvd.reducescatter(x)[:1]), np.arange(1, size + 1)),
        (
            gradient(lambda x: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=2.0)),
            [6 * mean] * size,
        ),
        # Each rank divides rows of its own number.
        (lambda: hvd.alltoall(tf.fill(((rank + 1) * size,), 1.0 + rank)), received),
        (gradient(hvd.alltoall, (rank + 1) * size), returned),
    )


@both_ways
def test_integers_are_rounded_towards_zero_and_once_as_horovods(how):
    size, rank = rr.size(), rr.rank()
    parts = np.array([[-7 * other - 1, 5 + 2 * other, 9] for other in range(size)])
    own, first = tf.constant(parts[rank]), tf.constant([parts[rank, 0]] * size)
    assert_equal(
        how,
        (partial(hvd.allreduce, own), np.trunc(parts.sum(0) / size)),
        (partial(hvd.allreduce, own, postscale_factor=2.0), np.trunc(parts.sum(0) * 2 / size)),
        (
            partial(hvd.allreduce, own, prescale_factor=0.5, op=hvd.Sum),
            np.trunc(parts * 0.5).sum(0),
        ),
        (
            partial(hvd.reducescatter, first, postscale_factor=1.5),
            np.trunc(parts[:, :1].sum(0) * 1.5 / size),
        ),
    )


@every_size
@on_ranks()
def test_slices_stay_sparse_and_have_no_least_rows():
    rank, size = rr.rank(), rr.size()
    slices = tf.IndexedSlices(tf.constant([[2.0 * size]]), tf.constant([rank]), tf.constant([4, 1]))
    both = [hvd.allreduce(slices), rr.all_reduce(slices)]
    assert all(isinstance(result, tf.IndexedSlices) for result in both)
    rows = np.array([[1.0] if row < size else [0.0] for row in range(4)])
    assert plain(both) == [(2 * rows).tolist(), (2 * size * rows).tolist()]
    with pytest.raises(ArrayError, match=r"cannot reduce tf\.IndexedSlices with op='min'"):
        hvd.allreduce(slices, op=hvd.Min)
    # Means of whole numbers are no whole numbers, also where their shape is not known.
    numbers = tf.IndexedSlices(tf.fill((1, 1), rank + 1), tf.constant([rank]))
    for mean, factor in (
        (hvd.grouped_allreduce([numbers])[0], 1),
        (hvd.allreduce(numbers, postscale_factor=2.0), 2),
    ):
        assert plain(mean.values) == [[factor * (other + 1) / size] for other in range(size)]
        assert plain(mean.indices) == list(range(size))


@by("eager", "graph", "jit")
def test_variables_are_copied_where_that_stands(how):
    rank, size = rr.rank(), rr.size()
    count, flag = tf.Variable(0), keras.Variable([False, False], dtype="bool")

    def copied():
        count.assign(rank + 1)
        hvd.broadcast_variables([count], size - 1)
        values = hvd.broadcast_([count], 0)
        return count * 10, values

    def copied_flags():
        flag.assign([rank == size - 1, False])
        hvd.broadcast_variables([flag], size - 1)
        return tf.identity(flag)

    assert outcomes(how, copied) == [[10 * size, [size]]]
    if how != "jit":
        assert outcomes(how, copied_flags) == [[True, False]]


@every_size
@on_ranks()
def test_horovods_example_may_copy_variables_within_its_function():
    """With AutoGraph, whose errors are long: in a condition it is refused in few words."""
    keras.utils.set_random_seed(rr.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.5 + rr.rank())

    @tf.function
    def training_step(inputs, first_batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(inputs, training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    @tf.function
    def in_a_condition(flag):
        if flag:
            hvd.broadcast_variables(model.variables, root_rank=0)

    for step in range(3):
        training_step(tf.ones((2, 4)) * (rr.rank() + 1), step == 0)
    assert float(optimizer.learning_rate) == 0.5
    if rr.size() > 1:
        with pytest.raises(ConfigError, match=r"tf\.cond"):
            in_a_condition(tf.constant(True))
    # On a rank's own way through the function its number of steps is not yet rank 0's.
    state = [variable for variable in optimizer.variables if variable.path != "iteration"]
    return plain([model.trainable_variables, state])


def test_a_library_that_imports_horovod_finds_ringreduce_in_its_place():
    def ways():
        import horovod
        import horovod.keras as third
        import horovod.tensorflow as first
        import horovod.tensorflow.keras as second
        from horovod.tensorflow import keras as fourth
        from horovod.tensorflow.keras.callbacks import MetricAverageCallback

        return [horovod, first, second, third, fourth], MetricAverageCallback

    with mock.patch.dict(sys.modules):
        hvd.install_as_horovod()
        hvd.install_as_horovod()
        modules, callback = ways()
        assert {module.DistributedOptimizer for module in modules} == {hvd.DistributedOptimizer}
        assert callback is hvd.callbacks.MetricAverageCallback
        assert importlib.import_module("horovod.tensorflow.elastic").run is hvd.elastic.run
        assert importlib.util.find_spec("horovod.tensorflow").name == "horovod.tensorflow"
        with pytest.raises(ModuleNotFoundError, match=r"horovod\.torch"):
            importlib.import_module("horovod.torch")
        with pytest.raises(AttributeError, match="ringreduce run -n N"):
            _ = modules[0].run
    assert "horovod" not in sys.modules


def test_nothing_stands_in_for_a_horovod_that_has_been_imported():
    present = ModuleType("horovod")
    present.__path__ = ["/packages/horovod"]
    with (
        mock.patch.dict(sys.modules, {"horovod": present}),
        pytest.raises(ConfigError, match="/packages/horovod"),
    ):
        hvd.install_as_horovod()


def test_elastic_names_that_are_missing_say_what_to_use():
    with pytest.raises(AttributeError, match=r"rr\.fit\(model"):
        _ = hvd.elastic.CommitStateCallback
    with pytest.raises(AttributeError, match="use State"):
        _ = hvd.elastic.ObjectState
    with pytest.raises(AttributeError, match="use KerasState"):
        _ = rr.elastic.TensorFlowKerasState
