"""Training on processors that round differently, with the encodings that are its arguments.

The second rank's environment makes numba and BLAS compute as on another processor.
"""

import sys

import keras
import llvmlite.binding
import numba
import numpy as np
import tensorflow as tf
from shared import digest, say
from threadpoolctl import threadpool_info

import ringreduce.keras as rr

comm = rr.init()
STEPS, FEATURES = 20, 96


def trained(compression, strategy):
    """The digest of the weights after each step, of which each is of a batch of its own."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(128, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    inner = keras.optimizers.Adam(0.01)
    optimizer = rr.DistributedOptimizer(inner, strategy=strategy, compression=compression)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(comm.rank)

    @tf.function
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))

    found = []
    for _ in range(STEPS):
        inputs = random.standard_normal((16, FEATURES)).astype("float32")
        step(inputs, inputs[:, :3] ** 2)
        if optimizer.has_met:
            found.append(digest(model.weights))
    return found


blas = [one.get("architecture") for one in threadpool_info() if one["user_api"] == "blas"]
say("processor", numba=numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name(), blas=blas)
for name in sys.argv[1:]:
    say(f"every step {name}", digests=trained(name, None))
    say(f"meetings {name}", digests=trained(name, rr.DiLoCo(5)))
