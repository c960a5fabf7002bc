"""Sparse gradients on a real ring, by every way through the bridge; each case prints JSON.

Values are whole multiples of the number of ranks, so means are exact. Every rank knows what all
have, and compares its results with what plain numpy makes of that.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from shared import built, digest, say

import ringreduce.keras as rr
from ringreduce import RingReduceError
from ringreduce.tensorflow import GradientBridge, bridge, ops, xla

comm = rr.init()
SIZE = comm.size


class NoOps:
    are_available = staticmethod(lambda: False)


WAYS = {"eager": ops, "python": NoOps}
if ops.are_available():
    WAYS["native"] = ops
# On two ranks, in `make test`, what takes no branch of its own in a graph is eager.
IS_USUAL = SIZE == 2


class Sparse:
    """A sparse gradient of a step: of each rank the indices, for each dtype of them."""

    def __init__(self, indices, shape, dtype=tf.float32, index_dtype=tf.int64, seed=0):
        self.indices, self.shape, self.dtype, self.index_dtype = indices, shape, dtype, index_dtype
        rng = np.random.default_rng(seed)
        self.values = [
            rng.integers(-3, 4, (len(own), *shape[1:])).astype("float64") * SIZE for own in indices
        ]

    def parts(self):
        values = tf.constant(self.values[comm.rank].astype(self.dtype.as_numpy_dtype))
        return values, tf.constant(self.indices[comm.rank], self.index_dtype)

    def specs(self):
        return tf.TensorSpec([None, *self.shape[1:]], self.dtype), tf.TensorSpec(
            [None], self.index_dtype
        )

    def made_of(self, values, indices):
        return tf.IndexedSlices(values, indices, tf.constant(self.shape, tf.int64))

    def is_right(self, mean):
        expected = np.zeros(self.shape)
        for indices, values in zip(self.indices, self.values, strict=True):
            np.add.at(expected, indices, values)
        expected = (expected / SIZE).astype(self.dtype.as_numpy_dtype)
        indices = mean.indices.numpy()
        whole = np.zeros_like(expected)
        whole[indices] = mean.values.numpy()
        return bool(
            isinstance(mean, tf.IndexedSlices)
            and (mean.dtype, mean.indices.dtype) == (self.dtype, self.index_dtype)
            and tuple(mean.dense_shape.numpy()) == self.shape
            and (np.diff(indices) > 0).all()
            and (whole == expected).all()
        )

    def contents(self, mean):
        return [mean.indices.numpy(), mean.values.numpy()]

    def rows(self, mean):
        return len(mean.indices)


class Dense:
    """A dense one: rank r has everywhere (r + 1) times the number of ranks."""

    def __init__(self, shape, dtype=tf.float32):
        self.shape, self.dtype = shape, dtype

    def parts(self):
        return (tf.cast(tf.fill(self.shape, (comm.rank + 1) * SIZE), self.dtype),)

    def specs(self):
        return (tf.TensorSpec(self.shape, self.dtype),)

    def made_of(self, value):
        return value

    def is_right(self, mean):
        return bool(tf.reduce_all(mean == tf.cast(SIZE * (SIZE + 1) // 2, self.dtype)))

    def contents(self, mean):
        return [mean.numpy()]

    def rows(self, mean):
        return None


class Nothing:
    """A variable without a gradient."""

    def parts(self):
        return ()

    specs = parts

    def made_of(self):
        return None

    def is_right(self, mean):
        return mean is None

    def contents(self, mean):
        return []

    rows = Dense.rows


def run(case, *steps, is_traced=False):
    """Reduce each of `steps`, lists of gradients of the same kinds, by every way."""
    for way, used in WAYS.items():
        if IS_USUAL and not is_traced and way != "eager":
            continue
        bridge.ops = used
        made = GradientBridge(1 << 20)
        paths = [f"variable {number}" for number in range(len(steps[0]))]

        def step(*parts, made=made, paths=paths):
            remaining = list(parts)
            gradients = []
            for kind in steps[0]:
                count = len(kind.specs())
                gradients.append(kind.made_of(*remaining[:count]))
                del remaining[:count]
            means = made.mean(comm, gradients, paths)
            for kind, mean in zip(steps[0], means, strict=True):
                if isinstance(kind, Sparse):
                    assert mean.values.shape[1:] == kind.shape[1:]
            return means

        if way != "eager":
            specs = [spec for kind in steps[0] for spec in kind.specs()]
            step = tf.function(step, input_signature=specs)
            graph = step.get_concrete_function().graph
            waits = any(op.type == "RingreduceWait" for op in graph.get_operations())
            has_dense = any(isinstance(kind, Dense) for kind in steps[0])
            assert waits is (way == "native" and has_dense and SIZE > 1)
        right, rows, contents = [], [], []
        for kinds in steps:
            means = step(*(part for kind in kinds for part in kind.parts()))
            pairs = list(zip(kinds, means, strict=True))
            right.append(all(kind.is_right(mean) for kind, mean in pairs))
            rows.append([kind.rows(mean) for kind, mean in pairs])
            contents += [part for kind, mean in pairs for part in kind.contents(mean)]
        say(case, way=way, right=right, rows=rows, digest=digest(contents))


EVERYWHERE = [[0, 1, 2, 3, 4]] * SIZE


def duplicates(number):
    """Within a rank, and between ranks; in no order."""
    return [[9, rank, 4, rank, 9, rank + number, 9] for rank in range(SIZE)]


def all_cases():
    run("duplicates", [Sparse(duplicates(0), (40, 3))], is_traced=True)
    run("whole table", [Sparse(EVERYWHERE, (5, 3))])
    run("whole table with duplicates", [Sparse([[4, 2, 0, 4, 1, 3]] * SIZE, (5, 2))])
    last_only = [[] for _ in range(SIZE - 1)] + [[3, 1, 3]]
    run("rows of one rank only", [Sparse(last_only, (40, 3))])
    run("no rows", [Sparse([[]] * SIZE, (40, 3))])
    run("no rows of one of two", [Sparse([[]] * SIZE, (9, 3)), Sparse(duplicates(1), (40, 3))])
    run(
        "two sparse",
        [Sparse(duplicates(0), (50, 2, 2)), Sparse(EVERYWHERE, (5,), index_dtype=tf.int32, seed=1)],
    )
    run(
        "sparse and dense",
        [
            Dense((3, 4)),
            Sparse(duplicates(2), (60, 3)),
            Nothing(),
            Dense((1000,), tf.float64),
            Sparse(EVERYWHERE, (5, 1), tf.float64, seed=2),
            Dense(()),
        ],
        is_traced=True,
    )
    for dtype, index_dtype in (
        (tf.float16, tf.int64),
        (tf.bfloat16, tf.int32),
        (tf.float32, tf.int32),
        (tf.float64, tf.int64),
    ):
        gathered = Sparse(duplicates(1), (90, 3), dtype, index_dtype, seed=3)
        table = Sparse(EVERYWHERE, (5, 3), dtype, index_dtype, seed=4)
        kinds = [gathered, table, Dense((7,), dtype)]
        run(f"{dtype.name} {index_dtype.name}", kinds, is_traced=dtype == tf.bfloat16)
    run("width of zero", [Sparse(EVERYWHERE, (5, 0)), Sparse(duplicates(0), (40, 1))])
    run(
        "other rows in each step",
        *(
            [Sparse([[(rank * 3 + i * n) % 20 for i in range(n * 4)] for rank in range(SIZE)],
                    (20, 4), seed=n), Dense((5,))]
            for n in (0, 1, 2, 5, 1, 0)
        ),
        is_traced=True,
    )  # fmt: skip


def accumulates_in_float32():
    """2048 + 1 is 2048 in float16, but 2048 + 1 + 1 is not when added in float32."""
    gradient = tf.IndexedSlices(
        tf.constant([[2048.0], [1.0], [1.0]], tf.float16),
        tf.constant([2, 2, 2]),
        tf.constant([90, 1]),
    )
    [mean] = GradientBridge(1 << 20).mean(comm, [gradient], ["v"])
    say("accumulation", sum=float(tf.reduce_sum(tf.cast(mean.values, tf.float32))))


def retraces_at_different_steps():
    """A batch of another length makes a rank trace again when the others do not."""
    made = GradientBridge(1 << 20)

    @tf.function
    def step(indices):
        values = tf.ones((len(indices), 2)) * SIZE
        gradient = tf.IndexedSlices(values, indices, tf.constant([100, 2]))
        means = made.mean(comm, [tf.ones(3), gradient], ["dense", "sparse"])
        return tf.convert_to_tensor(means[1])

    results = []
    for number in range(5):
        rows = 2 + (number // 2 if comm.rank else number % 3)
        results.append(step(tf.fill([rows], number)).numpy())
    counts = [[2 + (n // 2 if rank else n % 3) for rank in range(SIZE)] for n in range(5)]
    right = all((r[n] == sum(counts[n])).all() for n, r in enumerate(results))
    traces = step.experimental_get_tracing_count()
    say("retracing", right=right, traces=traces, digest=digest(results))


def in_a_loop_of_one_function():
    """Steps within a while loop of the graph, as with ``steps_per_execution``."""
    made = GradientBridge(1 << 20)

    @tf.function
    def steps():
        table = tf.zeros((50, 2))
        for number in tf.range(4):
            indices = tf.stack([number, number, number + 10 + comm.rank])
            gradient = tf.IndexedSlices(tf.ones((3, 2)) * SIZE, indices, tf.constant([50, 2]))
            means = made.mean(comm, [tf.ones(3), gradient], ["dense", "sparse"])
            table += tf.convert_to_tensor(means[1])
            table.set_shape((50, 2))
        return table

    expected = np.zeros((50, 2))
    for number in range(4):
        expected[number] += 2 * SIZE
        for rank in range(SIZE):
            expected[number + 10 + rank] += 1
    result = steps().numpy()
    say("loop", right=bool((result == expected).all()), digest=digest([result]))


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.01),
    "decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=64.0
    ),
}
USUAL_OPTIMIZERS = ("adam", "global_clipnorm", "loss scale")


def in_fit(name, how, **options):
    """Weights after training a model whose embedding is used twice."""
    keras.utils.set_random_seed(7)
    embed = keras.layers.Embedding(200, 4)
    one, other = keras.Input((3,), dtype="int32"), keras.Input((2,), dtype="int32")
    joined = keras.layers.Concatenate(axis=1)([embed(one), embed(other)])
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(joined))
    model = keras.Model([one, other], outputs)
    optimizer = rr.DistributedOptimizer(OPTIMIZERS[name](), sparse_as_dense=how == "dense")
    model.compile(optimizer=optimizer, loss="mse", **options)
    if name != "adam":
        built(model)
    rng = np.random.default_rng(comm.rank)
    words = [rng.integers(0, 200, (12, count)).astype("int32") for count in (3, 2)]
    labels = rng.normal(size=(12, 1)).astype("float32")
    begun = comm.statistics().bytes_sent
    model.fit(words, labels, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights(), comm.statistics().bytes_sent - begun


def like_dense_in_keras():
    names = USUAL_OPTIMIZERS if IS_USUAL else OPTIMIZERS
    ways = [(name, name, {"run_eagerly": IS_USUAL and name != "adam"}) for name in names]
    if not IS_USUAL:
        ways.append(("eager", "adam", {"run_eagerly": True}))
    for case, name, options in ways:
        sparse, sent = in_fit(name, "sparse", **options)
        dense, sent_dense = in_fit(name, "dense", **options)
        apart = max(float(np.abs(a - b).max()) for a, b in zip(sparse, dense, strict=True))
        say(f"keras {case}", apart=apart, digest=digest(sparse), sent=[sent, sent_dense])


ROWS, INDICES = np.arange(12.0, dtype="float32").reshape(6, 2), np.array([1, 4, 1, 3, 4, 4])


def optimizer_of(name):
    return getattr(keras.optimizers, name)(learning_rate=0.1, name="repeated")


def of_whole_table(name):
    """What plain Keras makes of the sum of all rows, as a dense gradient."""
    optimizer = optimizer_of(name)
    table = keras.Variable(np.arange(1.0, 13.0).reshape(6, 2))
    for _ in range(2):
        gradient = tf.math.unsorted_segment_sum(ROWS, INDICES, 6)
        optimizer.apply([gradient], [table])
    return table.numpy().tolist()


def of_repeated_rows(name, wrap, **options):
    """Two updates by rows of which some are the same, on one rank or several: 6 in all."""
    optimizer = rr.DistributedOptimizer(optimizer_of(name), **options)
    table = keras.Variable(np.arange(1.0, 13.0).reshape(6, 2))
    optimizer.build([table])
    own = slice(comm.rank * 6 // SIZE, (comm.rank + 1) * 6 // SIZE)
    indices, rows = INDICES[own], ROWS[own] * SIZE

    @wrap
    def step():
        gradient = tf.IndexedSlices(tf.constant(rows), tf.constant(indices), tf.constant([6, 2]))
        optimizer.apply([gradient], [table])

    for _ in range(2 * options.get("accumulate_steps", 1)):
        step()
    return table.numpy().tolist()


def repeated_rows():
    wraps = {"eager": lambda step: step, "graph": tf.function}
    if xla.why_not() is None:
        wraps["jit"] = functools.partial(tf.function, jit_compile=True)
    for name in ("SGD", "Adagrad", "Ftrl", "Lion"):
        tables = [of_repeated_rows(name, wraps["eager" if IS_USUAL else "graph"])]
        say(f"repeated {name}", tables=tables, whole=of_whole_table(name))
    options = ({}, {"sparse_as_dense": True}, {"accumulate_steps": 2})
    usual = {"graph": options[:1], "jit": options[2:]} if IS_USUAL else {}
    tables = [
        of_repeated_rows("Adam", wrap, **given)
        for way, wrap in wraps.items()
        for given in usual.get(way, options)
    ]
    say("repeated Adam", tables=tables, whole=of_whole_table("Adam"))


def sparse_on_one_rank_only():
    """Must come last: it breaks the ring."""
    made = GradientBridge(1 << 20)

    @tf.function
    def step():
        gradient = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([9, 2]))
        if comm.rank == 0:
            gradient = tf.convert_to_tensor(gradient)
        return made.mean(comm, [tf.ones(3), gradient], ["kernel", "table"])[0]

    try:
        step()
    except (RingReduceError, tf.errors.OpError) as error:
        say("mismatch", error=type(error).__name__, text=str(error))
    else:
        say("mismatch", error="", text="")


say("ways", ways=list(WAYS))
all_cases()
accumulates_in_float32()
for way, used in WAYS.items():
    if way != "eager":
        bridge.ops = used
        retraces_at_different_steps()
        in_a_loop_of_one_function()
bridge.ops = ops
repeated_rows()
if SIZE > 1:
    like_dense_in_keras()
    sparse_on_one_rank_only()
