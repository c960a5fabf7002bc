"""Collectives on tensors, the tape and batch normalization, with as many ranks as there are.

Each case prints one line of JSON, with what came out eagerly, in a graph, and compiled by XLA
where that can call the ring; what it should be is for the tests to say. Importing TensorFlow
takes longer than all cases, so they share processes.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from shared import built, digest, error_of, say

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce.keras import tape as tapes
from ringreduce.tensorflow import xla
from ringreduce.tensorflow.kept import kept
from ringreduce.vocabulary.types import DTYPE_NAMES

comm = rr.init()
rank, size = comm.rank, comm.size
OPS = ("sum", "mean", "min", "max", "product")
# On 2 ranks, in `make test`, XLA compiles only what it might do otherwise than a graph.
IS_USUAL = size == 2
# AutoGraph takes a tenth of a second for each function, and makes an error of its own, with the
# same text, of whatever is raised while it converts.
without_autograph = functools.partial(tf.function, autograph=False)


def plain(value):
    """Tensors as lists, in whatever structure they are."""
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    if isinstance(value, tf.Tensor | tf.Variable | keras.Variable):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        return value.astype(np.float64).tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def all_ways(actions, jit=True):
    """`actions`, by case, eagerly, traced and compiled; what was traced runs again from its trace.

    In one function, since each that is traced or compiled takes a fraction of a second.
    """
    found = {case: {} for case in actions}
    for way, wrap in wraps().items():
        if jit or way != "jit":
            wrapped = wrap(lambda: {case: action() for case, action in actions.items()})
            wrapped()
            for case, result in wrapped().items():
                found[case][way] = plain(result)
    for case, results in found.items():
        say(case, **results)


def wraps():
    """By way, what makes a function of it."""
    ways = {"eager": lambda step: step, "graph": without_autograph}
    if xla.why_not() is None:
        ways["jit"] = functools.partial(without_autograph, jit_compile=True)
    return ways


def weights(rows, dtype=tf.float32):
    """Upstream gradients: 1, 2, 3, ... with two columns."""
    return tf.reshape(tf.cast(tf.range(1, 2 * rows + 1), dtype), (rows, 2))


def counts_of(rank):
    """How many rows this rank sends to each; to some it sends none."""
    return [(rank + other) % 3 for other in range(size)]


def values():
    base = tf.reshape(tf.range(6) % 4, (3, 2)) + rank + 1
    variable = keras.Variable([1.0])
    actions = {
        "structure": lambda: rr.all_reduce(
            {"a": tf.fill((2,), float(rank)), "b": [np.float32(rank), variable]}
        ),
        "empty": lambda: rr.all_reduce(tf.zeros((0, 3))),
        "gather scalars": lambda: rr.all_gather(tf.constant(rank)),
        "scatter vector": lambda: rr.reduce_scatter(tf.range(5)),
        "scatter none": lambda: rr.reduce_scatter(tf.zeros((0, 4))),
        "parts of flags": lambda: rr.all_to_all(tf.range(2 * size) == rank),
    }
    for dtype in ("bfloat16", "int64"):
        actions[f"all_to_all {dtype}"] = lambda dtype=dtype: rr.all_to_all(
            weights(2 * size, dtype) + tf.cast(rank, dtype)
        )
    others = {}
    for op in OPS:
        actions[f"all_reduce {op}"] = lambda op=op: rr.all_reduce(tf.cast(base, tf.float32), op)
        for rows in (1, 5, 6):
            into = actions if rows == 5 else others
            into[f"scatter {rows} {op}"] = lambda rows=rows, op=op: rr.reduce_scatter(
                weights(rows) + float(rank), op
            )
    for dtype in DTYPE_NAMES:
        cast = functools.partial(tf.cast, base, dtype)
        actions[f"all_reduce {dtype}"] = lambda cast=cast: rr.all_reduce(cast())
        others[f"all_gather {dtype}"] = lambda cast=cast: rr.all_gather(cast())
        others[f"reduce_scatter {dtype}"] = lambda cast=cast: rr.reduce_scatter(cast(), "sum")
        others[f"broadcast {dtype}"] = lambda cast=cast: rr.broadcast(cast(), size - 1)
    all_ways(actions)
    all_ways(others, jit=not IS_USUAL)
    uneven = {
        "gather rows": lambda: rr.all_gather(tf.fill((rank, 2), float(rank))),
        "parts by counts": lambda: rr.all_to_all(weights(sum(counts)) + 10.0 * rank, counts),
    }
    counts = counts_of(rank)
    all_ways(uneven, jit=False)


def static_shapes():
    found = {}

    @tf.function(input_signature=[tf.TensorSpec((5, 2)), tf.TensorSpec((None, 2))])
    def shapes(known, rows):
        found["reduced"] = rr.all_reduce(known).shape.as_list()
        found["sent"] = rr.broadcast(known).shape.as_list()
        found["gathered"] = rr.all_gather(known).shape.as_list()
        found["scattered"] = rr.reduce_scatter(known).shape.as_list()
        found["unknown"] = rr.reduce_scatter(rows).shape.as_list()
        parts = tf.zeros((2 * size, 2))
        found["exchanged"] = rr.all_to_all(parts).shape.as_list()
        received = rr.all_to_all(parts, [2] * size)
        found["exchanged by counts"] = [one.shape.as_list() for one in received]
        return rr.reduce_scatter(rows)

    result = shapes(tf.ones((5, 2)), tf.ones((3, 2)))
    say("static shapes", **found, rows=result.shape.as_list())


def inputs_are_left_alone():
    source = tf.Variable(tf.fill((4,), float(rank)))

    @tf.function
    def step():
        value = source.read_value()
        first = rr.all_reduce(value)
        second = rr.broadcast(value, size - 1)
        third = rr.reduce_scatter(value)
        return value, first, second, third

    kept = step()[0], source.read_value()
    rr.all_reduce(kept[0])
    results = [rr.all_reduce(tf.fill((4,), float(step))) for step in range(3)]
    say("left alone", kept=plain(kept), results=plain(results))


def gradients():
    """Each rank's loss is weighted with its number plus one."""

    def of(collective, own, *arguments):
        def differentiate():
            value = tf.ones((own, 2))
            with tf.GradientTape() as tape:
                tape.watch(value)
                result = collective(value, *arguments)
                if isinstance(result, tuple):
                    result, _ = result
                weighted = result * weights(tf.shape(result)[0]) * (rank + 1.0)
                loss = tf.reduce_sum(weighted)
            return tape.gradient(loss, value)

        return differentiate

    def scalar():
        value = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = tf.reduce_sum(rr.all_gather(value) * tf.range(1.0, size + 1)) * (rank + 1.0)
        return tape.gradient(loss, value)

    def second():
        value = tf.constant([1.0, 2.0])
        with tf.GradientTape() as outer:
            outer.watch(value)
            with tf.GradientTape() as inner:
                inner.watch(value)
                loss = tf.reduce_sum(rr.all_reduce(value) ** 2)
            first = inner.gradient(loss, value)
        return first, outer.gradient(first, value)

    def through_all():
        """Gradients of gradients of each, by a function whose second derivatives are known."""
        value = tf.ones((size, 2))
        with tf.GradientTape() as outer:
            outer.watch(value)
            with tf.GradientTape() as inner:
                inner.watch(value)
                scattered = rr.reduce_scatter(value)
                gathered = rr.all_gather(scattered)
                sent = rr.broadcast(gathered, size - 1)
                loss = tf.reduce_sum(sent**2)
            first = inner.gradient(loss, value)
        return first, outer.gradient(first, value)

    def second_of_parts():
        value = tf.ones((size, 2))
        with tf.GradientTape() as outer:
            outer.watch(value)
            with tf.GradientTape() as inner:
                inner.watch(value)
                there = rr.all_to_all(value * (rank + 1.0))
                loss = tf.reduce_sum(there**2)
            first = inner.gradient(loss, value)
        return first, outer.gradient(first, value)

    def loop():
        value = tf.constant([1.0, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = tf.while_loop(
                lambda step, total: step < 3,
                lambda step, total: (step + 1, rr.all_reduce(total)),
                (0, value),
            )[1]
        return result, tape.gradient(result, value)

    all_ways(
        {
            "gradient sum": of(rr.all_reduce, 3, "sum"),
            "gradient mean": of(rr.all_reduce, 3, "mean"),
            "second derivative": second,
            "second derivative of all": through_all,
            "gradient all_to_all": of(rr.all_to_all, 2 * size),
            "loop": loop,
        }
    )
    others = {
        "gradient gather equal": of(rr.all_gather, 2),
        "gradient broadcast": of(rr.broadcast, 3, size - 1),
        "gradient scatter 1": of(rr.reduce_scatter, 1, "sum"),
        "gradient scatter 5": of(rr.reduce_scatter, 5, "sum"),
        "gradient scatter 6": of(rr.reduce_scatter, 6, "sum"),
        "gradient scatter mean": of(rr.reduce_scatter, 6, "mean"),
        "gradient gather scalars": scalar,
    }
    all_ways(others, jit=not IS_USUAL)
    own = 5 if rank == size - 1 else 0
    uneven = {
        "gradient gather": of(rr.all_gather, rank),
        "gradient gather of one rank's": of(rr.all_gather, own),
        "second derivative of parts": second_of_parts,
        "gradient parts by counts": of(rr.all_to_all, sum(counts_of(rank)), counts_of(rank)),
    }
    all_ways(uneven, jit=False)


def refusals():
    value = tf.ones((2, 2))
    say("bool", **error_of(lambda: rr.all_reduce(tf.constant([True]))))
    say("complex", **error_of(lambda: rr.all_gather(tf.constant([1j]))))
    say("text", **error_of(lambda: rr.broadcast(tf.constant(["a"]))))
    say("operator", **error_of(lambda: rr.all_reduce(value, "xor")))
    say("root", **error_of(lambda: rr.broadcast(value, size)))
    say("root in a graph", **error_of(without_autograph(lambda: rr.broadcast(value, -1))))
    say("no rows", **error_of(lambda: rr.reduce_scatter(tf.constant(1.0))))
    say("no parts", **error_of(lambda: rr.all_to_all(tf.constant(1.0))))
    say("counts", **error_of(lambda: rr.all_to_all(value, [1] * size + [2 - size])))
    say("other counts", **error_of(lambda: rr.all_to_all(value, [3] * size)))
    say("odd rows", **error_of(without_autograph(lambda: rr.all_to_all(tf.ones(2 * size + 1)))))

    @without_autograph
    def in_condition(flag):
        return tf.cond(flag, lambda: rr.all_reduce(value), lambda: value)

    say("cond", **error_of(lambda: in_condition(tf.constant(rank == 0))))

    with tf.Graph().as_default():
        say("old graph", **error_of(lambda: rr.all_reduce(tf.ones(2))))

    @tf.function(jit_compile=True, autograph=False)
    def in_loop_condition():
        return tf.while_loop(
            lambda total: tf.reduce_all(rr.all_reduce(total) < 9.0),
            lambda total: (total + 1.0,),
            (value,),
        )

    say("loop condition", **error_of(in_loop_condition))

    unknown = [tf.TensorSpec((None, 2))]

    @tf.function(jit_compile=True, autograph=False, input_signature=unknown)
    def compiled(rows):
        return rr.all_reduce(rows)

    say("jit", **error_of(lambda: compiled(value)))

    @tf.function(jit_compile=True, autograph=False)
    def compiled_parts():
        return rr.all_to_all(tf.ones((size, 2)), [1] * size)

    say("jit counts", **error_of(compiled_parts))

    def gradient(op, collective):
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = collective(value, op)
        return tape.gradient(result, value)

    for op in ("min", "max", "product"):
        say(f"gradient {op}", **error_of(lambda op=op: gradient(op, rr.all_reduce)))
        traced = without_autograph(lambda op=op: gradient(op, rr.reduce_scatter))
        say(f"gradient {op} in a graph", **error_of(traced))


def losses_of(model, batch, target):
    return tf.reduce_mean((model(batch, training=True) - target) ** 2)


def dense_model():
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)]
    )


def tape_trains_like_the_wrapper():
    data = np.arange(48, dtype="float32").reshape(12, 4) / 48
    data = data[rank :: comm.size]
    ends = {}
    # In graphs they are the same functions; what the tape adds to those is looked at below.
    ways = {"eager": lambda step: step} if IS_USUAL else wraps()
    for way, wrap in ways.items():
        for kind in ("tape", "wrapper"):
            model, optimizer = dense_model(), keras.optimizers.SGD(0.5)
            if kind == "wrapper":
                optimizer = rr.DistributedOptimizer(optimizer)
            optimizer.build(model.trainable_variables)

            @wrap
            def step(model=model, optimizer=optimizer, kind=kind):
                make = rr.DistributedGradientTape if kind == "tape" else tf.GradientTape
                with make() as tape:
                    loss = losses_of(model, data, data[:, :2])
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)

            for _ in range(3):
                step()
            ends[f"{way} {kind}"] = plain(model.get_weights())
    # The ring goes with bridges that were made for it; all loops above had the same options.
    say("tape", **ends, bridges=len(kept(comm, tapes._Shared).bridges))


def tape_costs_one_collective_a_step():
    model = dense_model()
    counts = []
    for _ in range(3):
        before = comm.statistics().collectives
        with rr.DistributedGradientTape() as tape:
            loss = losses_of(model, tf.ones((2, 4)), 0.0)
        tape.gradient(loss, model.trainable_variables)
        counts.append(comm.statistics().collectives - before)
    say("tape collectives", counts=counts)


def of_sources(step, sources):
    """`step` of `sources`, which are no arguments: a tf.function would make tensors of those."""
    return lambda: step(sources)


def tape_begins_with_rank_0s_values():
    """Every rank begins with its own; a second variable is a source from the second step on."""
    data = tf.constant(float(rank + 1))
    for way, wrap in wraps().items():
        first = keras.Variable([2.0 * rank + 1, 2.0])
        second, apart = tf.Variable(10.0 * rank + 3), tf.Variable(float(rank))

        def step(sources, variables=(first, second, apart)):
            first, second, apart = variables
            with rr.DistributedGradientTape() as tape:
                tape.watch(data)
                squares = tf.reduce_sum(tf.square(first)) + tf.square(second) + tf.square(apart)
                loss = data * squares
            return tape.gradient(loss, sources)

        one, other = {"a": [first, data]}, [second, {"b": first}, first]
        steps = [wrap(of_sources(step, sources)) for sources in (one, other, other)]
        gradients, counts = [], []
        for run in steps:
            before = comm.statistics().collectives
            gradients.append(plain(run()))
            counts.append(comm.statistics().collectives - before)
        say(
            f"tape initial {way}",
            gradients=gradients,
            collectives=counts,
            values=plain([first, second, apart]),
        )


def tape_of_what_its_function_makes():
    """A function that makes its variables has values for them only when it is traced again."""

    def making():
        made = []

        def step():
            if not made:
                made.append(tf.Variable(float(rank + 1)))
            with rr.DistributedGradientTape() as tape:
                loss = tf.square(made[0])
            return tape.gradient(loss, made[0]), made[0]

        return step

    for way, wrap in wraps().items():
        say(f"tape made {way}", gradient_and_value=plain(wrap(making())()))


def as_horovod_does():
    """Values and gradients under Horovod's names, and what only these have."""
    table = tf.Variable([[1.0, 2.0]] * 2)
    ways = {
        "allgather": hvd.allgather,
        "broadcast": lambda value: hvd.broadcast(value, size - 1),
        "reducescatter": lambda value: hvd.reducescatter(value, op=hvd.Sum)[:1],
        "reducescatter mean": lambda value: hvd.reducescatter(value)[:1],
        "allreduce": lambda value: hvd.allreduce(value, prescale_factor=3.0, postscale_factor=2.0),
    }

    def gradient(collective):
        with tf.GradientTape() as tape:
            value = tf.fill((size, 2), 1.0)
            tape.watch(value)
            result = collective(value)
            loss = tf.reduce_sum(result) * (rank + 1)
        return tape.gradient(loss, value)

    whole = tf.constant([-7 * rank - 1, 5 + 2 * rank, 9])

    def own_parts():
        """Each rank divides its own rows, of which they have different numbers."""
        with tf.GradientTape() as tape:
            rows = tf.fill(((rank + 1) * size, 2), 1.0 + rank)
            tape.watch(rows)
            received = hvd.alltoall(rows)
            loss = tf.reduce_sum(received) * (rank + 1)
        return received[:, 0], tape.gradient(loss, rows)[:, 0]

    count, flag = tf.Variable(0), keras.Variable([False, False], dtype="bool")

    def copied():
        count.assign(rank + 1)
        hvd.broadcast_variables([count], size - 1)
        values = hvd.broadcast_([count], 0)
        return count * 10, values

    def copied_flags():
        flag.assign([rank == size - 1, False])
        hvd.broadcast_variables([flag], size - 1)
        return tf.identity(flag)

    flags, small = tf.constant([rank == 0, True]), tf.constant([60_000, rank], tf.uint16)
    all_ways(
        {
            "flags": lambda: (rr.all_gather(flags), rr.all_reduce(flags, "min")),
            "uint16": lambda: (rr.all_reduce(small, "max"), rr.broadcast(small, size - 1)),
            "copied": copied,
        }
    )
    others = {
        f"horovod {name}": functools.partial(gradient, collective)
        for name, collective in ways.items()
    }
    others["horovod integers"] = lambda: (
        hvd.allreduce(whole),
        hvd.allreduce(whole, postscale_factor=2.0),
        hvd.allreduce(whole, prescale_factor=0.5, op=hvd.Sum),
        hvd.reducescatter(tf.tile(whole[:1], [size]), postscale_factor=1.5),
    )
    all_ways(others, jit=not IS_USUAL)
    slices = tf.IndexedSlices(tf.constant([[2.0 * size]]), tf.constant([rank]), tf.constant([4, 1]))
    both = hvd.allreduce(slices), rr.all_reduce(slices)
    say("slices", sparse=[isinstance(one, tf.IndexedSlices) for one in both], both=plain(both))
    say("least of slices", **error_of(lambda: hvd.allreduce(slices, op=hvd.Min)))
    whole = tf.IndexedSlices(tf.fill((1, 1), rank + 1), tf.constant([rank]))
    means = [hvd.grouped_allreduce([whole])[0], hvd.allreduce(whole, postscale_factor=2.0)]
    say("whole slices", values=[[plain(one.values), plain(one.indices)] for one in means])
    all_ways({"horovod alltoall": own_parts, "copied flags": copied_flags}, jit=False)
    odd = tf.ones((2 * size + 1, 2))
    say("horovod odd rows", **error_of(lambda: hvd.alltoall(odd)))

    def local():
        options = {"local_variables": [table], "op": "sum"}
        with rr.DistributedGradientTape(tf.GradientTape(True), **options) as tape:
            loss = tf.reduce_sum(table) * (rank + 1)
            other = tf.reduce_sum(first_of_all) * (rank + 1)
        return tape.gradient(loss, table), tape.gradient(other, first_of_all)

    first_of_all = tf.Variable([1.0])
    all_ways({"tape of local": local})
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    weight = keras.Variable([0.0])
    optimizer.apply([[rank + 1.0]], [weight])
    say("optimizer sum", weight=plain(weight))


def as_horovods_example_does():
    """With AutoGraph, whose errors are long."""
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.5 + rank)

    @tf.function
    def training_step(inputs, first_batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(inputs, training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    @tf.function
    def in_condition(flag):
        if flag:
            hvd.broadcast_variables(model.variables, root_rank=0)

    for step in range(3):
        training_step(tf.ones((2, 4)) * (rank + 1), step == 0)
    own = model.trainable_variables
    state = [variable for variable in optimizer.variables if variable.path != "iteration"]
    say("example", weights=plain(own), rate=plain(optimizer.learning_rate), state=plain(state))
    say("broadcast in a condition", **error_of(lambda: in_condition(tf.constant(True))))


def tape_structures():
    first, second = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    unused, table = tf.Variable(1.0), tf.Variable(tf.ones((4, 2)))

    def loss_of():
        picked = tf.gather(table, [rank, rank, 3])
        return (tf.reduce_sum(first**2) + second) * (rank + 1.0) + tf.reduce_sum(picked)

    def nested():
        with rr.DistributedGradientTape() as tape:
            loss = loss_of()
        return tape.gradient(loss, {"a": [first, unused], "b": (second, table)})

    def zeros_and_outputs():
        with rr.DistributedGradientTape(tf.GradientTape(True)) as tape:
            loss = loss_of()
        zero = tape.gradient(
            loss, [unused, second], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return zero, tape.gradient(loss, second, output_gradients=tf.constant(10.0))

    def watched():
        constant = tf.constant([1.0, 2.0])
        with rr.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
            tape.watch(constant)
            result = constant**2 * (rank + 1.0)
        watched = len(tape.watched_variables())
        return tape.gradient(result, constant), tf.constant(watched)

    def nothing():
        with rr.DistributedGradientTape(tf.GradientTape(True)) as tape:
            loss = loss_of()
        return tape.gradient(loss, []), tape.gradient(loss, unused)

    all_ways({"tape structure": nested})
    others = {"options": zeros_and_outputs, "of a tensor": watched, "of nothing": nothing}
    others = {f"tape {name}": action for name, action in others.items()}
    all_ways(others, jit=not IS_USUAL)

    def jacobian():
        with rr.DistributedGradientTape(tf.GradientTape(True)) as tape:
            result = first * (rank + 1.0)
        return tape.jacobian(result, first, experimental_use_pfor=False)

    say("tape jacobian", eager=plain(jacobian()))


def normalized_model(layer):
    keras.utils.set_random_seed(6)
    return keras.Sequential(
        [
            keras.Input((4, 4, 2)),
            keras.layers.Dense(3),
            layer(momentum=0.7),
            keras.layers.Activation("relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )


def normalization_in_fit():
    rng = np.random.default_rng(1)
    inputs = rng.normal(3, 2, (36, 4, 4, 2)).astype("float32")
    targets = rng.normal(size=(36, 2)).astype("float32")
    data = rr.shard(tf.data.Dataset.from_tensor_slices((inputs, targets))).batch(12 // size)
    if rank == 0:
        alone = normalized_model(keras.layers.BatchNormalization)
        start = alone.get_weights()
        alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
        alone.fit(inputs, targets, batch_size=12, shuffle=False, verbose=0)
        pairs = zip(start, alone.get_weights(), strict=True)
        moved = max(float(np.abs(first - last).max()) for first, last in pairs)
        say("normalization alone", weights=plain(alone.get_weights()), moved=moved)
    ways = {"fit": {}}
    if not IS_USUAL:
        ways |= {"eager": {"run_eagerly": True}, "jit": {"jit_compile": xla.why_not() is None}}
    for way, options in ways.items():
        model = normalized_model(rr.SyncBatchNormalization)
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
        model.compile(optimizer=optimizer, loss="mse", **options)
        built(model).fit(data, shuffle=False, verbose=0)
        before = comm.statistics().collectives
        if not IS_USUAL:
            model.evaluate(inputs, targets, verbose=0)
            model.predict(inputs, verbose=0)
        say(
            f"normalization {way}",
            weights=plain(model.get_weights()),
            digest=digest(model.get_weights()),
            sent=comm.statistics().collectives - before,
        )


def normalization_of(inputs, bounds, case, mask=None, **options):
    """The layer on this rank's rows, and Keras's own on all rows; outputs, gradients, moments."""
    upstream = tf.cast(np.random.default_rng(2).normal(size=inputs.shape), "float32")
    own = slice(bounds[rank], bounds[rank + 1])

    def run(layer, rows):
        layer.build(inputs.shape)
        value = tf.constant(inputs[rows])
        kept = None if mask is None else tf.constant(mask[rows])

        def step():
            with tf.GradientTape() as tape:
                tape.watch(value)
                result = layer(value, training=True, mask=kept)
                if kept is not None:
                    result = tf.where(kept[..., tf.newaxis], result, 0.0)
                loss = tf.reduce_sum(result * upstream[rows])
            by_input, by_gamma = tape.gradient(loss, [value, layer.gamma])
            return result, by_input, by_gamma

        return step

    def outcome(wrap):
        ours = rr.SyncBatchNormalization(momentum=0.5, **options)
        keras_own = keras.layers.BatchNormalization(momentum=0.5, **options)
        result, by_input, by_gamma = wrap(run(ours, own))()
        expected, expected_by_input, expected_by_gamma = run(keras_own, slice(None))()
        # The gamma's gradient is of this rank's rows alone; all together they are of all.
        by_gamma = rr.all_reduce(by_gamma)
        return {
            "got": plain([result, by_input, by_gamma, ours.moving_mean, ours.moving_variance]),
            "want": plain(
                [
                    expected[own],
                    expected_by_input[own],
                    expected_by_gamma,
                    keras_own.moving_mean,
                    keras_own.moving_variance,
                ]
            ),
        }

    ways = wraps()
    if IS_USUAL:
        # `fit` has a graph.
        kept = ("eager", "jit") if mask is not None else ("eager",)
        ways = {way: wrap for way, wrap in ways.items() if way in kept}
    say(case, **{way: outcome(wrap) for way, wrap in ways.items()})


def normalization_of_batches():
    rng = np.random.default_rng(3)
    rows = (3, 5, 0)[:size] if size > 1 else (8,)
    bounds = np.concatenate([[0], np.cumsum(rows)]).tolist()
    total = bounds[-1]
    inputs = rng.normal(2, 3, (total, 4, 3)).astype("float32")
    normalization_of(inputs, bounds, "moments uneven")
    normalization_of(inputs, bounds, "moments of the first axis", axis=1)
    mask = rng.random((total, 4)) < 0.6
    mask[:1] = True
    normalization_of(inputs, bounds, "moments masked", mask=mask)
    far = (1e4 + rng.normal(size=(total, 4, 3))).astype("float32")
    layer = rr.SyncBatchNormalization(momentum=0.0)
    layer(far[bounds[rank] : bounds[rank + 1]], training=True)
    exact = far.astype("float64").var((0, 1))
    say("moments far from zero", got=plain(layer.moving_variance), want=exact.tolist())


def normalization_frozen_or_copied():
    layer = rr.SyncBatchNormalization()
    layer.trainable = False
    before = comm.statistics().collectives
    layer(tf.ones((2, 3)), training=True)
    layer.trainable = True
    layer(tf.ones((2, 3)), training=False)
    model = keras.Sequential([keras.Input((3,)), rr.SyncBatchNormalization(momentum=0.0)])
    copied = keras.models.clone_model(model)
    copied(tf.fill((2, 3), float(rank)), training=True)
    say(
        "frozen",
        sent=comm.statistics().collectives - before,
        mean=plain(copied.layers[0].moving_mean),
    )


def shapes_that_differ():
    """Last: it breaks the ring."""

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def reduce(value):
        return rr.all_reduce(value)

    shape = (2, 3) if rank == 0 else (3, 2)
    say("mismatch", **error_of(lambda: reduce(tf.ones(shape))))
    say("mismatch again", **error_of(lambda: rr.all_gather(tf.ones(shape))))


values()
static_shapes()
inputs_are_left_alone()
gradients()
refusals()
tape_trains_like_the_wrapper()
tape_costs_one_collective_a_step()
tape_begins_with_rank_0s_values()
tape_of_what_its_function_makes()
as_horovod_does()
as_horovods_example_does()
tape_structures()
normalization_in_fit()
normalization_of_batches()
normalization_frozen_or_copied()
shapes_that_differ()
