"""A loop of one's own whose ranks are told to go at given commits; says how it went."""

import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from shared import digest

import ringreduce.keras as rr
from ringreduce.effects.notice import _listener
from ringreduce.keras.elastic.leaving import Looks

case = json.loads(sys.argv[1])
ring = rr.init()
RANK, COMMITS = ring.rank, 12
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
x = np.random.default_rng(0).integers(-4, 5, (COMMITS * 12, 3)).astype("float32")
if not case["seldom"]:
    Looks._wishes = lambda looks, count: (1, 1)  # After each commit.
look, looks = Looks.look, iter(range(100))


def failing(of_loop, count, **how):
    """One rank dies in a look that another has ended, and a third not."""
    found = look(of_loop, count, **how)
    if next(looks) == 2 and "dies" in case:
        if case["dies"] == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        if case["misses"] == RANK:
            of_loop._due, of_loop._has_seen = 100, True
            while True:
                ring.barrier()
    return found


Looks.look = failing
begun = []  # with which commit each call of the loop has begun


@rr.elastic.run
def train(state):
    begun.append([state.step, rr.size()])
    while state.step < COMMITS:
        for rank, step in case["told"]:
            if (rank, step) == (RANK, state.step):
                os.kill(os.getpid(), signal.SIGTERM)
                while not all(heard.reason for heard in _listener._heard):
                    time.sleep(0.001)
        rows = x[state.step * 12 : (state.step + 1) * 12][rr.rank() :: rr.size()]
        with rr.step_weight(len(rows)), tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows) - rows.sum(1, keepdims=True)) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        state.made += 1
        state.step += 1
        state.commit()


state = rr.elastic.KerasState(model, optimizer, step=0, made=0)
facts = {"rank": RANK, "stopped": False}
try:
    train(state)
except rr.elastic.Stopped as stopped:
    facts["stopped"] = [stopped.code, rr.on_rank_zero(lambda: "saved")]
weights = [float(np.abs(weight).sum()) for weight in model.get_weights()]
facts |= {"begun": begun, "made": state.made, "iterations": int(optimizer.iterations)}
facts |= {"digest": digest(model.get_weights()), "weights": weights, "members": ring.members}
print(json.dumps(facts), flush=True)
if facts["stopped"]:
    raise SystemExit(facts["stopped"][0])
