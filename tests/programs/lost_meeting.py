"""Rank 1 is killed between meetings, or in one; the others say what they see."""

import os
import signal
import sys

import keras
import tensorflow as tf
from shared import error_of, say

import ringreduce.keras as rr
from ringreduce.communicator.communicator import Communicator

comm = rr.init()
WHEN, COMPRESSION = sys.argv[1:]
variables = [tf.Variable(tf.zeros(5003))]
strategy = rr.LocalSGD(3) if WHEN == "between" else rr.DiLoCo(4, overlap=2)
inner = keras.optimizers.SGD(0.5)
optimizer = rr.DistributedOptimizer(inner, strategy=strategy, compression=COMPRESSION)
optimizer.build(variables)
all_reduce = Communicator.all_reduce
calls = []


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dying(self, *arguments, **options):
    """The first call of a meeting is for the weights of the ranks, the second for data."""
    calls.append(arguments)
    if len(calls) == 2:
        die()
    return all_reduce(self, *arguments, **options)


@tf.function
def step(gradient):
    optimizer.apply([gradient], variables)


def train():
    for number in range(8):
        if comm.rank == 1 and (WHEN, number) == ("between", 4):
            die()
        if comm.rank == 1 and (WHEN, number) == ("under way", 1):
            Communicator.all_reduce = dying
        step(tf.ones(5003))


say("lost", **error_of(train), steps=int(optimizer.iterations))
