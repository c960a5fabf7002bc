"""Two groups, of a job of four ranks; or, in a job of two, what one of them does.

Each group trains other models on other data, with everything of `ringreduce.keras` that takes a
communicator. A job of two passes none. What both say must be equal. Arguments: the group's number,
of a job of two; and ``fit``, for what takes longer.
"""

import functools
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from shared import built, digest, error_of, say

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce.tensorflow import xla

comm = rr.init()
group = comm.split(comm.rank // 2) if comm.size == 4 else None
number = comm.rank // 2 if group else int(sys.argv[1])
ring = group or comm
over = {"communicator": group}
# Rows that do not divide evenly, and other amounts of everything on each pair.
ROWS, WIDTH = 21 + 4 * number, 3 + number


def arrays():
    generator = np.random.default_rng(number)
    inputs = generator.integers(-4, 5, (ROWS, WIDTH)).astype("float32")
    return inputs, inputs[:, :2] ** 2


def model_of(**options):
    keras.utils.set_random_seed(number)
    layers = [
        keras.layers.Dense(4, activation="tanh"),
        *[keras.layers.Dense(3)] * number,
        rr.SyncBatchNormalization(momentum=0.5, **over),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.01), **over)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    return built(model, np.zeros((1, WIDTH)), np.zeros((1, 2)))


def callbacks():
    return [
        hvd.callbacks.LearningRateWarmupCallback(0.02, 1, **over),
        rr.callbacks.VerifyReplicas(2, **over),
        hvd.callbacks.BroadcastGlobalVariablesCallback(1, **over),
        keras.callbacks.EarlyStopping("val_loss", patience=1),
    ]


def numbers_of(logs):
    return {name: np.asarray(values, np.float64).tolist() for name, values in logs.items()}


def fitted():
    model, data = model_of(), arrays()
    options = {"validation_split": 0.3, "verbose": 0, "callbacks": callbacks(), **over}
    history = rr.fit(model, *data, batch_size=8, epochs=2 + number, **options)
    say(
        "fit",
        weights=digest(model.get_weights()),
        history=numbers_of(history.history),
        evaluated=numbers_of(rr.evaluate(model, *data, return_dict=True, **over)),
        predicted=digest([rr.predict(model, data[0], batch_size=4, **over)]),
    )
    with tempfile.TemporaryDirectory() as folder:
        # Ranks of a group have equal weights, but for moving averages of layers of their own.
        model.save(f"{folder}/model.keras")
        again = rr.load_model(f"{folder}/model.keras", sync_batch_normalization=True, **over)
    rr.fit(again, *data, batch_size=8, verbose=0, **over)
    say("loaded", weights=digest(again.get_weights()))


def joined():
    model = model_of(jit_compile=False)
    data = rr.shard(tf.data.Dataset.from_tensor_slices(arrays()), even=False, **over).batch(4)
    logs = rr.fit(model, data, sharded=True, epochs=2, verbose=0, callbacks=callbacks()[:2], **over)
    say("join", weights=digest(model.get_weights()), history=numbers_of(logs.history))


def in_a_loop():
    keras.utils.set_random_seed(ring.rank)
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    rr.broadcast_variables(model.trainable_variables, 1, **over)
    rr.verify_replicas(model.trainable_variables, **over)
    inputs, targets = arrays()
    order = np.asarray(ring.broadcast_object(np.random.permutation(ROWS).tolist()))
    rows = order[ring.rank :: ring.size]

    def step(inputs, targets):
        with rr.DistributedGradientTape(**over) as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with rr.step_weight(len(rows), **over):
        step(inputs[rows], targets[rows])
    dataset = tf.data.Dataset.from_tensor_slices((inputs[rows], targets[rows])).batch(3)
    for (some, others), _ in rr.joined(dataset, **over):
        step(some, others)
    say("loop", weights=digest(model.get_weights()), order=order.tolist())


def calls():
    generator = keras.random.SeedGenerator(number)
    rr.fold_seeds(generator, **over)
    # Keras traces a layer for its shapes, in a graph that never runs.
    exchange = keras.layers.Lambda(lambda rows: rr.all_to_all(rows, **over))
    model = keras.Sequential([keras.Input((3,)), exchange, keras.layers.Flatten()])
    say(
        "calls",
        layer=[plain(model(tf.fill((2, 3), float(ring.rank)))), model.output_shape],
        seed=np.asarray(generator.state).tolist(),
        zero=rr.on_rank_zero(lambda: ring.rank, **over),
    )


def of_both(value):
    """Collectives over the job and over the group, one after the other, with gradients."""
    with tf.GradientTape() as tape:
        tape.watch(value)
        whole = rr.all_reduce(value * (comm.rank + 1.0))
        parts = rr.all_to_all(whole + value * comm.rank, **over)
        loss = tf.reduce_sum(rr.all_reduce(parts**2, **over)) + tf.reduce_sum(whole)
    return whole, parts, tape.gradient(loss, value)


def mixed():
    value = tf.constant([1.0, 2.0])
    found = {"eager": of_both(value), "graph": tf.function(of_both)(value)}
    if xla.why_not() is None:
        found["jit"] = tf.function(of_both, jit_compile=True)(value)
    say("mixed", **{way: [each.numpy().tolist() for each in got] for way, got in found.items()})


def in_stages(weight):
    """Two tensors go from the first rank to the second, whose loss is of both."""
    with tf.GradientTape() as tape:
        tape.watch(weight)
        if ring.rank == 0:
            both = [rr.send(weight * (tag + 1.0), 1, tag=tag, **over) for tag in (5, 6)]
            loss = tf.reduce_sum(weight) + both[0] + 7.0 * both[1]
        else:
            spec = tf.TensorSpec(weight.shape, weight.dtype)
            first, second = (rr.recv(spec, 0, tag=tag, **over) for tag in (5, 6))
            loss = tf.reduce_sum(first**2 * weight) + 3.0 * tf.reduce_sum(second)
    return loss, tape.gradient(loss, weight)


def between_two():
    value = tf.constant([1.0, 2.0])
    ways = {"eager": in_stages, "graph": tf.function(in_stages, autograph=False)}
    if xla.why_not() is None:
        ways["jit"] = tf.function(in_stages, autograph=False, jit_compile=True)
    # What was traced runs again from its trace.
    say("stages", **{way: plain([run(value), run(value)]) for way, run in ways.items()})
    say("no rank to send to", **error_of(lambda: rr.send(value, 2, **over)))
    with tf.GradientTape() as outer:
        outer.watch(value)
        _, gradient = in_stages(value)
    say("second", **error_of(lambda: outer.gradient(gradient, value)))
    unknown = tf.TensorSpec((None, 2))
    say("unknown shape", **error_of(lambda: rr.recv(unknown, 1 - ring.rank, **over)))


def process_sets():
    """Horovod's groups: of the even ranks and of the odd ones."""
    own, other = hvd.add_process_set([2, 0]), hvd.ProcessSet((1, 3))
    say("not added", **error_of(lambda: hvd.barrier(other)))
    hvd.add_process_set(other)
    if comm.rank % 2:
        own, other = other, own
    of_set, last = {"process_set": own}, own.ranks[1]
    rows = tf.fill((3, 2), float(comm.rank))
    weight = keras.Variable([1.0 * comm.rank])
    hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **of_set).apply([[1.0]], [weight])
    source = keras.Variable([2.0 * comm.rank])
    with hvd.DistributedGradientTape(**of_set) as tape:
        loss = (comm.rank + 1.0) * source**2
    by_source = tape.gradient(loss, source)
    with tf.GradientTape() as tape:
        tape.watch(rows)
        gathered = hvd.allgather(rows, **of_set)
    layer = hvd.SyncBatchNormalization(momentum=0.0, **of_set)
    layer(rows, training=True)
    hvd.barrier(own)
    variable = tf.Variable(float(comm.rank))
    say(
        "process sets",
        mean=plain(hvd.allreduce(rows[:1], **of_set)),
        several=plain(hvd.grouped_allreduce([rows[:1], rows[:1]], average=False, **of_set)),
        gathered=plain(gathered),
        by_gathered=plain(tape.gradient(gathered, rows)),
        exchanged=plain(hvd.alltoall(rows, [1, 2], **of_set)),
        equal=plain(hvd.alltoall(rows[:2], **of_set)),
        sent=plain(hvd.broadcast(rows[:1], last, **of_set)),
        part=plain(hvd.reducescatter(rows[:2], op=hvd.Sum, **of_set)),
        objects=hvd.allgather_object(comm.rank, **of_set),
        object=hvd.broadcast_object(comm.rank, last, **of_set),
        variable=plain(hvd.broadcast_([variable], last, **of_set)[0]),
        optimized=plain(weight),
        by_source=plain(by_source),
        normalized=plain(layer.moving_mean),
        own=[own.rank(), own.size(), own.ranks, own.included(), other.included()],
        counted=[
            [int(op(one.process_set_id)) for one in (own, other, hvd.global_process_set)]
            for op in (hvd.size_op, hvd.process_set_included_op)
        ],
        ids=[own.process_set_id, other.process_set_id, hvd.global_process_set.process_set_id],
    )
    say("outside", **error_of(lambda: hvd.allreduce(rows, process_set=other)))
    say("outside optimizer", **error_of(lambda: hvd.DistributedOptimizer(None, process_set=other)))
    say("other root", **error_of(lambda: hvd.broadcast(rows, other.ranks[0], **of_set)))
    say("no rank", **error_of(lambda: hvd.add_process_set([3, 4])))
    removed = [hvd.remove_process_set(one) for one in (hvd.global_process_set, own, own)]
    say("removed", removed=removed, **error_of(lambda: hvd.barrier(own)))


def plain(value):
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return np.asarray(value).tolist()


def mistakes():
    """What is meant for a group and given the job's; last, since it breaks rings."""
    model = model_of()
    model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    say("other optimizer", **error_of(lambda: rr.fit(model, *arrays(), **over)))
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1), **over)
    layers = [keras.Input((WIDTH,)), rr.SyncBatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss="mse")
    together = rr.callbacks.Together([], **over)
    fit = functools.partial(model.fit, *arrays(), verbose=0, callbacks=[together])
    say("other layer", **error_of(fit))
    say("root", **error_of(lambda: rr.broadcast(tf.ones(2), 3, **over)))
    rows = arrays()[0][: 4 + ring.rank]
    say("rows", **error_of(lambda: rr.predict(model, rows, **over)))
    say("other sets", **error_of(lambda: hvd.add_process_set([comm.rank])))


if "fit" in sys.argv:
    fitted()
    joined()
in_a_loop()
calls()
if group is not None:
    mixed()
    between_two()
    process_sets()
    mistakes()
