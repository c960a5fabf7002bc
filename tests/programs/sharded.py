"""`DistributedOptimizer(sharded=True)` beside the same without it; each case is a line of JSON."""

import gc
import sys
import weakref

import keras
import numpy as np
import tensorflow as tf
from shared import digest, error_of, keep_graphs, say

import ringreduce.keras as rr
from ringreduce.keras.training import loop

keep_graphs()
comm = rr.init()
loop._CALL_S = 1.0 if comm.rank else 1e-6  # Where nobody looks, ranks make other calls.
folder, cases = sys.argv[1], sys.argv[2:]
RATE = 0.01
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(RATE),
    "momentum": lambda: keras.optimizers.SGD(RATE, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(RATE, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(RATE),
    "adamw": lambda: keras.optimizers.AdamW(RATE, weight_decay=0.3),
    "rmsprop": lambda: keras.optimizers.RMSprop(RATE),
    "adagrad": lambda: keras.optimizers.Adagrad(RATE),
    "clipped": lambda: keras.optimizers.Adam(RATE, global_clipnorm=0.5),
    "clipnorm": lambda: keras.optimizers.Adam(RATE, clipnorm=0.05),
}
generator = np.random.default_rng(0)
X = generator.normal(size=(50, 20)).astype("float32")
Y = generator.normal(size=(50, 3)).astype("float32")


def make(sharded=True, name="adam", policy="float32", optimizer=None, **options):
    """A model of odd sizes, of which some ranks have nothing; the buckets are small."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    widths = 37, 32, 53, 1, 3  # of which XLA has 37 x 32 and 32 x 53 reduced in place
    layers = [keras.layers.Dense(n, "tanh", name=f"dense{n}") for n in widths]
    model = keras.Sequential([keras.Input((20,)), *layers])
    keras.config.set_dtype_policy("float32")
    how = {key: options.pop(key) for key in ("run_eagerly", "jit_compile") if key in options}
    inner = OPTIMIZERS[name]() if optimizer is None else optimizer
    wrapped = rr.DistributedOptimizer(inner, sharded=sharded, bucket_bytes=4096, **options)
    model.compile(wrapped, "mse", **how)
    return model


def fit(model, epochs=2, **options):
    # The last batch is short: ranks count by their rows.
    return rr.fit(model, X, Y, batch_size=16, epochs=epochs, verbose=0, **options)


def trained(name="adam", then=lambda model: None, **options):
    """What a sharded and a plain update end with, after `then` in between."""
    ends = []
    for sharded in (True, False):
        model = make(sharded, name, **options)
        fit(model)
        then(model)
        fit(model, seed=5)
        ends.append(model)
    pairs = list(zip(*(model.get_weights() for model in ends), strict=True))
    return {
        "weights": digest(ends[0].get_weights()),
        "is_equal": all((one == other).all() for one, other in pairs),
        "difference": max(float(np.abs(one - other).max()) for one, other in pairs),
        "kept": sum(int(np.prod(each.shape)) for each in ends[0].optimizer.variables),
        "whole": sum(int(np.prod(each.shape)) for each in ends[1].optimizer.variables),
    }


def thaw(model):
    """One layer is not trained for an epoch."""
    for trainable in (False, True):
        model.get_layer("dense53").trainable = trainable
        model.compile(model.optimizer, "mse")
        fit(model, 1, seed=3)


def in_a_loop():
    weights = []
    for sharded in (True, False):
        model = make(sharded)
        model.optimizer.build(model.trainable_variables)

        @tf.function
        def step(x, y, model=model):
            with tf.GradientTape() as tape:
                # The one before the last has no gradient.
                loss = tf.reduce_mean((model.layers[1](model.layers[0](x)) - y[:, :1]) ** 2)
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)

        for _ in range(3):
            step(X[comm.rank :: comm.size], Y[comm.rank :: comm.size])
        weights.append(digest(model.get_weights()))
    return {"weights": weights[0], "is_equal": weights[0] == weights[1]}


def two_optimizers():
    """As a GAN has: each shards what it trains."""

    class Two(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            for optimizer, layers in zip(self.two, (self.layers[:1], self.layers[1:]), strict=True):
                variables = [v for layer in layers for v in layer.trainable_variables]
                optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    found = []
    for sharded in (True, False):
        model = make(sharded)
        two = Two(model.layers)
        two.two = [model.optimizer, rr.DistributedOptimizer(OPTIMIZERS["sgd"](), sharded=sharded)]
        two.compile(model.optimizer, "mse")
        rr.fit(two, X[:48], Y[:48], batch_size=16, epochs=2, verbose=0, shuffle=False)
        found.append(digest(two.get_weights()))
    return {"weights": found[0], "is_equal": found[0] == found[1]}


def saved():
    """Files are those of plain Keras, whoever writes them; training goes on as it would have."""
    model, path = make(), f"{folder}/{comm.size}"
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(f"{path}.keras")])
    rr.on_rank_zero(lambda: model.save_weights(f"{path}.weights.h5"))
    weights = make()
    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(f"{path}.weights.h5")
    loaded = rr.load_model(f"{path}.keras")
    plain = rr.load_model(f"{path}.keras", sharded=False)
    found = [model, weights, loaded, plain]
    for one in found:
        fit(one, seed=5)
    shapes = [list(v.shape) for v in keras.models.load_model(f"{path}.keras").optimizer.variables]
    return {
        "weights": [digest(one.get_weights()) for one in found],
        "is_sharded": [one.optimizer.options["sharded"] for one in found],
        "shapes": shapes[2:6],
    }


def restarted():
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyError

    found = []
    for stops in ([Stop()], []):
        model = make()
        try:
            fit(model, 4, backup_dir=f"{folder}/backup{comm.size}", callbacks=stops)
        except KeyError:
            continue
        found.append(model)
    fit(whole := make(), 4)
    return {"weights": [digest(one.get_weights()) for one in (*found, whole)]}


def decayed():
    """Also where the optimizer was built, and used, before it was wrapped."""

    def exclusions(sharded, builds):
        inner = OPTIMIZERS["adamw"]()
        model = make(sharded, optimizer=inner)
        inner.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
        if builds:
            inner.build(model.trainable_variables)
            ones = [tf.ones(each.shape) for each in model.trainable_variables]
            inner.apply(ones, model.trainable_variables)
        fit(model)
        return digest(model.get_weights())

    ends = [[exclusions(sharded, builds) for builds in (False, True)] for sharded in (True, False)]
    return {"weights": ends[0], "is_equal": ends[0] == ends[1]}


def not_finite():
    """An infinity of one rank reaches all, and all skip alike."""
    ends = []
    for sharded in (True, False):
        model = make(sharded, policy="mixed_float16")
        x = X.copy()
        x[3] = np.inf
        rr.fit(model, x, Y, batch_size=16, epochs=2, verbose=0, check=False)
        ends.append(digest(model.get_weights()))
    return {"weights": ends[0], "is_equal": ends[0] == ends[1]}


def begun():
    """State that only rank 0 has when training begins is that of all ranks."""

    def ended(sharded, builds):
        inner = OPTIMIZERS["adam"]()
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((20,)), keras.layers.Dense(99), keras.layers.Dense(3)]
        )
        if builds or comm.rank == 0:
            inner.build(model.trainable_variables)
        if comm.rank == 0:
            ones = [tf.ones(each.shape) for each in model.trainable_variables]
            inner.apply(ones, model.trainable_variables)
        model.compile(rr.DistributedOptimizer(inner, sharded=sharded), "mse")
        fit(model)
        inner.learning_rate = RATE / 10  # The user's own is the one that updates.
        fit(model, seed=7)
        return digest(model.get_weights())

    ends = [[ended(sharded, builds) for builds in (True, False)] for sharded in (True, False)]
    return {"weights": ends[0], "is_equal": ends[0] == ends[1]}


def pieces():
    """Split layers on pairs of ranks keep their pieces whole, in files too."""
    group, data = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    found = []
    for sharded in (True, False):
        keras.utils.set_random_seed(1)
        layer = rr.ColumnParallelDense(30, gather_output=True, communicator=group)
        model = keras.Sequential([keras.Input((20,)), layer, keras.layers.Dense(3)])
        wrapped = rr.DistributedOptimizer(OPTIMIZERS["adam"](), data, sharded=sharded)
        model.compile(wrapped, "mse")
        fit(model, communicator=data)
        path = f"{folder}/pieces{sharded}.keras"
        rr.on_rank_zero(lambda model=model, path=path: model.save(path))
        plain = keras.models.load_model(path)
        shapes = [tuple(each.shape) for each in plain.optimizer.variables]
        found.append((digest(model.get_weights()), digest(plain.get_weights()), shapes))
    return {"weights": found[0][1], "is_equal": found[0] == found[1]}


def exported():
    """Without the optimizer, of which a model for inference has no need."""
    model = make()
    fit(model, 1)
    rr.on_rank_zero(lambda: model.export(f"{folder}/export{comm.size}", verbose=False))
    found = tf.saved_model.load(f"{folder}/export{comm.size}")
    same = np.array_equal(found.serve(X), model.predict(X, verbose=0))
    return {"weights": digest(model.get_weights()), "is_equal": bool(same)}


def freed():
    """What is left of an optimizer that has trained in a graph, once nothing refers to it."""

    def used():
        model = make()
        model.optimizer.build(model.trainable_variables)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(X))
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)

        step()
        return weakref.ref(model.optimizer._sharding._buckets._memory)

    memory = used()
    gc.collect()
    comm.barrier()
    return {"is_freed": memory() is None}


def refused():
    model = make()
    fit(model, 1)
    tried = {
        "alone": lambda: model.save(f"{folder}/alone.keras"),
        "checkpoint": lambda: tf.train.Checkpoint(optimizer=model.optimizer).save(folder),
        "constraint": lambda: constrained(),
        "rows": lambda: looked_up(),
        "divided": lambda: rr.DistributedOptimizer(model.optimizer._inner, sharded=True),
        "file of rank 0": lambda: loaded_by_one(),
    }
    return {name: error_of(action)["text"] for name, action in tried.items()}


def loaded_by_one():
    """As Horovod's users do; then all ranks would have to get their pieces."""
    ring, path = comm.split(0), f"{folder}/alone.weights.h5"
    model = make(communicator=ring)
    fit(model, 1, communicator=ring)
    rr.on_rank_zero(lambda: model.save_weights(path), communicator=ring)
    model = make(communicator=ring)
    model.optimizer.build(model.trainable_variables)
    if comm.rank == 0:
        model.load_weights(path)
    fit(model, 1, communicator=ring)


def constrained():
    layer = keras.layers.Dense(3, kernel_constraint="max_norm")
    model = keras.Sequential([keras.Input((20,)), layer])
    model.compile(rr.DistributedOptimizer(OPTIMIZERS["sgd"](), sharded=True), "mse")
    fit(model, 1)


def looked_up():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(9, 5, name="table")])
    model.compile(rr.DistributedOptimizer(OPTIMIZERS["sgd"](), sharded=True), "mse")
    rr.fit(model, np.ones((8, 2), "int32"), np.ones((8, 2, 5)), batch_size=4, verbose=0)


CASES = {
    **{f"{name} graph": lambda name=name: trained(name) for name in OPTIMIZERS},
    "adam eager": lambda: trained(run_eagerly=True),
    "rmsprop eager": lambda: trained("rmsprop", run_eagerly=True),
    "adam jit": lambda: trained(jit_compile=True),
    "accumulated": lambda: trained(accumulate_steps=2),
    "sum": lambda: trained(op="sum"),
    "half": lambda: trained(policy="mixed_float16"),
    "frozen": lambda: trained(then=thaw),
    "set": lambda: trained(then=lambda m: m.set_weights([w / 2 for w in m.get_weights()])),
    "loop": in_a_loop,
    "two optimizers": two_optimizers,
    "decayed": decayed,
    "not finite": not_finite,
    "saved": saved,
    "restarted": restarted,
    "begun": begun,
    "exported": exported,
    **({"pieces": pieces} if comm.size == 4 else {}),
    "refused": refused,
    "freed": freed,
}
for case in cases or CASES:
    say(case, **CASES[case]())
