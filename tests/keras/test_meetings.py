"""Ranks that step alone and meet, against a simulation in numpy: on a ring of two."""

import contextlib
import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ConfigError, PeerLostError
from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.strategies.local_sgd import _Meeting
from ringreduce.testing import ring_of_threads
from tests.models import CountSteps
from tests.programs.shared import built, digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SHAPES = ((3, 2), (5,))
SGD, LossScaleOptimizer = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
LocalSGD, DiLoCo, LambdaCallback = rr.LocalSGD, rr.DiLoCo, keras.callbacks.LambdaCallback


def variables():
    return [tf.Variable(tf.fill(shape, 1.0)) for shape in SHAPES]


def gradients_of(rank, step):
    generator = np.random.default_rng([rank, step])
    return [generator.integers(-8, 9, shape).astype("float64") / 8 for shape in SHAPES]


class Sgd:
    """Keras's, in float64."""

    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.steps = [np.zeros(shape) for shape in SHAPES]

    def stepped(self, weights, gradients):
        def moved(steps):
            pairs = zip(steps, gradients, strict=True)
            return [self.momentum * step - self.rate * gradient for step, gradient in pairs]

        self.steps = moved(self.steps)
        steps = moved(self.steps) if self.nesterov else self.steps
        return [weight + step for weight, step in zip(weights, steps, strict=True)]


def simulated(strategy, steps, samples, settles):
    """The weights of all ranks after `steps`; they settle at the end and after some steps."""
    size = rr.size()
    outer = Sgd(0.7, 0.9, True) if isinstance(strategy, DiLoCo) else Sgd(1.0)
    inner = [Sgd(0.25, 0.5) for _ in range(size)]
    weights = [[np.full(shape, 1.0) for shape in SHAPES] for _ in range(size)]
    weight_of = np.zeros(size)  # Samples of each rank since the last meeting.
    anchors, under_way = None, None

    def begin():
        nonlocal under_way
        changes = [
            sum(weight_of[r] * (anchors[n] - weights[r][n]) for r in range(size)) / weight_of.sum()
            for n in range(len(SHAPES))
        ]
        under_way = changes, list(weights)
        weight_of[:] = 0

    def end():
        nonlocal anchors, under_way
        changes, sent = under_way
        anchors, under_way = outer.stepped(anchors, changes), None
        for r in range(size):
            parts = zip(weights[r], anchors, sent[r], strict=True)
            weights[r] = [weight - begun + anchor for weight, anchor, begun in parts]

    for step in range(steps):
        if anchors is None:
            anchors, count = weights[0], 0
        for r in range(size):
            weight_of[r] += samples(r, step)
            gradients = [each * (samples(r, step) > 0) for each in gradients_of(r, step)]
            weights[r] = inner[r].stepped(weights[r], gradients)
        count += 1
        if under_way and count % strategy.every == strategy.overlap:
            end()
        if count % strategy.every == 0:
            begin()
            if not strategy.overlap:
                end()
        if step + 1 in (*settles, steps):
            if under_way:
                end()
            if weight_of.sum():
                begin()
                end()
            weights, anchors = [anchors] * size, None
    return weights[0]


def wrapped(strategy, inner=None, **options):
    return rr.DistributedOptimizer(inner or SGD(), strategy=strategy, **options)


def stepping(optimizer, variables, way):
    def step(samples, *gradients):
        with contextlib.nullcontext() if samples is None else rr.step_weight(samples):
            optimizer.apply(list(gradients), variables)

    return step if way == "eager" else tf.function(step, jit_compile=way == "jit")


def trained(strategy, steps, gradients):
    """Return variables after eager steps; `gradients`: by the number of the step."""
    mine = variables()
    optimizer = wrapped(strategy, SGD(0.25))
    for number in range(steps):
        optimizer.apply([tf.constant(each, tf.float32) for each in gradients(number)], mine)
    return optimizer, mine


@pytest.mark.parametrize(
    ("strategy", "way", "is_uneven", "steps", "settles"),
    [
        (LocalSGD(3), "eager", False, 10, ()),
        (LocalSGD(4, overlap=2), "eager", False, 10, ()),
        (DiLoCo(4), "eager", False, 10, ()),
        (DiLoCo(4, overlap=3), "eager", False, 10, ()),
        in_full(DiLoCo(4, overlap=3), "jit", False, 10, ()),
        # Ranks count by samples, and settle in between.
        (LocalSGD(3), "eager", True, 10, (5,)),
        (DiLoCo(4, overlap=3), "graph", True, 17, (6,)),
        # Settling right after a meeting is no second one, which momentum would take for a step.
        (DiLoCo(4), "eager", False, 12, (4,)),
        (DiLoCo(4, overlap=3), "eager", False, 12, (4,)),
    ],
)
@on_ranks(2)
def test_it_is_what_the_simulation_gives(strategy, way, is_uneven, steps, settles):
    def samples(rank, step):
        return float((rank + step) % 3) if is_uneven else 1.0

    mine, optimizer = variables(), wrapped(strategy, SGD(0.25, momentum=0.5))
    optimizer.build(mine)
    step = stepping(optimizer, mine, way)
    for number in range(steps):
        count = tf.constant(samples(rr.rank(), number)) if is_uneven else None
        step(count, *(tf.constant(g, tf.float32) for g in gradients_of(rr.rank(), number)))
        if number + 1 in (*settles, steps):
            optimizer.settle()
    expected = simulated(strategy, steps, samples, settles)
    assert max(np.abs(a.numpy() - b).max() for a, b in zip(mine, expected, strict=True)) < 2e-6
    return digest(mine)


@on_ranks(2)
def test_a_meeting_in_each_step_is_an_average_of_gradients():
    def gradients(number):
        return [np.round(8 * each) * rr.size() for each in gradients_of(rr.rank(), number)]

    (_, mine), (_, averaged) = (trained(strategy, 4, gradients) for strategy in (LocalSGD(1), None))
    assert digest(mine) == digest(averaged)


@on_ranks(2)
def test_a_round_begins_with_weights_that_were_loaded():
    """Between two settled states."""
    zeros = [tf.zeros(shape) for shape in SHAPES]
    optimizer, mine = trained(DiLoCo(4), 1, lambda number: zeros)
    optimizer.settle()
    for variable in mine:
        variable.assign(tf.fill(variable.shape, 5.0))
    for _ in range(5):
        optimizer.apply(zeros, mine)
    optimizer.settle()
    assert all((variable.numpy() == 5.0).all() for variable in mine)


def stopping_on_rank_1(model, is_time):
    def stop(batch, logs):
        model.stop_training |= rr.rank() == 1 and is_time(batch)

    return LambdaCallback(on_train_batch_end=stop)


@on_ranks(2)
def test_fit_ends_each_epoch_and_itself_with_equal_weights():
    """Epochs end within rounds; one rank stops in the fifth, and the others go with it."""
    x = np.random.default_rng(0).normal(size=(66, 8)).astype("float32")
    y = x[:, :1] * 2 + 1
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = wrapped(LocalSGD(3, 1), keras.optimizers.Adam(0.05))
    model.compile(optimizer, "mse")
    seen = []

    def look(epoch, logs):
        rr.verify_replicas(model.trainable_variables)
        seen.append(logs["val_loss"])

    options = {"epochs": 8, "validation_data": (x, y), "verbose": 0}
    stop = stopping_on_rank_1(model, lambda batch: len(seen) == 4)
    callbacks = [LambdaCallback(on_epoch_end=look), stop, rr.callbacks.VerifyReplicas(1)]
    losses = rr.fit(model, x, y, 6 * rr.size(), **options, callbacks=callbacks).history["loss"]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert seen[-1] == pytest.approx(rr.evaluate(model, x, y, verbose=0), rel=1e-5)
    optimizer.save_own_variables({})
    return losses, digest(model.weights)


def line(strategy):
    """A model for eager steps, which need no tracing, and its data: an epoch has 4 steps."""
    x = np.random.default_rng(0).normal(size=(22 * rr.size(), 4)).astype("float32")
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(wrapped(strategy, SGD(0.05)), "mse", run_eagerly=True)
    given = {"x": x, "y": x[:, :1] * 2 + 1, "batch_size": 6 * rr.size(), "verbose": 0}
    return built(model, x[:1], x[:1, :1]), given


@on_ranks(2)
def test_the_outer_optimizer_is_saved(tmp_path):
    """Plain Keras reads the file too."""
    path = tmp_path / "model.keras"
    whole, given = line(DiLoCo(3))
    given["shuffle"] = False
    rr.fit(whole, **given)
    rr.on_rank_zero(lambda: whole.save(path))
    assert digest(whole.weights) == digest(keras.models.load_model(path).weights)
    (forgetful, _), (loaded, _) = line(DiLoCo(3)), line(DiLoCo(3))
    forgetful.set_weights(whole.get_weights())
    # Rank 0 alone loads, and saves it again before a step.
    if rr.rank() == 0:
        loaded.load_weights(path)
        loaded.save(path)
        loaded.load_weights(path)
    for model in (whole, loaded, forgetful):
        rr.fit(model, **given)
    assert digest(whole.weights) == digest(loaded.weights) != digest(forgetful.weights)
    return digest(whole.weights)


@on_ranks(2)
def test_ranks_that_step_alone_ask_nothing_of_others():
    """Also where their rows differ in number; of unchecked data others ask how many rows it has."""
    x = np.ones((12 * rr.size() + 1, 3), "float32")
    collectives = []
    for strategy in (LocalSGD(4), None):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(wrapped(strategy, SGD(0.01)), "mse", run_eagerly=True)
        rr.fit(model, x[:3], x[:3, :1], rr.size(), verbose=0, check=False)
        before = rr.init().statistics().collectives
        rr.fit(model, x, x[:, :1], rr.size(), verbose=0, check=False)
        collectives.append(rr.init().statistics().collectives - before)
        rr.verify_replicas(model.weights)
    alone, in_each_step = collectives
    # Three meetings, and what an epoch needs; else two calls in each of 13 steps.
    assert alone < 40
    assert alone + 13 < in_each_step


def fail_in_the_second(epoch, logs):
    if epoch == 1:
        raise RuntimeError("fails here")


@pytest.mark.full
@on_ranks(2)
def test_a_job_that_is_started_again_goes_on_after_the_last_epoch(tmp_path):
    """From a backup, and from the file of that epoch: as if nothing had been."""
    path = tmp_path / "model.keras"
    strategy, backup = DiLoCo(3, 1), {"backup_dir": str(tmp_path / "backup")}
    whole, given = line(strategy)
    rr.fit(whole, **given, epochs=2)
    callbacks = [keras.callbacks.ModelCheckpoint(path), LambdaCallback(fail_in_the_second)]
    with contextlib.suppress(RuntimeError):
        rr.fit(line(strategy)[0], **given, epochs=2, callbacks=callbacks, **backup)
    again, _ = line(strategy)
    assert rr.fit(again, **given, epochs=2, **backup).epoch == [0, 1]
    loaded = rr.load_model(path, strategy=strategy)
    loaded.compile(loaded.optimizer, "mse", run_eagerly=True)
    rr.fit(loaded, **given, epochs=2, initial_epoch=1)
    assert digest(whole.weights) == digest(again.weights) == digest(loaded.weights)
    return digest(whole.weights)


@on_ranks(2)
def test_one_that_stops_between_meetings_takes_all_with_it_at_the_next():
    """After its second step; the ranks meet after their third."""
    (model, given), steps = line(LocalSGD(3)), CountSteps()
    stop = stopping_on_rank_1(model, lambda batch: batch == 1)
    rr.fit(model, **given, epochs=2, callbacks=[steps, stop])
    assert steps.counts == [3]
    assert model.optimizer.is_settled
    return digest(model.weights)


def test_a_meeting_counts_as_reducing_and_blocks_for_as_long_as_it_is_waited_for():
    def work(comm):
        meeting = _Meeting(comm, [(1000,)], "none")
        meeting.begin(np.ones(1000, np.float32), np.float32(1))
        meeting.end()
        done = comm.statistics()
        return done.seconds, done.reducing_s, done.waited_s, done.stopped_s

    for seconds, reducing_s, waited_s, stopped_s in ring_of_threads(2, work):
        assert waited_s > 0
        assert reducing_s > 0
        # Without the barrier that forms the ring.
        assert stopped_s <= max(seconds, waited_s)


def lose_rank_1(when, compression):
    """Rank 1 dies between meetings, or in one; the call that waits for it says so."""
    variables = [tf.Variable(tf.zeros(5003))]
    strategy = LocalSGD(3) if when == "between" else DiLoCo(4, overlap=2)
    optimizer = rr.DistributedOptimizer(SGD(0.5), strategy=strategy, compression=compression)
    optimizer.build(variables)
    step = tf.function(lambda: optimizer.apply([tf.ones(5003)], variables))
    all_reduce, calls = Communicator.all_reduce, []

    def dying(self, *arguments, **options):
        """The first call of a meeting is for the weights of the ranks, the second for data."""
        calls.append(arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return all_reduce(self, *arguments, **options)

    def train():
        for number in range(8):
            if rr.rank() == 1 and (when, number) == ("between", 4):
                os.kill(os.getpid(), signal.SIGKILL)
            if rr.rank() == 1 and (when, number) == ("under way", 1):
                Communicator.all_reduce = dying
            step()

    with pytest.raises(PeerLostError, match="rank 1"):
        train()
    assert int(optimizer.iterations) == 6


@pytest.mark.parametrize(
    ("when", "compression", "transport"),
    [
        ("under way", "none", "auto"),
        in_full("between", "bf16", "zmq"),
        in_full("under way", "int8", "zmq"),
    ],
)
def test_a_rank_killed_between_meetings_or_in_one_is_named(ranks, when, compression, transport):
    ranks.ring(3, lost=[1], RINGREDUCE_TRANSPORT=transport)(lose_rank_1, when, compression)


def saved_between_meetings():
    optimizer, _ = trained(LocalSGD(3), 1, lambda number: [np.ones(shape) for shape in SHAPES])
    optimizer.save_own_variables({})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: LocalSGD(0), "every is 0"),
        (lambda: LocalSGD(3, overlap=3), "overlap is 3; accepted: 0 to every - 1, 2"),
        (
            lambda: wrapped(LocalSGD(3), gradient_accumulation_steps=2),
            "gradient_accumulation_steps=k, not both",
        ),
        (lambda: wrapped(LocalSGD(3), LossScaleOptimizer(SGD())), "needs no loss scale"),
        (lambda: wrapped(DiLoCo(3), SGD(use_ema=True)), "Leave use_ema out"),
        (lambda: wrapped("local"), r"Pass an object, such as rr\.LocalSGD\(50\)"),
        (saved_between_meetings, "of 2 saves its optimizer between two meetings"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_is_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
