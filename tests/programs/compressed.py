"""Gradients that travel as fewer bytes; each case prints one line of JSON.

Whole numbers of a size that encodings hold, or their sums, say what is right.
"""

import logging

import keras
import numpy as np
import tensorflow as tf
from shared import digest, error_of, say

import ringreduce.keras as rr

warned = []
logging.getLogger("ringreduce").addHandler(
    type("Kept", (logging.Handler,), {"emit": lambda _, each: warned.append(each.getMessage())})()
)
comm = rr.init()
# More than travels as it is.
COUNT = 5003
WAYS = ("graph", "eager", "jit")


def stepping(optimizer, variables, way):
    def step(*gradients):
        optimizer.apply(list(gradients), variables)

    return step if way == "eager" else tf.function(step, jit_compile=way == "jit")


def rounded(name):
    """Exact where values fit the dtype; large ones do not overflow by being added up."""
    found = {}
    for way in WAYS:
        variable = tf.Variable(tf.zeros(5 * COUNT))
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=name)
        step = stepping(optimizer, [variable], way)
        values = [60000.0, -60000.0, float(comm.rank), 2.0, 1 + 2.0**-9]
        step(tf.constant(np.tile(values, COUNT), tf.float32))
        each = np.unique(variable.numpy().reshape(COUNT, 5), axis=0)
        found[way] = each.tolist()
    say(f"rounded {name}", **found)


def noise(step, number, size=COUNT):
    generator = np.random.default_rng([comm.rank, step, number])
    return generator.standard_normal(size).astype(np.float32)


def kept_by(optimizer, variable):
    """This rank's residuals of a variable: of what it gave, and of what it sent as a result."""
    residuals = optimizer._bridge._residuals
    residuals._put_away()
    residuals._used_by = None
    residuals._laid_out.clear()
    none = variable, np.zeros((2, variable.shape[0]))
    _, (first, second) = residuals._stored.get(id(variable), none)
    return first.astype(float), second.astype(float)


def ledger():
    """Eager, then in a graph, then compiled, with other buckets: nothing is lost on the way."""
    sizes = (COUNT, 7, 70_001, 300_017)
    variables = [tf.Variable(tf.zeros(size)) for size in sizes]
    optimizer = rr.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression="int8", bucket_bytes=1 << 18
    )
    given = [np.zeros(size) for size in sizes]
    for turn, way in enumerate(("eager", "graph", "jit", "eager", "graph")):
        step = stepping(optimizer, variables, way)
        for number in range(4):
            own = [noise(10 * turn + number, i, size) for i, size in enumerate(sizes)]
            given = [total + each for total, each in zip(given, own, strict=True)]
            step(*map(tf.constant, own))
    off = []
    for variable, total in zip(variables, given, strict=True):
        first, second = kept_by(optimizer, variable)
        books = total - first - second * comm.size
        everyone = comm.all_reduce(books)
        off.append(float(np.abs(variable.numpy() * comm.size + everyone).max()))
    most = [float(np.abs(kept_by(optimizer, each)[0]).max()) for each in variables]
    say("ledger", digest=digest(variables), off=off, most=most)


def two_models():
    """Models of the same shapes and names keep what is theirs."""
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int8")
    pair = [tf.Variable(tf.zeros(COUNT), name="same") for _ in range(2)]
    optimizer.build(pair)
    steps = [stepping(optimizer, [each], "graph") for each in pair]
    twin = tf.Variable(tf.zeros(COUNT), name="same")
    alone = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int8")
    lone = stepping(alone, [twin], "graph")
    for number in range(5):
        own = noise(number, 0)
        steps[0](tf.constant(own))
        steps[1](tf.constant(noise(number, 1)))
        lone(tf.constant(own))
    say("two models", equal=bool((pair[0].numpy() == twin.numpy()).all()))


def poisoned():
    """NaN on one rank in step 5 is seen by all, and is not remembered."""
    variable = tf.Variable(tf.zeros(COUNT))
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int8")
    step = stepping(optimizer, [variable], "graph")
    for number in range(5):
        step(tf.constant(noise(number, 0)))
    before = kept_by(optimizer, variable)
    own = noise(5, 0)
    own[10] = np.nan if comm.rank == 1 else own[10]
    value = variable.numpy()
    step(tf.constant(own))
    is_seen = bool(np.isnan(variable.numpy()[10]))
    after = kept_by(optimizer, variable)
    variable.assign(value)
    step(tf.constant(noise(6, 0)))
    say(
        "poisoned",
        seen=is_seen,
        equal=all((a == b).all() for a, b in zip(before, after, strict=True)),
        finite=bool(np.isfinite(variable.numpy()).all()),
        digest=digest([variable]),
    )


def fitted():
    """Whole training: int8 ends near what float32 ends at, and ranks end alike."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 64)).astype("float32")
    y = (x[:, :8].sum(1) > 0).astype("float32")
    losses = {}
    for name in ("none", "bf16", "int8"):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1, "sigmoid")]
        )
        optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.003), compression=name)
        model.compile(optimizer, "binary_crossentropy")
        losses[name] = rr.fit(model, x, y, 64, epochs=6, verbose=0).history["loss"]
    say("fitted", digest=digest(model.weights), **losses)


def refused():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    calls = {
        "tape": lambda: rr.DistributedGradientTape(compression="int8"),
        "scaled": lambda: rr.DistributedOptimizer(scaled, compression="int8"),
        "unknown": lambda: rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int4"),
        "called": lambda: rr.Compression.int8.compress(tf.zeros(3)),
    }
    for name, call in calls.items():
        say(f"refused {name}", **error_of(call))


for kind in ("none", "fp16", "bf16"):
    rounded(kind)
say("warned", texts=[text for text in warned if "compression" in text])
ledger()
two_models()
poisoned()
fitted()
refused()
