"""Training steps beyond the plain one, on a ring; each case prints one line of JSON.

What must come out is computed beside it, by plain Keras, on the data of all ranks together.
"""

import keras
import numpy as np
import tensorflow as tf
from shared import built, difference, digest, error_of, keep_graphs, say

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd

keep_graphs()
comm = rr.init()
LOSS = keras.losses.MeanSquaredError()


def data(steps, batch, seed=0):
    """Inputs and targets, (steps * size * batch, ...): a step's global batch after another."""
    generator = np.random.default_rng(seed)
    count = steps * comm.size * batch
    inputs = generator.normal(size=(count, 4)).astype("float32")
    return inputs, inputs[:, :2] - inputs[:, 2:] ** 2


def own(arrays, batch):
    """This rank's batches of those that `data` gives."""
    return [
        array.reshape(-1, comm.size, batch, array.shape[1])[:, comm.rank].reshape(
            -1, array.shape[1]
        )
        for array in arrays
    ]


def make_model(*layers, seed=5):
    keras.utils.set_random_seed(seed)
    middle = layers or (keras.layers.Dense(6, activation="tanh"),)
    return keras.Sequential([keras.Input((4,)), *middle, keras.layers.Dense(2)])


def fit_alone(model, optimizer, arrays, batch):
    """What the ranks must come to, by plain Keras on rank 0; tracing would take longer."""
    model.compile(optimizer, LOSS, run_eagerly=True)
    if comm.rank == 0:
        model.fit(*arrays, batch_size=batch, shuffle=False, verbose=0)


def fit(model, optimizer, arrays, batch, callbacks=(), is_built=True, **options):
    model.compile(optimizer=optimizer, loss=LOSS, **options)
    if is_built:
        built(model)
    model.fit(*arrays, batch_size=batch, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


class Spike(keras.layers.Layer):
    """Passes its input on, times infinity where that says so."""

    def call(self, inputs):
        return inputs * tf.where(tf.reduce_any(inputs > 100.0), np.inf, 1.0)


def half_precision():
    """One rank alone meets an infinity in its third step."""
    inputs, targets = own(data(6, 4), 4)
    if comm.rank == comm.size - 1:
        inputs[8:12] = 1000.0
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model(Spike(dtype="float32"), keras.layers.Dense(6, activation="tanh"))
    finally:
        keras.config.set_dtype_policy("float32")
    first = model.get_weights()[0].copy()
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.01))
    fit(model, optimizer, (inputs, targets), 4, is_built=False)
    say(
        "mixed_float16",
        digest=digest(model.get_weights()),
        optimizer=type(model.optimizer).__name__,
        inner=type(model.optimizer._inner).__name__,
        is_ours=isinstance(model.optimizer, rr.DistributedOptimizer),
        scale=float(model.optimizer.dynamic_scale.numpy()),
        steps=int(model.optimizer.iterations.numpy()),
        finite=bool(all(np.isfinite(w).all() for w in model.get_weights())),
        moved=float(np.abs(first - model.get_weights()[0]).max()),
        dtypes=sorted({w.dtype.name for w in model.get_weights()}),
    )


def wrapped_by_hand():
    """LossScaleOptimizer around ours, and around ours that has one already."""
    ours = rr.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="bf16")
    outer = keras.optimizers.LossScaleOptimizer(ours, initial_scale=8.0)
    again = keras.optimizers.LossScaleOptimizer(outer)
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    say(
        "loss scale around",
        ours=isinstance(outer, rr.DistributedOptimizer),
        scale=outer.initial_scale,
        rate=float(outer.learning_rate),
        options=outer._options["compression"],
        same=again._inner is outer._inner,
        plain=type(plain) is keras.optimizers.LossScaleOptimizer,
    )


def accumulation(name, make, **options):
    """Three steps added up equal one with three times the batch; seven leave one over."""
    arrays = data(7, 4, seed=1)
    policy = options.pop("policy", "float32")
    keras.config.set_dtype_policy(policy)
    try:
        model, alone = make_model(), make_model()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = rr.DistributedOptimizer(make(), accumulate_steps=3)
    fit(model, optimizer, own(arrays, 4), 4, **options)
    whole = [array[: 6 * comm.size * 4] for array in arrays]
    fit_alone(alone, make(), whole, 3 * comm.size * 4)
    say(
        f"accumulation {name}",
        digest=digest(model.get_weights()),
        difference=difference(model, alone),
        moved=difference(alone, make_model()),
        steps=int(model.optimizer.iterations.numpy()),
        variables=[len(each.optimizer.variables) for each in (model, alone)],
    )


def accumulation_keeps_the_order():
    """Two optimizers that reduce in conditions, and collectives around and between them.

    The conditions touch variables, and each of them others: nothing but the program's order says
    what comes first.
    """
    models = [make_model(), make_model()]
    optimizers = [
        rr.DistributedOptimizer(keras.optimizers.SGD(0.1), accumulate_steps=2) for _ in models
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    inputs, targets = own(data(8, 4, seed=3), 4)
    counter = tf.Variable(0.0)

    @tf.function
    def step(x, y):
        sums = [rr.all_reduce(tf.ones(1))]
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            sums.append(rr.all_reduce(tf.ones(2)))
        for _ in tf.range(2):
            counter.assign_add(rr.all_reduce(1.0))
        return tf.concat([*sums, rr.all_reduce(tf.ones(3))], 0)

    sums = [step(inputs[i : i + 4], targets[i : i + 4]) for i in range(0, len(inputs), 4)]
    say(
        "order",
        digests=[digest(model.get_weights()) for model in models],
        sums=sorted({float(value) for total in sums for value in total}),
        counter=float(counter),
    )


def accumulation_forgets_infinity():
    """An infinity in one of the steps skips that update alone."""
    inputs, targets = own(data(6, 4, seed=2), 4)
    if comm.rank == 0:
        inputs[4:8] = 1000.0
    model = make_model(Spike(), keras.layers.Dense(3))
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=4.0)
    optimizer = rr.DistributedOptimizer(inner, accumulate_steps=2)
    fit(model, optimizer, (inputs, targets), 4, run_eagerly=True)
    say(
        "accumulated infinity",
        digest=digest(model.get_weights()),
        scale=float(optimizer.dynamic_scale.numpy()),
        steps=int(optimizer.iterations.numpy()),
        finite=bool(all(np.isfinite(w).all() for w in model.get_weights())),
    )


def accumulated_sparse_gradients():
    """Sparse gradients add up too."""
    keras.utils.set_random_seed(30)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(7, 2)])
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    index = np.arange(2 * comm.size * 3).reshape(2, comm.size, 3) % 5
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), accumulate_steps=2)
    given = index[:, comm.rank], np.zeros((2, 3, 2))
    fit(model, optimizer, given, 1, run_eagerly=True)
    every = index.reshape(-1, 3)
    fit_alone(alone, keras.optimizers.SGD(1.0), (every, np.zeros((len(every), 3, 2))), len(every))
    say(
        "accumulated sparse",
        digest=digest(model.get_weights()),
        difference=difference(model, alone),
    )


def refused_accumulation():
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    say("inner accumulation", **error_of(lambda: rr.DistributedOptimizer(inner)))
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    say("inner accumulation, scaled", **error_of(lambda: rr.DistributedOptimizer(scaled)))


def local_variables():
    """One variable stays each rank's own, with its values, gradients and optimizer state."""
    shared, mine = (keras.Variable(np.full(3, float(comm.rank))) for _ in range(2))
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    optimizer.register_local_var(mine)

    @tf.function
    def step(gradient):
        optimizer.apply([gradient, gradient], [shared, mine])

    for _ in range(2):
        step(tf.fill((3,), float(comm.rank + 1)))
    say("local", shared=shared.numpy().tolist(), mine=mine.numpy().tolist())


def accumulated_local_variables():
    """A local variable gets the mean of its own rank's gradients alone."""
    shared, mine = (keras.Variable(np.zeros(3)) for _ in range(2))
    optimizer = rr.DistributedOptimizer(
        keras.optimizers.SGD(1.0), accumulate_steps=2, local_variables=[mine]
    )

    @tf.function
    def step(gradient):
        optimizer.apply([gradient, gradient], [shared, mine])

    for factor in (1.0, 3.0):
        step(tf.fill((3,), factor * (comm.rank + 1)))
    say("accumulated local", shared=shared.numpy().tolist(), mine=mine.numpy().tolist())


def local_layer():
    """What copies and compares weights leaves a local layer alone, and its momentum."""
    model = make_model()
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
    for variable in model.layers[0].trainable_variables:
        optimizer.register_local_var(variable)
        variable.assign(variable + comm.rank)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), rr.callbacks.VerifyReplicas(1)]
    fit(model, optimizer, own(data(3, 4), 4), 4, callbacks=callbacks, run_eagerly=True)
    local, shared = ([w.tobytes().hex() for w in layer.get_weights()] for layer in model.layers)
    momenta = {v.path.rpartition("/")[2]: v.numpy().tobytes().hex() for v in optimizer.variables}
    kept = [
        momenta[f"{v.path.replace('/', '_')}_momentum"] for v in model.layers[0].trainable_variables
    ]
    say("local layer", local=local, shared=shared, momenta=kept)


def sets_of_variables():
    """An optimizer applied to its variables in parts: all begin alike, each has its own steps."""
    for steps in (1, 2):
        first, second = (keras.Variable(np.full(2, float(comm.rank))) for _ in range(2))
        inner = keras.optimizers.SGD(1.0)
        inner.build([first, second])
        optimizer = rr.DistributedOptimizer(inner, accumulate_steps=steps)
        for _ in range(4):
            optimizer.apply([tf.ones(2)], [first])
            optimizer.apply([tf.ones(2)], [second])
        say(f"sets {steps}", values=[first.numpy().tolist(), second.numpy().tolist()])


def one_rank_builds():
    """Must come last: it breaks the ring."""
    model = make_model()
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, loss=LOSS)

    def differ():
        if comm.rank == 0:
            optimizer.build(model.trainable_variables)
        else:
            rr.fold_seeds(model)

    say("one builds", **error_of(differ))


def eight_bits():
    """The new value of a scale is from what one rank has seen."""
    model = make_model()
    for layer in model.layers:
        layer.quantize("float8")
    given = rr.DistributedOptimizer(keras.optimizers.SGD(0.1)), own(data(6, 4), 4), 4
    say("eight bits", **error_of(lambda: fit(model, *given)))


def frozen_layers():
    """Only what is trainable has gradients; the ranks agree on the rest by themselves."""
    model = make_model()
    frozen = model.layers[0]
    frozen.trainable = False
    before = frozen.get_weights()
    arrays = data(4, 4, seed=3)
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    fit(model, optimizer, own(arrays, 4), 4, run_eagerly=True)
    same = all((a == b).all() for a, b in zip(before, frozen.get_weights(), strict=True))
    alone = make_model()
    alone.layers[0].trainable = False
    fit_alone(alone, keras.optimizers.SGD(0.1), arrays, 4 * comm.size)
    say(
        "frozen", digest=digest(model.get_weights()), same=same, difference=difference(model, alone)
    )


def several_models():
    """Models and optimizers of equal shapes in turns."""
    arrays = data(2, 4, seed=4)
    models, alone = ([make_model(seed=7), make_model(seed=8)] for _ in range(2))
    optimizers = [rr.DistributedOptimizer(keras.optimizers.Adam(0.01)) for _ in models]
    plain = [keras.optimizers.Adam(0.01) for _ in models]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            if not model.compiled:
                model.compile(optimizer, LOSS, run_eagerly=True)
                built(model)
            model.fit(*own(arrays, 4), batch_size=4, shuffle=False, verbose=0)
        for model, optimizer in zip(alone, plain, strict=True):
            fit_alone(model, optimizer, arrays, 4 * comm.size)
    say(
        "several",
        digest=[digest(model.get_weights()) for model in models],
        difference=max(difference(a, b) for a, b in zip(models, alone, strict=True)),
    )


def dropout(run_eagerly):
    """Masks differ between the ranks, weights do not."""
    keras.utils.set_random_seed(11)
    layer = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(32), layer])
    if run_eagerly:
        rr.fold_seeds(model)
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        loss=LOSS,
        run_eagerly=run_eagerly,
    )
    model.fit(np.ones((4, 4)), np.ones((4, 32)), batch_size=2, verbose=0)
    first = layer.seed_generator.state.numpy().tolist()
    rr.fold_seeds(model)
    rr.broadcast_variables(model.variables, root_rank=0)
    mask = layer(np.ones((1, 64)), training=True).numpy() != 0
    say(
        f"dropout {'eager' if run_eagerly else 'graph'}",
        digest=digest(model.get_weights()),
        state=first,
        again=layer.seed_generator.state.numpy().tolist()[0] == first[0],
        mask=mask.tolist(),
    )


half_precision()
wrapped_by_hand()
accumulation(
    "adam, clipped, eager",
    lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    run_eagerly=True,
)
accumulation(
    "several steps", lambda: keras.optimizers.SGD(0.1, momentum=0.5), steps_per_execution=4
)
accumulation(
    "mixed_float16",
    lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=16.0),
    policy="mixed_float16",
    run_eagerly=True,
)
accumulation_keeps_the_order()
accumulation_forgets_infinity()
accumulated_sparse_gradients()
refused_accumulation()
local_variables()
accumulated_local_variables()
local_layer()
sets_of_variables()
eight_bits()
frozen_layers()
several_models()
dropout(False)
dropout(True)
one_rank_builds()
