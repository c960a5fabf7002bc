"""Loops of one's own go back to the newest commit when ranks are lost."""

import os
import signal
import threading
import time
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ConfigError, PeerLostError, PeerTimeoutError, RendezvousError
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.reforming import answer_others
from ringreduce.keras.elastic import loops
from ringreduce.keras.elastic.leaving import Looks
from ringreduce.keras.elastic.recovery import go_on
from ringreduce.keras.repeating import Repeating
from ringreduce.tensorflow.kept import kept
from ringreduce.testing import ring_of_threads
from tests.processes import wait_until
from tests.programs.shared import difference, digest, error_of
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

BATCH, STEPS, EPOCHS = 12, 5, 2
ALL = [[epoch, batch] for epoch in range(EPOCHS) for batch in range(STEPS)]


def made(wrap):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(wrap(keras.optimizers.Adam(0.05)), "mse")
    return model


def stepping(model, way):
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)

    return step if way == "eager" else tf.function(step, jit_compile=way == "xla")


def trained(way, faults=(), runs=1, fits=False):
    """Train by a loop in which ranks are lost; return how it went, compared with one process."""
    ring, points, trail, resets, results = rr.init(), [], [], [], []

    def pass_by(point):
        """Lose this rank, if it is to be lost here; or wait until others have lost a rank."""
        points.append(point)
        for rank, where, number, how in faults:
            if (rank, where, number) == (own_rank, point, points.count(point)):
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                wait_until(lambda: ring.failure, "the loss of a rank")
                raise ring.failure

    def passing(method, before="", after=""):
        def call(*arguments):
            pass_by(before)
            result = method(*arguments)
            pass_by(after)
            return result

        return call

    own_rank = ring.rank
    Looks.is_due = lambda *_: False  # Here some ranks wait at a commit, and others not.
    Communicator.broadcast_object = passing(Communicator.broadcast_object, before="sync")
    Communicator.barrier = passing(Communicator.barrier, after="barrier")
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    batches = [slice(start, start + BATCH) for start in range(0, len(x), BATCH)]
    model, alone = made(rr.DistributedOptimizer), made(lambda optimizer: optimizer)
    alone.set_weights(model.get_weights())
    step = stepping(model, way)
    model.layers[0].bias.assign([float(own_rank)])
    state = rr.elastic.KerasState(model, batch=0, epoch=own_rank, seen=[])
    if own_rank == 0:
        model.layers[0].bias.assign([7.0])  # After the state was made.

    @rr.elastic.run
    def train(state, epochs):
        for state.epoch in range(state.epoch, epochs):  # noqa: B020
            while state.batch < STEPS:
                own = [array[batches[state.batch]][rr.rank() :: rr.size()] for array in (x, y)]
                pass_by("step")
                with rr.step_weight(len(own[0])):
                    step(*own)
                pass_by("end")
                trail.append([state.epoch, state.batch, rr.size()])
                state.batch += 1
                state.seen.append(state.batch)
                if state.batch % 2 == 0:
                    pass_by("commit")
                    state.commit()
                    pass_by("committed")
            state.batch = 0
        pass_by("return")
        return "done"

    def train_all():
        for run in range(1, runs + 1):
            results.append(train(state, epochs=EPOCHS * run))
            state.epoch += 1

    state.register_reset_callbacks([lambda: resets.append([state.epoch, state.batch, rr.size()])])
    said = error_of(train_all) | {"results": results, "trail": trail, "resets": resets}
    if fits:
        fit = rr.elastic.run(lambda state: rr.fit(model, x, y, verbose=0))
        said["fit"] = error_of(lambda: fit(state))["text"]
    if not said["error"]:
        alone.layers[0].bias.assign([7.0])
        step = stepping(alone, "eager")
        for rows in batches * EPOCHS * runs:
            step(x[rows], y[rows])
        said["difference"] = difference(model, alone)
    iterations = int(model.optimizer.iterations.numpy())
    said |= {"seen": state.seen, "iterations": iterations, "members": list(ring.members)}
    return said | {"digest": digest(model.variables)}


def said(ranks, size, left, least=1, **case):
    """What those say that are left."""
    lost = sorted({*range(size)} - {*left})
    environment = {} if least is None else {"RINGREDUCE_ELASTIC": str(least)}
    ring = ranks.ring(size, lost=lost, RINGREDUCE_TIMEOUT_S="20", **environment)
    found = [fact for fact in ring(trained, **case) if fact]
    assert len({fact["digest"] for fact in found}) == 1
    return found


@pytest.mark.parametrize(
    ("way", "size", "faults", "trail"),
    [
        # One is lost in a step, one while the others recover, one when all have ended.
        (
            *("eager", 4),
            [[3, "step", 4, "kill"], [0, "sync", 2, "kill"], [1, "return", 1, "kill"]],
            [(4, ALL[:3]), (2, ALL[2:])],
        ),
        # One that has not made a commit gets another's; a commit that is lost is not gone back to.
        (
            *("graph", 4),
            [
                *([2, "end", 4, "kill"], [0, "commit", 2, "wait"]),
                *([3, "committed", 3, "kill"], [0, "commit", 3, "wait"], [1, "commit", 3, "wait"]),
            ],
            [(4, ALL[:4]), (3, ALL[4:7]), (2, ALL[4:])],
        ),
        in_full("xla", 2, [[0, "step", 4, "kill"]], [(2, ALL[:3]), (1, ALL[2:])]),
    ],
)
def test_they_end_as_one_process_does(ranks, way, size, faults, trail):
    left = sorted({*range(size)} - {rank for rank, *_, how in faults if how == "kill"})
    found = said(ranks, size, left, way=way, faults=faults, fits=way == "graph")
    for fact in found:
        assert fact["results"] == ["done"], fact
        assert fact["trail"] == [[*at, count] for count, steps in trail for at in steps]
        assert fact["difference"] < 1e-6
        assert fact["iterations"] == len(ALL)
        assert fact["seen"] == [1, 2, 3, 4, 5] * 2
        assert fact["members"] == left
        assert fact["resets"][-1][2] == trail[-1][0]
        if way == "graph":
            assert "has rr.elastic.run around it" in fact["fit"]


@pytest.mark.full
def test_a_rank_that_has_missed_the_end_ends_as_the_others(ranks):
    faults = [[2, "barrier", 1, "kill"], [1, "barrier", 1, "wait"]]
    found = said(ranks, 3, [0, 1], least=3, way="eager", faults=faults)
    assert [fact["results"] for fact in found] == [["done"]] * 2


@pytest.mark.full
def test_a_rank_that_has_missed_the_end_goes_on_with_the_next_loop(ranks):
    """Rank 0 is in that when it is met."""
    faults = [[2, "barrier", 1, "kill"], [1, "barrier", 1, "wait"]]
    found = said(ranks, 3, [0, 1], way="eager", faults=faults, runs=2)
    second = [[epoch + 2, batch, 2] for epoch, batch in ALL]
    for fact in found:
        assert fact["results"] == ["done"] * 2, fact
        assert fact["trail"] == [[*at, 3] for at in ALL] + second
        assert fact["difference"] < 1e-6


@pytest.mark.full
def test_too_few_do_not_make_the_end_of_a_loop_again(ranks):
    """Rank 0 has returned from it, and rank 1 has not."""
    faults = [[2, "return", 1, "kill"], [1, "return", 1, "wait"]]
    found = said(ranks, 3, [0, 1], least=3, way="eager", faults=faults)
    assert [fact["error"] for fact in found] == ["RendezvousError"] * 2


def test_too_few_say_who_was_lost(ranks):
    found = said(ranks, 3, [0, 1], least=3, way="eager", faults=[[2, "step", 4, "kill"]])
    for rank in (0, 1):
        assert found[rank]["error"] == "RendezvousError"
        assert (
            f"rank {rank} of 3 has 2 ranks left without rank 2, lost at batch=3, epoch=0, and was "
            "to go on with at least 3. See the log of rank 2. The state is that of the newest"
        ) in found[rank]["text"]


def test_a_job_that_is_not_elastic_begins_alike_and_ends_with_the_loss(ranks):
    found = said(ranks, 2, [0], least=None, way="eager", faults=[[1, "step", 4, "kill"]])
    assert found[0]["error"] == "PeerLostError"
    assert found[0]["trail"] == [[*at, 2] for at in ALL[:3]]


def test_a_state_is_what_was_saved_last():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
    state = rr.elastic.KerasState(model, keras.optimizers.Adam(), epoch=3, seen=[1])
    variables = [*state.optimizer.variables, *model.variables]
    before = [np.array(each.numpy()) for each in variables]
    assert len(before) == 2 + 4 + 2 + 1

    def changed():
        state.epoch, state.other = 4, 5
        state.seen.append(2)
        for variable in variables:
            variable.assign(variable + 1)

    for _ in range(2):
        changed()
        state.restore()
        assert (state.epoch, state.seen, state.other) == (3, [1], 5)
        for variable, value in zip(variables, before, strict=True):
            assert np.array_equal(variable.numpy(), value)
    changed()
    state.commit()
    changed()
    state.restore()
    assert (state.epoch, state.seen) == (4, [1, 2])
    assert int(state.optimizer.iterations.numpy()) == 1


def test_what_cannot_be_made_again_is_refused_at_the_start(monkeypatch):
    with pytest.raises(ConfigError, match=r"without weights .* keras\.Input"):
        rr.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")

    def work(comm):
        layers = [keras.Input((1,)), keras.layers.Dense(1), rr.SyncBatchNormalization()]
        optimizer = rr.DistributedOptimizer(
            keras.optimizers.SGD(), comm.split(0), strategy=rr.LocalSGD(5)
        )
        with pytest.raises(ConfigError, match=r"=LocalSGD.*; SyncBatchNormalization; a group"):
            rr.elastic.KerasState(keras.Sequential(layers), optimizer)

    ring_of_threads(1, work)


def test_what_a_lost_rank_would_take_with_it_is_refused_by_all_that_see_it(monkeypatch):
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")
    default = threading.local()
    monkeypatch.setattr(loops, "default_communicator", lambda: default.ring)

    def work(comm):
        default.ring = comm
        layer = rr.ColumnParallelDense(2, communicator=comm)
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(), comm)
        with pytest.raises(ConfigError, match=r"has variables in pieces=.*kernel"):
            rr.elastic.KerasState(model, optimizer)
        with pytest.raises(ConfigError, match=r"has variables in pieces=.*kernel"):
            rr.elastic.run(lambda state: None)(rr.elastic.State(model.variables))
        kept(comm, Repeating).by = lambda meeting: meeting()
        one = tf.Variable(1.0)
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(), comm, local_variables=[one])
        with pytest.raises(ConfigError, match="has local_variables=1"):
            optimizer.apply([tf.constant(1.0)], [one])
        for text, options in (("op=", {"op": "sum"}), ("local_v", {"local_variables": [one]})):
            with rr.DistributedGradientTape(communicator=comm, **options) as tape:
                loss = one * 2
            with pytest.raises(ConfigError, match=f"has {text}"):
                tape.gradient(loss, [one])

    ring_of_threads(2, work)


def anew(ring, error, stays, in_call=None):
    """Fail with `error` on rank 2; all go on, rank 0 once it does not stay any more.

    It learns of it in user code; or, with the event `in_call`, in a call that has its result.
    """
    answer_others(ring, has_ended=False)
    ring.barrier()
    if ring.rank == 0 and in_call:
        known = partial(wait_until, lambda: in_call.set() or ring.failure, "the failure")
        ring._session.calls.call("barrier", 0, known)
    if ring.rank == 2:
        assert in_call is None or in_call.wait(30)
        ring._session.fail(error)
    failed = None
    while failed is None or (ring.rank == 0 and stays(time.monotonic() - failed)):
        time.sleep(0.01)
        failed = failed or (ring.failure and time.monotonic())
    where = 1, "in step 1", ring.barrier, lambda: ""
    go_on(ring, ring.failure, *where, at_end=lambda: False)
    return ring.members


@pytest.mark.parametrize("is_in_call", [in_full(False), True])
def test_a_rank_that_has_lost_connections_in_a_callback_is_waited_for(is_in_call):
    """Longer than one of which nothing is known. It is told of its own loss."""
    error = PeerLostError("lost rank 0: its connection has ended, so it died", peer=0)
    in_call = threading.Event() if is_in_call else None

    def work(ring):
        return anew(ring, error, lambda seconds: seconds < 5.0, in_call)

    options = {"join_timeout_s": 4.0, "transport": "zmq"}
    assert ring_of_threads(3, work, **options) == [(0, 1, 2)] * 3


def test_a_rank_whose_time_is_over_is_not_waited_for():
    error = PeerTimeoutError("waited 600 s for rank 0", peer=0)
    gone_on, told = threading.Event(), threading.Event()

    def work(ring):
        if ring.rank == 0:
            with pytest.raises(RendezvousError, match="ranks 1, 2 went on without it"):
                anew(ring, error, lambda _: not gone_on.wait(30))
            told.set()
        else:
            assert anew(ring, error, None) == (1, 2)
            gone_on.set()
            assert told.wait(30)

    ring_of_threads(3, work)
