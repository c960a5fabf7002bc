"""Models in stages; each case prints one line of JSON. Plain Keras says what is right.

With two or three ranks there is one copy of the model, with four there are two of two stages.
"""

import itertools
import os
import pathlib
import signal
import sys
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf
from shared import digest, error_of, keep_graphs, say

import ringreduce.keras as rr
from ringreduce import RingReduceError

keep_graphs()
comm = rr.init()
STAGES = 3 if comm.size == 3 else 2
WIDTH = 4
warnings.simplefilter("ignore", rr.ParityWarning)


def dense(number, **options):
    """The layers of a stage."""
    begin = [keras.Input((WIDTH,))] if number == 0 else []
    end = [keras.layers.Dense(2)] if number == STAGES - 1 else []
    inner = keras.layers.Dense(WIDTH, activation="tanh", **options)
    return [*begin, inner, keras.layers.Dense(WIDTH), *end]


def made(make=dense, micro_batches=4, **options):
    """A pipeline of stages that `make` makes, and what makes the same in plain Keras."""
    keras.utils.set_random_seed(1)
    functions = [lambda number=number: make(number, **options) for number in range(STAGES)]
    pipeline = rr.Pipeline(functions, micro_batches)

    def twin():
        return keras.Sequential(list(itertools.chain(*(function() for function in functions))))

    return pipeline, twin


def once(pipeline, twin, train, *settings, **options):
    """What plain Keras comes to from the same weights, by one rank for all.

    Its few steps are eager: they take less time than tracing them.
    """
    begin = weights_of(pipeline)

    def expected():
        model = twin()
        model.set_weights(begin)
        model.compile(*settings, run_eagerly=True, **options)
        found = train(model)
        return {**found, "weights": [weight.tolist() for weight in model.get_weights()]}

    return comm.broadcast_object(expected() if comm.rank == 0 else None)


def weights_of(pipeline):
    """Those of all stages."""
    own = [[w.tolist(), w.dtype.name] for w in pipeline.model.get_weights()]
    every = pipeline.chain.all_gather_object(own)
    return [np.array(values, dtype) for theirs in every for values, dtype in theirs]


def apart(pipeline, expected):
    pairs = zip(weights_of(pipeline), expected["weights"], strict=True)
    return max(difference(own, other) for own, other in pairs)


def data(count=96, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, WIDTH)).astype("float32")
    return x, generator.normal(size=(count, 2)).astype("float32")


def exact(micro_batches):
    """One step on small whole numbers, where no sum is rounded."""

    def make(number):
        begin = [keras.Input((WIDTH,))] if number == 0 else []
        return [*begin, keras.layers.Dense(WIDTH, use_bias=False)]

    pipeline, twin = made(make, micro_batches)
    generator = np.random.default_rng(pipeline.stage)
    pipeline.model.set_weights([generator.integers(-1, 2, (WIDTH, WIDTH)).astype("float32")])
    before = weights_of(pipeline)
    x, y = np.random.default_rng(7).integers(-1, 2, (2, 32, WIDTH)).astype("float32")

    def train(model):
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        return {}

    expected = once(pipeline, twin, train, keras.optimizers.SGD(0.125), "mse")
    pipeline.compile(keras.optimizers.SGD(0.125), "mse")
    pipeline.fit(x, y, batch_size=32, verbose=0)
    moved = [
        bool((own != old).any()) for own, old in zip(weights_of(pipeline), before, strict=True)
    ]
    say(f"exact {micro_batches}", apart=apart(pipeline, expected), moved=moved)


def trained():
    """Some epochs, with what users see of them; a last batch that is short."""
    options = {"kernel_regularizer": keras.regularizers.L2(0.01)}
    pipeline, twin = made(**options)
    x, y = data(80)
    weights = np.arange(1, 81, dtype="float32") / 40
    own, whole = data(21, seed=1), (x, y)
    given = {"sample_weight": weights, "batch_size": 32, "epochs": 2, "shuffle": False}
    seen = []
    batches = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: seen.append(dict(logs))
    )
    with_batches = {**given, "verbose": 0, "validation_data": own, "callbacks": [batches]}

    def train(model):
        history = model.fit(*whole, **given, verbose=0, validation_data=own).history
        evaluated = model.evaluate(*own, batch_size=4, verbose=0)
        predicted = model.predict(own[0], verbose=0).tolist()
        return {"history": history, "evaluated": evaluated, "predicted": predicted}

    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    expected = once(pipeline, twin, train, optimizer, "mse", metrics=["mae"])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    pipeline.compile(optimizer, "mse", metrics=["mae"])
    history = pipeline.fit(*whole, **with_batches).history
    say(
        "trained",
        apart=apart(pipeline, expected),
        names=list(history) == list(expected["history"]),
        history=max(map(difference, history.values(), expected["history"].values())),
        batches=[sorted(logs) for logs in seen],
        evaluated=difference(pipeline.evaluate(*own, batch_size=4), expected["evaluated"]),
        by_name=list(pipeline.evaluate(*own, return_dict=True)),
        predicted=difference(pipeline.predict(own[0], batch_size=4), expected["predicted"]),
        copies=pipeline.replicas.all_gather_object(digest(pipeline.model.weights)),
    )


def difference(one, other):
    return float(np.abs(np.asarray(one, "float64") - np.asarray(other, "float64")).max())


def of_dataset():
    """Batches of a tf.data.Dataset, with rows that are shuffled alike; ids that become vectors."""

    def make(number):
        if number == 0:
            return [
                keras.Input((3,), dtype="int64"),
                keras.layers.Embedding(50, 2),
                keras.layers.Flatten(),
            ]
        if number == STAGES - 1:
            return [keras.layers.Dense(1) for _ in range(2)]
        return [keras.layers.Activation("tanh")]  # A stage without weights.

    pipeline, twin = made(make, 2)
    generator = np.random.default_rng(1)
    ids = generator.integers(0, 50, (24, 3))
    targets = generator.normal(size=(24, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((ids, targets)).batch(8)

    def train(model):
        model.fit(dataset.shuffle(5, seed=1), epochs=2, verbose=0)
        return {}

    expected = once(pipeline, twin, train, keras.optimizers.SGD(0.05), "mse")
    pipeline.compile(keras.optimizers.SGD(0.05), "mse")
    train(pipeline)
    say("dataset", apart=apart(pipeline, expected), predicted=pipeline.predict(dataset).shape)


def unequal():
    """Batches of 9 and 5 rows, of which two copies get unequal shares."""

    def make(number):
        if number == 0:
            return [keras.Input((2, 2)), keras.layers.Flatten()]
        return [keras.layers.Dense(2)]

    pipeline, twin = made(make, 1)
    x, y = data(14)
    dataset = tf.data.Dataset.from_tensor_slices((x.reshape(-1, 2, 2), y)).batch(9)

    def train(model):
        return {"history": model.fit(dataset, epochs=2, verbose=0).history}

    optimizer = keras.optimizers.SGD(0.1)
    expected = once(pipeline, twin, train, optimizer, "mse", metrics=["mae"])
    pipeline.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = train(pipeline)["history"]
    apart_by = max(map(difference, history.values(), expected["history"].values()))
    say("unequal", apart=apart(pipeline, expected), history=apart_by)


def functions():
    """Which functions are called, and what equal layers begin with."""
    called = []

    def make(number):
        called.append(number)
        return dense(number)

    keras.utils.set_random_seed(1)
    pipeline = rr.Pipeline([lambda number=n: make(number) for n in range(STAGES)])
    first = pipeline.chain.all_gather_object(digest(pipeline.model.layers[0].weights[:1]))
    say(
        "functions",
        called=called,
        stage=pipeline.stage,
        chain=list(pipeline.chain.members),
        replicas=list(pipeline.replicas.members),
        first=first,
    )


def reduced():
    """Activations and gradients of 16 bits, random layers, several outputs of the last stage."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers = [keras.layers.Dense(WIDTH), keras.layers.Dropout(0.5)]
    pipeline = rr.Pipeline(
        [lambda n=n: [keras.Input((WIDTH,))][n:] + layers for n in range(STAGES)]
    )
    keras.config.set_dtype_policy("float32")
    pipeline.compile("adam", "mse")
    x, y = data(64)
    loss = pipeline.fit(x, np.concatenate([y, y], 1), batch_size=64, epochs=2, verbose=0)
    say("reduced", losses=loss.history["loss"])


def stopped():
    """A callback that stops sees the same on all ranks; files are those of each stage."""
    x, y = data(96)
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    pipeline, _ = made()
    pipeline.compile("adam", "mse")
    path = f"{folder}/stage{pipeline.stage}.keras"
    files = [keras.callbacks.ModelCheckpoint(path), keras.callbacks.CSVLogger(f"{folder}/log.csv")]
    pipeline.fit(x[:32], y[:32], batch_size=32, epochs=2, verbose=0, callbacks=files)
    comm.barrier()
    loaded = keras.models.load_model(path)
    pairs = zip(loaded.get_weights(), pipeline.model.get_weights(), strict=True)
    same = all((a == b).all() for a, b in pairs)
    kinds = type(loaded.optimizer).__name__, type(loaded.optimizer).__module__.split(".")[0]
    stops = [keras.callbacks.TerminateOnNaN()]
    seen = pipeline.fit(x, y * np.nan, batch_size=32, epochs=3, verbose=0, callbacks=stops)
    lines = pathlib.Path(folder, "log.csv").read_text().count("\n")
    fact = {"optimizer": kinds, "lines": lines}
    say("stopped", epochs=len(seen.epoch), same=same, **fact, files=sorted(os.listdir(folder)))


def refused():
    """Bad input; nobody waits afterwards."""
    begin = [keras.Input((WIDTH,))]
    fits = [lambda n=n: dense(n) for n in range(STAGES)]
    cases = {
        "no stages": lambda: rr.Pipeline([]),
        "models": lambda: rr.Pipeline([keras.Sequential([*begin, keras.layers.Dense(1)])] * STAGES),
        "ranks": lambda: rr.Pipeline(fits * 3),
        "micro-batches": lambda: rr.Pipeline(fits, 0),
        "nothing": lambda: rr.Pipeline([*fits[:-1], lambda: None]),
        "no layers": lambda: rr.Pipeline([*fits[:-1], lambda: []]),
        "empty model": lambda: rr.Pipeline([lambda: keras.Sequential(begin), *fits[1:]]),
        "no input": lambda: rr.Pipeline([lambda: [keras.layers.Dense(3)], *fits[1:]]),
        "shapes": lambda: rr.Pipeline(
            [*fits[:-1], lambda: [keras.Input((9,)), keras.layers.Dense(1)]]
        ),
        "numbers": lambda: rr.Pipeline(
            [lambda: keras.Model(begin, keras.ops.cast(dense(0)[1](begin[0]), "int32")), *fits[1:]]
        ),
        "mask": lambda: rr.Pipeline(
            [lambda: [keras.Input((3,)), keras.layers.Embedding(9, 2, mask_zero=True)], *fits[1:]]
        ),
        "any length": lambda: rr.Pipeline(
            [lambda: [keras.Input((None,)), keras.layers.Embedding(9, 2)], *fits[1:]]
        ),
    }
    for name, action in cases.items():
        say(name, **error_of(action))
    pipeline, _ = made()
    x, y = data(96)
    say("not compiled", **error_of(lambda: pipeline.fit(x, y)))
    by_norm = keras.optimizers.SGD(0.1, global_clipnorm=1.0)
    say("norm", **error_of(lambda: pipeline.compile(by_norm, "mse")))
    by_all = type("Own", (keras.optimizers.SGD,), {"apply_gradients": lambda *_: None})(0.1)
    say("own step", **error_of(lambda: pipeline.compile(by_all, "mse")))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    say("scale", **error_of(lambda: pipeline.compile(scaled, "mse")))
    pipeline.compile("sgd", "mse")
    say("arrays", **error_of(lambda: pipeline.fit(x, y, batch_size=30)))
    uneven = tf.data.Dataset.from_tensor_slices(data(22)).batch(22)
    say("short", **error_of(lambda: pipeline.fit(uneven, verbose=0)))
    say("batched", **error_of(lambda: pipeline.fit(uneven, batch_size=16)))
    same = keras.callbacks.ModelCheckpoint("model.keras")
    backup = keras.callbacks.BackupAndRestore("backup")
    for name, callback in (("one file", same), ("backup", backup)):
        fit = {"batch_size": 16, "verbose": 0, "callbacks": callback}
        say(name, **error_of(lambda fit=fit: pipeline.fit(x, y, **fit)))
    if comm.size > STAGES:
        whole = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
        say("whole job", **error_of(lambda: pipeline.compile(whole, "mse")))
        pipeline, _ = made()
        pipeline.compile("sgd", "mse")
    rows = 64 if pipeline.stage == 0 else 96
    fit = {"batch_size": 16, "verbose": 0}
    say("other data", **error_of(lambda: pipeline.fit(x[:rows], y[:rows], **fit)))


class Dies(keras.layers.Layer):
    """Kills rank 1 in the sixth of its passes."""

    def call(self, inputs):
        self.passes = 0

        def count(values):
            self.passes += 1
            if self.passes == 6 and comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return values

        outputs = tf.numpy_function(count, [inputs], inputs.dtype)
        return inputs + 0 * tf.stop_gradient(tf.ensure_shape(outputs, inputs.shape))


def killed():
    """Rank 1 is killed in the middle of a step."""

    def make(number):
        return [*dense(number), Dies()] if number == 1 else dense(number)

    functions = [lambda number=number: make(number) for number in range(STAGES)]
    pipeline = rr.Pipeline(functions, micro_batches=4)
    pipeline.compile("sgd", "mse")
    x, y = data(96)
    try:
        pipeline.fit(x, y, batch_size=16, verbose=0)
    except RingReduceError as error:
        say("killed", error=type(error).__name__, text=str(error))
        raise


if sys.argv[1:] == ["killed"]:
    killed()
else:
    # Others train with fewer than stages.
    for count in (8,) if STAGES == 3 else (1, 2, 8):
        exact(count)
    trained()
    of_dataset()
    if comm.size > STAGES:
        unequal()
    functions()
    reduced()
    stopped()
    refused()
