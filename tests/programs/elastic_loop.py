"""A loop of its own that loses ranks at given points; compared with a loop of one process."""

import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from shared import difference, digest, error_of

import ringreduce.keras as rr
from ringreduce.communicator.communicator import Communicator

case = json.loads(sys.argv[1])
ring = rr.init()
RANK = ring.rank
BATCH, STEPS, EPOCHS, EVERY = 12, 5, 2, 2
RUNS = case.get("runs", 1)
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 3)).astype("float32")
y = x.sum(axis=1, keepdims=True)
trail, resets, points = [], [], []


def pass_by(point):
    """Lose this rank, if it is to be lost here; or wait until others have lost a rank."""
    points.append(point)
    for rank, where, number, how in case.get("faults", []):
        if (rank, where, number) == (RANK, point, points.count(point)):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while ring.failure is None:
                time.sleep(0.01)
            raise ring.failure


broadcast_object = Communicator.broadcast_object


def broadcast(*arguments):
    pass_by("sync")
    return broadcast_object(*arguments)


Communicator.broadcast_object = broadcast


barrier = Communicator.barrier


def passing(*arguments):
    barrier(*arguments)
    pass_by("barrier")


Communicator.barrier = passing


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


model, alone = made(rr.DistributedOptimizer), made(lambda optimizer: optimizer)
alone.set_weights(model.get_weights())
step = stepping(model, case["way"])
model.layers[0].bias.assign([float(RANK)])
state = rr.elastic.KerasState(model, batch=0, epoch=RANK, seen=[])
if RANK == 0:
    model.layers[0].bias.assign([7.0])  # After the state was made.


@rr.elastic.run
def train(state, epochs):
    for state.epoch in range(state.epoch, epochs):  # noqa: B020
        while state.batch < STEPS:
            rows = slice(state.batch * BATCH, (state.batch + 1) * BATCH)
            own = [array[rows][rr.rank() :: rr.size()] for array in (x, y)]
            pass_by("step")
            with rr.step_weight(len(own[0])):
                step(*own)
            pass_by("end")
            trail.append([state.epoch, state.batch, rr.size()])
            state.batch += 1
            state.seen.append(state.batch)
            if state.batch % EVERY == 0:
                pass_by("commit")
                state.commit()
                pass_by("committed")
        state.batch = 0
    pass_by("return")
    return "done"


state.register_reset_callbacks([lambda: resets.append([state.epoch, state.batch, rr.size()])])
facts = {"result": ""}


def work():
    for run in range(1, RUNS + 1):
        facts["result"] = train(state, epochs=EPOCHS * run)
        state.epoch += 1


facts |= error_of(work)
if case.get("fits"):
    fit = rr.elastic.run(lambda state: rr.fit(model, x, y, verbose=0))
    facts["fit"] = error_of(lambda: fit(state))["text"]
if facts["result"]:
    alone.layers[0].bias.assign([7.0])
    step = stepping(alone, "eager")
    for _ in range(EPOCHS * RUNS):
        for begin in range(0, len(x), BATCH):
            step(x[begin : begin + BATCH], y[begin : begin + BATCH])
    facts["difference"] = difference(model, alone)
    facts["iterations"] = int(model.optimizer.iterations.numpy())
facts |= {"members": ring.members, "trail": trail, "resets": resets, "seen": state.seen}
print(json.dumps({"rank": RANK, **facts, "digest": digest(model.variables)}), flush=True)
