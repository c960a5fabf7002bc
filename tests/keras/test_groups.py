"""Groups train as jobs of their own do, whatever the other groups of the job do.

Two groups, of a job of four ranks, train other models on other data, with everything of
`ringreduce.keras` that takes a communicator. A job of two, to which they are compared, passes none.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce import ArrayError, ConfigError, MismatchError
from tests.programs.shared import built, digest
from tests.ranks import on_ranks
from tests.scope import in_full
from tests.ways import WAYS, plain, wrapped

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

REWRITES_GRAPHS = True
SGD, Dense = keras.optimizers.SGD, keras.layers.Dense
in_each_way = pytest.mark.parametrize("how", WAYS)


class Job:
    """This rank's half of a job of four; or a job of two, that does what half `number` does."""

    def __init__(self, number=None):
        comm = rr.init()
        group = comm.split(comm.rank // 2) if comm.size == 4 else None
        self.ring, self.over = group or comm, {"communicator": group}
        self.number = comm.rank // 2 if group else number
        # Rows that do not divide evenly, and other amounts of everything on each pair.
        self.count, self.width = 21 + 4 * self.number, 3 + self.number
        generator = np.random.default_rng(self.number)
        inputs = generator.integers(-4, 5, (self.count, self.width)).astype("float32")
        self.arrays = inputs, inputs[:, :2] ** 2

    def model(self, **options):
        keras.utils.set_random_seed(self.number)
        layers = [
            *(Dense(4, activation="tanh"), *[Dense(3)] * self.number),
            rr.SyncBatchNormalization(momentum=0.5, **self.over),
            *(keras.layers.Dropout(0.25), Dense(2)),
        ]
        model = keras.Sequential([keras.Input((self.width,)), *layers])
        optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.01), **self.over)
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
        return built(model, np.zeros((1, self.width)), np.zeros((1, 2)))

    def callbacks(self):
        return [
            hvd.callbacks.LearningRateWarmupCallback(0.02, 1, **self.over),
            rr.callbacks.VerifyReplicas(2, **self.over),
            hvd.callbacks.BroadcastGlobalVariablesCallback(1, **self.over),
            keras.callbacks.EarlyStopping("val_loss", patience=1),
        ]


def fitted(number, folder):
    job = Job(number)
    model, data, over = job.model(), job.arrays, job.over
    options = {"validation_split": 0.3, "verbose": 0, "callbacks": job.callbacks(), **over}
    history = rr.fit(model, *data, batch_size=8, epochs=2 + job.number, **options).history
    weights = digest(model.get_weights())
    evaluated = rr.evaluate(model, *data, return_dict=True, **over)
    predicted = digest([rr.predict(model, data[0], batch_size=4, **over)])
    # Ranks of a group have equal weights, but for moving averages of layers of their own.
    path = folder / f"{rr.size()}.{rr.rank()}.keras"
    model.save(path)
    again = rr.load_model(path, sync_batch_normalization=True, **over)
    rr.fit(again, *data, batch_size=8, verbose=0, **over)
    return weights, history, evaluated, predicted, digest(again.get_weights())


def joined(number, _):
    job = Job(number)
    model = job.model(jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(job.arrays)
    data = rr.shard(data, even=False, **job.over).batch(4)
    options = {"epochs": 2, "verbose": 0, "callbacks": job.callbacks()[:2], **job.over}
    history = rr.fit(model, data, per_rank_data=True, **options).history
    return digest(model.get_weights()), history


def in_a_loop(number, _):
    job = Job(number)
    ring, over, (inputs, targets) = job.ring, job.over, job.arrays
    keras.utils.set_random_seed(ring.rank)
    model = keras.Sequential([keras.Input((job.width,)), Dense(2)])
    optimizer = SGD(0.01)
    optimizer.build(model.trainable_variables)
    rr.broadcast_variables(model.trainable_variables, 1, **over)
    rr.verify_replicas(model.trainable_variables, **over)
    order = ring.broadcast_object(np.random.permutation(job.count).tolist())
    rows = order[ring.rank :: ring.size]

    def step(inputs, targets):
        with rr.DistributedGradientTape(**over) as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with rr.step_weight(len(rows), **over):
        step(inputs[rows], targets[rows])
    dataset = tf.data.Dataset.from_tensor_slices((inputs[rows], targets[rows])).batch(3)
    for (some, others), _ in rr.joined(dataset, **over):
        step(some, others)
    weights = digest(model.get_weights())
    generator = keras.random.SeedGenerator(job.number)
    rr.fold_seeds(generator, **over)
    zero = rr.on_rank_zero(lambda: ring.rank, **over)
    return weights, order, plain(generator.state), zero


@pytest.mark.parametrize(
    ("train", "numbers"),
    [(in_a_loop, [1]), in_full(in_a_loop, [0]), *(in_full(t, [0, 1]) for t in (fitted, joined))],
)
def test_a_group_trains_as_a_job_of_its_own(ranks, tmp_path, train, numbers):
    found = ranks(4, train, None, tmp_path)
    for number in numbers:
        assert found[2 * number : 2 * number + 2] == ranks(2, train, number, tmp_path)
    weights = [results[0] for results in found]
    assert weights[0] == weights[1] != weights[2] == weights[3]


@on_ranks(4)
def test_a_layer_of_a_model_may_communicate():
    """Keras traces a layer for its shapes, in a graph that never runs."""
    job = Job()
    exchange = keras.layers.Lambda(lambda rows: rr.all_to_all(rows, **job.over))
    model = keras.Sequential([keras.Input((3,)), exchange, keras.layers.Flatten()])
    assert plain(model(tf.fill((2, 3), float(job.ring.rank)))) == [[0.0] * 3, [1.0] * 3]
    assert model.output_shape == (None, 3)


@in_each_way
@on_ranks(4)
def test_collectives_of_the_job_and_of_a_group_take_turns(how):
    """One after the other, with gradients."""
    job, rank, value = Job(), rr.rank(), tf.constant([1.0, 2.0])

    def of_both(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            whole = rr.all_reduce(value * (rank + 1.0))
            parts = rr.all_to_all(whole + value * rank, **job.over)
            loss = tf.reduce_sum(rr.all_reduce(parts**2, **job.over)) + tf.reduce_sum(whole)
        return whole, parts, tape.gradient(loss, value)

    whole, parts, gradient = plain(wrapped(how, of_both)(value))
    # The job's sum of v = (1, 2) is 10 v; rank r adds r v and exchanges halves with its partner.
    assert whole == [10.0, 20.0]
    first = 2 * (rank // 2)
    assert parts == [(10.0 + other) * (rank % 2 + 1) for other in (first, first + 1)]

    def by_sum(element):
        # Of rank r, which exchanges 10 v + r v: twice what it gives to its pair's sum, of which
        # both members have one; and the job's sum itself, once on each rank.
        return sum(4.0 * (10 + r) * element + 1 for r in range(4))

    assert gradient == [
        (rank + 1) * by_sum(element) + rank * 4.0 * (10 + rank) * element for element in (1, 2)
    ]


def in_stages(weight, job):
    """Two tensors go from the first rank to the second, whose loss is of both."""
    with tf.GradientTape() as tape:
        tape.watch(weight)
        if job.ring.rank == 0:
            both = [rr.send(weight * (tag + 1.0), 1, tag=tag, **job.over) for tag in (5, 6)]
            loss = tf.reduce_sum(weight) + both[0] + 7.0 * both[1]
        else:
            spec = tf.TensorSpec(weight.shape, weight.dtype)
            first, second = (rr.recv(spec, 0, tag=tag, **job.over) for tag in (5, 6))
            loss = tf.reduce_sum(first**2 * weight) + 3.0 * tf.reduce_sum(second)
    return loss, tape.gradient(loss, weight)


@in_each_way
@on_ranks(4)
def test_gradients_of_tensors_between_two_ranks_go_back_to_the_sender(how):
    job, value = Job(), tf.constant([1.0, 2.0])
    run = wrapped(how, lambda weight: in_stages(weight, job))
    # With v = (1, 2): 6 v and 7 v are sent; the receiver's loss is the sum of (6 v)^2 v + 3 (7 v).
    sender = [3.0, [1.0 + 2 * 6 * v * v * 6 + 3 * 7 for v in (1, 2)]]
    receiver = [36.0 * (1 + 8) + 21.0 * 3, [36.0 * v * v for v in (1, 2)]]
    for _ in range(2):  # A traced function runs again from its trace.
        assert plain(run(value)) == (receiver if job.ring.rank else sender)


def refused(error, text, action):
    with pytest.raises(error, match=re.escape(text)) as raised:
        action()
    # One of a group may receive the other's error first.
    assert str(raised.value).startswith(f"rank {rr.rank()} of 4")


@on_ranks(4)
def test_what_cannot_be_sent_or_received_is_refused():
    job, value = Job(), tf.constant([1.0, 2.0])
    text = "got rank 2 to send to or receive from in a group"
    refused(ArrayError, text, lambda: rr.send(value, 2, **job.over))
    unknown, other = tf.TensorSpec((None, 2)), 1 - job.ring.rank
    refused(ArrayError, "of shape (None, 2)", lambda: rr.recv(unknown, other, **job.over))
    with tf.GradientTape() as outer:
        outer.watch(value)
        _, gradient = in_stages(value, job)
    if job.ring.rank == 0:
        with pytest.raises(ConfigError, match="a gradient of a gradient of send or recv"):
            outer.gradient(gradient, value)


def averages_of_all(job):
    model = job.model()
    model.compile(optimizer=rr.DistributedOptimizer(SGD(0.1)), loss="mse")
    rr.fit(model, *job.arrays, **job.over)


def normalizes_over_all(job):
    model = keras.Sequential([keras.Input((job.width,)), rr.SyncBatchNormalization(), Dense(2)])
    model.compile(optimizer=rr.DistributedOptimizer(SGD(0.1), **job.over), loss="mse")
    model.fit(*job.arrays, verbose=0, callbacks=[rr.callbacks.Together([], **job.over)])


@pytest.mark.parametrize(
    ("train", "name"),
    [(averages_of_all, "DistributedOptimizer"), (normalizes_over_all, "SyncBatchNormalization")],
)
@on_ranks(4)
def test_what_averages_over_all_is_refused_where_a_group_trains(train, name):
    refused(ConfigError, f"{name}(..., communicator=", lambda: train(Job()))


@on_ranks(4)
def test_errors_name_the_ranks_of_the_job():
    job, first = Job(), rr.rank() // 2 * 2
    refused(ArrayError, "got root 3", lambda: rr.broadcast(tf.ones(2), 3, **job.over))
    model, rows = job.model(), job.arrays[0][: 4 + job.ring.rank]
    text = f"different data: rows is 4 on rank {first} and 5 on rank {first + 1}"
    refused(MismatchError, text, lambda: rr.predict(model, rows, **job.over))
    text = "process sets: ranks is [0] on rank 0 and [1] on rank 1"
    refused(MismatchError, text, lambda: hvd.add_process_set([rr.rank()]))


def result_of_apply(ours):
    weight = keras.Variable([1.0 * rr.rank()])
    hvd.DistributedOptimizer(SGD(1.0), **ours).apply([[1.0]], [weight])
    return weight


def gradient_by_source(ours):
    source = keras.Variable([2.0 * rr.rank()])
    with hvd.DistributedGradientTape(**ours) as tape:
        loss = (rr.rank() + 1.0) * source**2
    return tape.gradient(loss, source)


@on_ranks(4)
def test_process_sets_do_what_horovods_do():
    """Of the even ranks and of the odd ones."""
    rank, added, other = rr.rank(), hvd.add_process_set([2, 0]), hvd.ProcessSet((1, 3))
    refused(
        ConfigError,
        "ProcessSet([1, 3]) has not been added, or was removed",
        lambda: hvd.barrier(other),
    )
    hvd.add_process_set(other)
    own, other = (other, added) if rank % 2 else (added, other)
    first, last = own.ranks
    number, total, ours = rank // 2, float(first + last), {"process_set": own}
    assert [first, last] == [rank % 2, rank % 2 + 2]
    rows = tf.fill((3, 2), float(rank))
    with tf.GradientTape() as tape:
        tape.watch(rows)
        gathered = hvd.allgather(rows, **ours)
    layer = hvd.SyncBatchNormalization(momentum=0.0, **ours)
    layer(rows, training=True)
    hvd.barrier(own)
    of_first, of_last = [float(first)] * 2, [float(last)] * 2
    exchanged = [[of_first] * (number + 1) + [of_last] * (number + 1), [number + 1] * 2]
    variable = tf.Variable(float(rank))
    for found, expected in (
        (hvd.allreduce(rows[:1], **ours), [[total / 2] * 2]),
        (hvd.grouped_allreduce([rows[:1]] * 2, average=False, **ours), [[[total] * 2]] * 2),
        (gathered, [of_first] * 3 + [of_last] * 3),
        (tape.gradient(gathered, rows), [[1.0] * 2] * 3),
        (hvd.alltoall(rows, [1, 2], **ours), exchanged),
        (hvd.alltoall(rows[:2], **ours), [of_first, of_last]),
        (hvd.broadcast(rows[:1], last, **ours), [of_last]),
        (hvd.reducescatter(rows[:2], op=hvd.Sum, **ours), [[total] * 2]),
        (hvd.allgather_object(rank, **ours), [first, last]),
        (hvd.broadcast_object(rank, last, **ours), last),
        (hvd.broadcast_([variable], last, **ours), [last]),
        (result_of_apply(ours), [first - 1.0]),  # The set's first rank has its value.
        # Its variable too; the other's gradient is left out of the first step.
        (gradient_by_source(ours), [(first + 1) * 4.0 * first]),
        (layer.moving_mean, [total / 2] * 2),
    ):
        assert plain(found) == expected
    assert (own.rank(), own.size(), own.included(), other.included()) == (number, 2, True, False)
    ids = [one.process_set_id for one in (own, other, hvd.global_process_set)]
    assert ids == [first + 1, 2 - first, 0]
    assert [int(hvd.size_op(one)) for one in ids] == [2, 2, 4]
    assert [int(hvd.process_set_included_op(one)) for one in ids] == [1, 0, 1]
    text, sets = "in which it is not", {"process_set": other}
    refused(ConfigError, text, lambda: hvd.allreduce(rows, **sets))
    refused(ConfigError, text, lambda: hvd.DistributedOptimizer(None, **sets))
    text = "which is not in ProcessSet("
    refused(ConfigError, text, lambda: hvd.broadcast(rows, other.ranks[0], **ours))
    text = "cannot add ProcessSet([3, 4]): ranks are 0 to 3"
    refused(ConfigError, text, lambda: hvd.add_process_set([3, 4]))
    removed = [hvd.remove_process_set(one) for one in (hvd.global_process_set, own, own)]
    assert removed == [False, True, False]
    refused(ConfigError, "has not been added, or was removed", lambda: hvd.barrier(own))
    with pytest.raises(ConfigError, match=f"process_set_id={ids[0]}"):
        hvd.size_op(process_set_id=ids[0])
