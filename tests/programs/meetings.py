"""Ranks that step alone, and meet; each case prints one line of JSON. numpy says what is right."""

import contextlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from shared import built, digest, error_of, keep_graphs, say

import ringreduce.keras as rr

comm = rr.init()
SIZE, SHAPES = comm.size, ((3, 2), (5,))
SGD = keras.optimizers.SGD


def stepping(optimizer, variables, way):
    def step(samples, *gradients):
        if samples is None:
            optimizer.apply(list(gradients), variables)
        else:
            with rr.step_weight(samples):
                optimizer.apply(list(gradients), variables)

    if way == "eager":
        return step
    return tf.function(step, jit_compile=way == "jit")


def gradients_of(rank, step):
    generator = np.random.default_rng([rank, step])
    return [generator.integers(-8, 9, shape).astype("float64") / 8 for shape in SHAPES]


class Sgd:
    """Keras's, in float64."""

    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.moved = [np.zeros(shape) for shape in SHAPES]

    def stepped(self, weights, gradients):
        found = []
        for n, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            moved = self.momentum * self.moved[n] - self.rate * gradient
            self.moved[n] = moved
            if self.nesterov:
                moved = self.momentum * moved - self.rate * gradient
            found.append(weight + moved)
        return found


def simulated(steps, every, overlap, outer, samples=lambda rank, step: 1.0, settles=()):
    """What every rank has after `steps` and settling; `settles`: steps after which it does too."""
    inner = [Sgd(0.25, 0.5) for _ in range(SIZE)]
    weights = [[np.full(shape, 1.0) for shape in SHAPES] for _ in range(SIZE)]
    anchors, count, going = None, 0, None
    own = np.zeros(SIZE)

    def mean_change():
        changes = [
            sum(own[r] * (anchors[n] - weights[r][n]) for r in range(SIZE)) / own.sum()
            for n in range(len(SHAPES))
        ]
        own[:] = 0
        return changes, [[each.copy() for each in weights[r]] for r in range(SIZE)]

    def merge(changes):
        nonlocal anchors
        anchors = outer.stepped(anchors, changes)

    for step in range(steps):
        if anchors is None:
            anchors, count = [each.copy() for each in weights[0]], 0
        for r in range(SIZE):
            n = samples(r, step)
            own[r] += n
            mine = [each * (n > 0) for each in gradients_of(r, step)]
            weights[r] = inner[r].stepped(weights[r], mine)
        count += 1
        if overlap and count > every and count % every == overlap:
            changes, sent = going
            merge(changes)
            weights = [
                [w + a - s for w, a, s in zip(weights[r], anchors, sent[r], strict=True)]
                for r in range(SIZE)
            ]
            going = None
        if count % every == 0:
            going = mean_change()
            if not overlap:
                merge(going[0])
                weights, going = [[a.copy() for a in anchors] for _ in range(SIZE)], None
        if step + 1 in (*settles, steps):
            if going is not None:
                changes, sent = going
                merge(changes)
                weights = [
                    [w + a - s for w, a, s in zip(weights[r], anchors, sent[r], strict=True)]
                    for r in range(SIZE)
                ]
                going = None
            if own.sum():
                merge(mean_change()[0])
            weights = [[a.copy() for a in anchors] for _ in range(SIZE)]
            anchors = None
    return weights[0]


def variables():
    return [tf.Variable(tf.fill(shape, 1.0)) for shape in SHAPES]


PLANS = {
    "local": (rr.LocalSGD(3), lambda: Sgd(1.0), 3, 0),
    "local, overlapped": (rr.LocalSGD(4, overlap=2), lambda: Sgd(1.0), 4, 2),
    "diloco": (rr.DiLoCo(4), lambda: Sgd(0.7, 0.9, True), 4, 0),
    "diloco, overlapped": (rr.DiLoCo(4, overlap=3), lambda: Sgd(0.7, 0.9, True), 4, 3),
}

# Eagerly the arithmetic of each; once in XLA. In a graph ranks count by samples.
PLANS_AND_WAYS = [*((name, "eager") for name in PLANS), ("diloco, overlapped", "jit")]


def trained(name, way, samples=None, settles=(), steps=10, case=None):
    strategy, outer, every, overlap = PLANS[name]
    mine = variables()
    optimizer = rr.DistributedOptimizer(SGD(0.25, momentum=0.5), strategy=strategy)
    optimizer.build(mine)
    step = stepping(optimizer, mine, way)
    for number in range(steps):
        given = [tf.constant(each, tf.float32) for each in gradients_of(comm.rank, number)]
        count = None if samples is None else tf.constant(samples(comm.rank, number))
        step(count, *given)
        if number + 1 in settles:
            optimizer.settle()
    optimizer.settle()
    options = {} if samples is None else {"samples": samples}
    right = simulated(steps, every, overlap, outer(), settles=settles, **options)
    off = max(np.abs(a.numpy() - b).max() for a, b in zip(mine, right, strict=True))
    say(f"{case or name} {way}", off=float(off), digest=digest(mine))


def uneven(rank, step):
    return float((rank + step) % 3)


def every_one():
    """H = 1 with SGD is what averaging gradients is."""
    found = []
    for strategy in (rr.LocalSGD(1), None):
        mine = variables()
        optimizer = rr.DistributedOptimizer(SGD(0.25), strategy=strategy)
        optimizer.build(mine)
        step = stepping(optimizer, mine, "eager")
        for number in range(4):
            whole = [np.round(8 * each) * SIZE for each in gradients_of(comm.rank, number)]
            step(None, *(tf.constant(each, tf.float32) for each in whole))
        found.append([each.numpy() for each in mine])
    say("one", equal=all((a == b).all() for a, b in zip(*found, strict=True)))


def loaded():
    """Weights that are loaded between two settled states are where the next round begins."""
    mine = variables()
    optimizer = rr.DistributedOptimizer(SGD(0.25), strategy=rr.DiLoCo(4))
    optimizer.build(mine)
    step = stepping(optimizer, mine, "eager")
    zero = [tf.zeros(shape) for shape in SHAPES]
    step(None, *zero)
    optimizer.settle()
    for each in mine:
        each.assign(tf.fill(each.shape, 5.0))
    for _ in range(5):
        step(None, *zero)
    optimizer.settle()
    say("loaded", values=sorted({float(v) for each in mine for v in each.numpy().ravel()}))


def fitted():
    """Epochs end within rounds; validation, callbacks and files see what all ranks have."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(66, 8)).astype("float32")
    y = x[:, :1] * 2 + 1
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.05), strategy=rr.LocalSGD(3, 1))
    model.compile(optimizer, "mse")
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rr.verify_replicas(model.trainable_variables)
            seen.append(logs["val_loss"])

        def on_train_batch_end(self, batch, logs=None):
            if comm.rank == 1 and len(seen) == 4:
                self.model.stop_training = True

    history = rr.fit(
        model,
        x,
        y,
        6 * SIZE,
        epochs=8,
        verbose=0,
        validation_data=(x, y),
        callbacks=[Look(), rr.callbacks.VerifyReplicas(1)],
    ).history
    outside = error_of(lambda: optimizer.save_own_variables({}))
    say(
        "fitted",
        losses=history["loss"],
        epochs=len(history["loss"]),
        digest=digest(model.weights),
        seen=seen,
        evaluated=rr.evaluate(model, x, y, verbose=0),
        outside=outside["error"],
    )


def outer_saved():
    """The outer optimizer goes on from a file, which plain Keras reads too."""
    x = np.random.default_rng(0).integers(-3, 4, (16 * SIZE, 4)).astype("float32")

    def made():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = rr.DistributedOptimizer(SGD(2.0**-6), strategy=rr.DiLoCo(3))
        model.compile(optimizer, "mse", run_eagerly=True)
        return built(model, x[:1], x[:1, :1])

    def fit(model):
        rr.fit(model, x, x[:, :1], 4 * SIZE, shuffle=False, verbose=0)

    path = comm.broadcast_object(os.path.join(tempfile.mkdtemp(), "model.keras"))
    whole = made()
    fit(whole)
    rr.on_rank_zero(lambda: whole.save(path))
    first = [digest(model.weights) for model in (whole, keras.models.load_model(path))]
    forgetful, one = made(), made()
    forgetful.set_weights(whole.get_weights())
    # Rank 0 alone loads, and saves it again before a step.
    if comm.rank == 0:
        one.load_weights(path)
        one.save(path)
        one.load_weights(path)
    for model in (whole, one, forgetful):
        fit(model)
    digests = [digest(model.weights) for model in (whole, one, forgetful)]
    say("saved", first=first, digests=digests)


def asked():
    """Between meetings ranks ask nothing of each other, also where their rows differ in number.

    Of unchecked data others ask each other how many rows they have.
    """
    x = np.ones((12 * SIZE + 1, 3), "float32")
    found = {}
    for name, strategy in (("alone", rr.LocalSGD(4)), ("each step", None)):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = rr.DistributedOptimizer(SGD(0.01), strategy=strategy)
        model.compile(optimizer, "mse", run_eagerly=True)
        given = {"epochs": 1, "verbose": 0, "check": False}
        rr.fit(model, x[:3], x[:3, :1], SIZE, **given)
        before = comm.statistics().collectives
        rr.fit(model, x, x[:, :1], SIZE, **given)
        found[name] = comm.statistics().collectives - before
        found[f"{name} digest"] = digest(model.weights)
    say("asked", **found)


def line(strategy, rate=0.05):
    """A model for eager steps, which need no tracing, and its data: an epoch has 4 steps."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(22 * SIZE, 4)).astype("float32")
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = rr.DistributedOptimizer(SGD(rate), strategy=strategy)
    model.compile(optimizer, "mse", run_eagerly=True)
    given = {"x": x, "y": x[:, :1] * 2 + 1, "batch_size": 6 * SIZE, "verbose": 0}
    return built(model, x[:1], x[:1, :1]), given


class Fails(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("fails here")


def resumed(folder):
    """From a backup after one epoch, and from the file of it: as if nothing had been."""
    folder = comm.broadcast_object(folder)
    path = os.path.join(folder, "model.keras")
    strategy = rr.DiLoCo(3, 1)
    whole, given = line(strategy)
    rr.fit(whole, **given, epochs=2)
    callbacks = [keras.callbacks.ModelCheckpoint(path), Fails()]
    backup = {"backup_dir": os.path.join(folder, "backup")}
    with contextlib.suppress(RuntimeError):
        rr.fit(line(strategy)[0], **given, epochs=2, callbacks=callbacks, **backup)
    again, _ = line(strategy)
    history = rr.fit(again, **given, epochs=2, **backup)
    loaded = rr.load_model(path, strategy=strategy)
    loaded.compile(loaded.optimizer, "mse", run_eagerly=True)
    rr.fit(loaded, **given, epochs=2, initial_epoch=1)
    comm.barrier()
    digests = [digest(model.weights) for model in (whole, again, loaded)]
    say("resumed", epochs=history.epoch, digests=digests)


def stopped_between_meetings():
    """One rank wants to stop after its second step; the ranks meet after their third."""
    model, given = line(rr.LocalSGD(3))
    batches = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)
            if comm.rank == 1 and batch == 1:
                self.model.stop_training = True

    rr.fit(model, **given, epochs=2, callbacks=Stop())
    optimizer = model.optimizer
    say("stopped", batches=batches, settled=optimizer.is_settled, digest=digest(model.weights))


def refused():
    scaled = keras.optimizers.LossScaleOptimizer(SGD(1.0))
    calls = {
        "none": lambda: rr.LocalSGD(0),
        "overlap": lambda: rr.LocalSGD(3, overlap=3),
        "two": lambda: rr.DistributedOptimizer(
            SGD(1.0), strategy=rr.LocalSGD(3), accumulate_steps=2
        ),
        "scaled": lambda: rr.DistributedOptimizer(scaled, strategy=rr.LocalSGD(3)),
        "ema": lambda: rr.DistributedOptimizer(SGD(1.0, use_ema=True), strategy=rr.DiLoCo(3)),
        "no strategy": lambda: rr.DistributedOptimizer(SGD(1.0), strategy="local"),
    }
    for name, call in calls.items():
        say(f"refused {name}", **error_of(call))
    mine = variables()
    optimizer = rr.DistributedOptimizer(SGD(1.0), strategy=rr.LocalSGD(3))
    optimizer.build(mine)
    optimizer.apply([tf.ones(shape) for shape in SHAPES], mine)
    say("refused save", **error_of(lambda: optimizer.save_own_variables({})))


keep_graphs()
for plan, kind in PLANS_AND_WAYS:
    trained(plan, kind)
trained("diloco, overlapped", "graph", uneven, (6,), 17, "diloco, overlapped, uneven")
trained("local", "eager", uneven, (5,), case="local, uneven")
for plan in ("diloco", "diloco, overlapped"):
    trained(plan, "eager", settles=(4,), steps=12, case=f"{plan}, at once")
every_one()
loaded()
fitted()
outer_saved()
asked()
with tempfile.TemporaryDirectory() as path:
    resumed(path)
stopped_between_meetings()
refused()
