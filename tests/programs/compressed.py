"""Gradients that travel as fewer bytes; each case prints one line of JSON.

Whole numbers of a size that encodings hold, or their sums, say what is right.
"""

import contextlib
import logging
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from shared import digest, error_of, say

import ringreduce.keras as rr
from ringreduce.tensorflow.codecs import Codec

warned = []
logging.getLogger("ringreduce").addHandler(
    type("Kept", (logging.Handler,), {"emit": lambda _, each: warned.append(each.getMessage())})()
)
comm = rr.init()
# Within a host, in shared memory, nothing is compressed.
IS_SENT = comm.transport != "shm"
# More than travels as it is.
COUNT = 5003
THIN = rr.PowerSGD(4, start_step=0)


def stepping(optimizer, variables, way, samples=None):
    def step(*gradients):
        with contextlib.nullcontext() if samples is None else rr.step_weight(samples):
            optimizer.apply(list(gradients), variables)

    return step if way == "eager" else tf.function(step, jit_compile=way == "jit")


def rounded(name):
    """Exact where values fit the dtype; large ones do not overflow by being added up."""
    found = {}
    for way in ("eager", "graph", "jit") if name == "bf16" else ("eager",):
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
    thin = optimizer._bridge.low_rank
    residuals = optimizer._bridge._residuals if thin is None else thin.residuals
    residuals._put_away()
    residuals._used_by = None
    residuals._laid_out.clear()
    none = variable, np.zeros((2, int(np.prod(variable.shape))))
    _, kept = residuals._stored.get(id(variable), none)
    # PowerSGD has none of the second kind.
    return kept[0].astype(float), kept[1].astype(float) if len(kept) > 1 else 0.0


FLAT = ((COUNT,), (7,), (70_001,), (300_017,))
# The fourth does not become half as many bytes; the last has a bucket to itself.
MATRICES = ((200, 101), (7,), (3, 3, 16, 33), (9, 8), (701, 503))


def ledger(name, compression, shapes):
    """Eager, then in a graph, then compiled, with other buckets: nothing is lost on the way."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    optimizer = rr.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression=compression, bucket_bytes=1 << 18
    )
    given = [np.zeros(shape) for shape in shapes]
    for turn, way in enumerate(("eager", "graph", "jit", "eager")):
        step = stepping(optimizer, variables, way)
        for number in range(2):
            own = [noise(10 * turn + number, i, shape) for i, shape in enumerate(shapes)]
            given = [total + each for total, each in zip(given, own, strict=True)]
            step(*map(tf.constant, own))
    off = []
    for variable, total in zip(variables, given, strict=True):
        first, second = kept_by(optimizer, variable)
        books = total.ravel() - first - second * comm.size
        everyone = comm.all_reduce(books)
        off.append(float(np.abs(variable.numpy().ravel() * comm.size + everyone).max()))
    kept = [kept_by(optimizer, each) for each in variables]
    most = [float(np.abs(each[0]).max()) for each in kept]
    say(
        f"ledger {name}",
        digest=digest(variables),
        off=off,
        most=most,
    )


def two_models(name, compression, shape):
    """Models of the same shapes and names keep what is theirs."""
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    pair = [tf.Variable(tf.zeros(shape), name="same") for _ in range(2)]
    optimizer.build(pair)
    steps = [stepping(optimizer, [each], "graph") for each in pair]
    twin = tf.Variable(tf.zeros(shape), name="same")
    alone = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    lone = stepping(alone, [twin], "graph")
    for number in range(5):
        own = noise(number, 0, shape)
        steps[0](tf.constant(own))
        steps[1](tf.constant(noise(number, 1, shape)))
        lone(tf.constant(own))
    say(f"two models {name}", equal=bool((pair[0].numpy() == twin.numpy()).all()))


def poisoned(name, compression, shape, way="graph", poison=np.nan):
    """What is not finite on one rank in step 5 is seen by all, and is not remembered."""

    def kept():
        thin = optimizer._bridge.low_rank
        across = [] if thin is None else [thin.across(variable, 0, 0).copy()]
        return [*kept_by(optimizer, variable), *across]

    variable = tf.Variable(tf.zeros(shape))
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    step = stepping(optimizer, [variable], way)
    for number in range(5):
        step(tf.constant(noise(number, 0, shape)))
    before = kept()
    own = noise(5, 0, shape)
    if comm.rank == 1:
        own[(10,) * own.ndim] = poison
    value = variable.numpy()
    step(tf.constant(own))
    is_seen = not np.isfinite(variable.numpy()[(10,) * own.ndim])
    after = kept()
    variable.assign(value)
    step(tf.constant(noise(6, 0, shape)))
    say(
        f"poisoned {name} {way}",
        seen=is_seen,
        equal=all(np.all(a == b) for a, b in zip(before, after, strict=True)),
        finite=bool(np.isfinite(variable.numpy()).all()),
        digest=digest([variable]),
    )


MEETINGS = {
    "local": rr.LocalSGD(3),
    "local, overlapped": rr.LocalSGD(3, overlap=1),
    "diloco": rr.DiLoCo(3),
    "diloco, overlapped": rr.DiLoCo(3, overlap=2),
}


def meetings(case):
    """Ranks that step alone are equal after each meeting, and near those that send float32."""
    strategy, ends = MEETINGS[case], {}
    for name in ("none", "bf16", "int8"):
        variables = [tf.Variable(tf.zeros(size)) for size in (COUNT, 7)]
        inner = keras.optimizers.SGD(0.25)
        optimizer = rr.DistributedOptimizer(inner, strategy=strategy, compression=name)
        step, digests = stepping(optimizer, variables, "eager"), []
        for number in range(11):
            step(*(tf.constant(noise(number, i, size)) for i, size in enumerate((COUNT, 7))))
            # With overlap a rank keeps what it learned while the meeting was under way.
            if optimizer.has_met and not strategy.overlap:
                digests.append(digest(variables))
        optimizer.settle()
        ends[name] = np.concatenate([each.numpy() for each in variables])
        off = float(np.abs(ends[name] - ends["none"]).max())
        say(f"met {case} {name}", digests=[*digests, digest(variables)], off=off)


def meeting_residuals(optimizer):
    """This rank's residuals of its one round of meetings, as `kept_by`."""
    (round_,) = optimizer._running._rounds.values()
    return [each.copy() for each in round_._meeting._coding.residuals]


def meeting_ledger():
    """Nothing is lost between meetings, in which ranks count by samples."""
    sizes = (COUNT, 7, (1 << 20) + 3)
    variables = [tf.Variable(tf.zeros(size)) for size in sizes]
    inner = keras.optimizers.SGD(1.0)
    optimizer = rr.DistributedOptimizer(inner, strategy=rr.LocalSGD(3, 1), compression="int8")
    share = (comm.rank + 1) * comm.size / sum(range(comm.size + 1))
    given = np.zeros(sum(sizes))
    step = stepping(optimizer, variables, "eager", comm.rank + 1.0)
    for number in range(8):
        own = [noise(number, i, size) for i, size in enumerate(sizes)]
        given += share * np.concatenate(own)
        step(*map(tf.constant, own))
    optimizer.settle()
    first, second = meeting_residuals(optimizer)
    everyone = comm.all_reduce(given - first - second.astype(float) * comm.size)
    applied = np.concatenate([each.numpy() for each in variables]).astype(float) * comm.size
    say(
        "meeting ledger",
        digest=digest(variables),
        off=float(np.abs(applied + everyone).max()),
        most=[float(np.abs(part).max()) for part in (first, second)],
    )


def poisoned_meeting():
    """A rank whose weights become NaN in step 5 poisons the meeting after it, and no other."""
    variable = tf.Variable(tf.zeros(COUNT))
    inner = keras.optimizers.SGD(0.25)
    optimizer = rr.DistributedOptimizer(inner, strategy=rr.LocalSGD(3), compression="int8")
    step, before = stepping(optimizer, [variable], "graph"), None
    for number in range(6):
        if number == 3:
            before = meeting_residuals(optimizer)
        own = noise(number, 0)
        own[10] = np.nan if (comm.rank, number) == (1, 4) else own[10]
        step(tf.constant(own))
    is_seen = bool(np.isnan(variable.numpy()[10]))
    after = meeting_residuals(optimizer)
    optimizer.settle()
    variable.assign(tf.zeros(COUNT))
    for number in range(3):
        step(tf.constant(noise(number, 1)))
    say(
        "poisoned meeting",
        seen=is_seen,
        equal=all((a == b).all() for a, b in zip(before, after, strict=True)),
        finite=bool(np.isfinite([*before, *after, variable.numpy()]).all()),
        digest=digest([variable]),
    )


def thin():
    """What is of low rank arrives whole; a start, vectors and what is excluded go as they are."""
    rng = np.random.default_rng(comm.rank)
    kinds = {
        "low rank": (rng.integers(-3, 4, (40, 1)) * np.ones((1, 30)), {}),
        "after zeros": (rng.integers(-3, 4, (40, 1)) * np.ones((1, 30)), {}),
        "start": (rng.integers(-9, 10, (40, 30)), {"start_step": 1}),
        "excluded": (rng.integers(-9, 10, (40, 30)), {"exclude": ["ker", "nel$"]}),
        "vector": (rng.integers(-9, 10, 40), {}),
        "noise": (rng.integers(-9, 10, (40, 30)), {}),
    }
    found = {}
    for name, (gradient, options) in kinds.items():
        variable = tf.Variable(tf.zeros(gradient.shape), name="kernel")
        compression = rr.PowerSGD(2, **{"start_step": 0, **options})
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
        if name == "after zeros":
            # Nothing to learn Q from.
            optimizer.apply([tf.zeros_like(variable)], [variable])
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])
        mean = comm.all_reduce(gradient.astype("float32"), "mean")
        found[name] = float(np.abs(variable.numpy() + mean).max())
        found[f"{name} digest"] = digest([variable])
    say("thin", **found)


def saved():
    """Q and the number of steps go on from a file, which plain Keras reads too."""

    def made(compression):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(40)])
        model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.5), compression=compression))
        model.optimizer.build(model.trainable_variables)
        return model

    def step(model, number):
        gradients = [noise(number, i, v.shape) for i, v in enumerate(model.trainable_variables)]
        model.optimizer.apply(list(map(tf.constant, gradients)), model.trainable_variables)

    path = os.path.join(tempfile.mkdtemp(), "model.keras")
    first = made(rr.PowerSGD(2, start_step=1))
    for number in range(4):
        step(first, number)
    first.save(path)
    plain = keras.models.load_model(path)
    second = rr.load_model(path, compression=rr.PowerSGD(2, start_step=1))
    kernel = second.trainable_variables[0]
    thin = second.optimizer._bridge.low_rank
    other = made(rr.PowerSGD(3, start_step=1))
    other.load_weights(path)
    from_plain = os.path.join(tempfile.mkdtemp(), "plain.keras")
    plain.save(from_plain)
    third = rr.load_model(from_plain, compression=rr.PowerSGD(2, start_step=1))
    was = first.optimizer._bridge.low_rank.across(first.trainable_variables[0], 40, 0)
    say(
        "saved",
        steps=[thin.step, other.optimizer._bridge.low_rank.step],
        fresh=third.optimizer._bridge.low_rank.step,
        equal=bool((thin.across(kernel, 40, 0) == was).all()),
        digests=[digest(each.weights) for each in (first, plain, second, third)],
    )


def fitted():
    """Whole training: int8 ends near what float32 ends at, and ranks end alike."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 64)).astype("float32")
    y = (x[:, :8].sum(1) > 0).astype("float32")
    losses = {}
    kinds = {"none": "none", "int8": "int8", "thin": THIN}
    for name, compression in kinds.items() if IS_SENT else [*kinds.items()][:2]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1, "sigmoid")]
        )
        optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.003), compression=compression)
        model.compile(optimizer, "binary_crossentropy", run_eagerly=True)
        losses[name] = rr.fit(model, x, y, 64, epochs=2, verbose=0).history["loss"]
    say("fitted", digest=digest(model.weights), **losses)


def refused():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    calls = {
        "tape": lambda: rr.DistributedGradientTape(compression="int8"),
        "scaled": lambda: rr.DistributedOptimizer(scaled, compression="int8"),
        "unknown": lambda: rr.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int4"),
        "called": lambda: Codec("int8").compress(tf.zeros(3)),
        "thin tape": lambda: rr.DistributedGradientTape(compression=THIN),
        "thin scaled": lambda: rr.DistributedOptimizer(scaled, compression=THIN),
        "thin meetings": lambda: rr.DistributedOptimizer(
            keras.optimizers.SGD(1.0), compression=THIN, strategy=rr.LocalSGD(5)
        ),
        "rank": lambda: rr.PowerSGD(0),
        "start": lambda: rr.PowerSGD(start_step=-1),
        "exclude": lambda: rr.PowerSGD(exclude="embedding"),
    }
    for name, call in calls.items():
        say(f"refused {name}", **error_of(call))


for kind in ("none", "fp16", "bf16"):
    rounded(kind)
say("warned", texts=[text for text in warned if "compression" in text])
if IS_SENT:
    ledger("int8", "int8", FLAT)
    ledger("thin", rr.PowerSGD(3, start_step=2), MATRICES)
    two_models("int8", "int8", (COUNT,))
    two_models("thin", THIN, (60, 90))
    poisoned("int8", "int8", (COUNT,))
    poisoned("int8", "int8", (COUNT,), "eager", np.inf)
    poisoned("thin", THIN, (60, 90))
    thin()
    saved()
    for plan in MEETINGS:
        meetings(plan)
    meeting_ledger()
    poisoned_meeting()
fitted()
refused()


def overflown():
    """Ends the ring: a finite gradient that float16 does not hold."""
    optimizer = rr.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression="fp16", check_numerics="raise"
    )
    variable = tf.Variable(tf.zeros(5 * COUNT))
    gradient = tf.fill(variable.shape, 1e5)
    say("overflown", **error_of(lambda: optimizer.apply([gradient], [variable])))


overflown()
