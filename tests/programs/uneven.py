"""Ranks with unequal amounts of data; each case prints one line of JSON.

What must come out is computed beside it, by plain Keras: its step k trains on the batches that the
ranks have in step k, put together.
"""

import functools
import warnings

import keras
import numpy as np
import tensorflow as tf
from shared import built, difference, digest, error_of, keep_graphs, say

import ringreduce.keras as rr

keep_graphs()
comm = rr.init()
# On 3 ranks only, to save time: there all is in graphs, on 2 some of it eager.
RARE = {"adam", "one execution", "eager"}
IS_EAGER = comm.size == 2
LOSS = keras.losses.MeanSquaredError()
# Samples of each batch of each rank; rank r's are BATCHES[r % 3].
BATCHES = [[4, 4, 4, 4, 2], [4, 4, 1], []]


def batches_of(rank, batches=BATCHES):
    generator = np.random.default_rng(rank)
    found = []
    for count in batches[rank % len(batches)]:
        inputs = generator.normal(size=(count, 4)).astype("float32")
        found.append((inputs, inputs[:, :2] ** 2))
    return found


def dataset_of(batches, *, known=True):
    def generate():
        yield from batches

    # Those of Ray Data have names, and no known length.
    names = (None, None) if known else ("inputs", "targets")
    shapes = zip(((None, 4), (None, 2)), names, strict=True)
    spec = tuple(tf.TensorSpec(shape, tf.float32, name) for shape, name in shapes)
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    if known:
        data = data.apply(tf.data.experimental.assert_cardinality(len(batches)))
    return data


class Traced(keras.layers.Layer):
    """Counts how often it is called in training: in a graph, once for each trace."""

    count = 0

    def call(self, inputs, training=False):
        self.count += bool(training)
        return inputs


def make_model(*layers):
    keras.utils.set_random_seed(5)
    middle = layers or (keras.layers.Dense(6, activation="tanh"), Traced())
    return keras.Sequential([keras.Input((4,)), *middle, keras.layers.Dense(2)])


def compiled(model, optimizer, *, is_built=True, **options):
    model.compile(optimizer=optimizer, loss=LOSS, metrics=["mae"], **options)
    return built(model, np.zeros((1, 4)), np.zeros((1, 2))) if is_built else model


@functools.cache
def trained_alone(epochs=1, make=keras.optimizers.SGD, layers=()):
    """By plain Keras, on all ranks' batches; eagerly, since each length would be traced."""
    model = compiled(make_model(*layers), make(0.1), run_eagerly=True)
    everyone = [batches_of(rank) for rank in range(comm.size)]
    for _ in range(epochs):
        for step in range(max(map(len, everyone))):
            parts = [batches[step] for batches in everyone if len(batches) > step]
            inputs, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            model.train_on_batch(inputs, targets)
    return model


def apart(model, alone):
    """From what `alone` trains; on one rank, since all end with the same digest."""
    return difference(model, alone()) if comm.rank == 0 else None


class Steps(keras.callbacks.Callback):
    """Counts training batches by epoch."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def on_epoch_begin(self, epoch, logs=None):
        self.counts.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.counts[-1] += 1
        self.logs = dict(logs)


def fit(model, batches, *, known=True, **options):
    data = dataset_of(batches, known=known)
    return rr.fit(model, data, sharded=True, verbose=0, **options)


def fitted(case, *, known=True, epochs=2, make=keras.optimizers.SGD, **options):
    if comm.size == 2 and case in RARE:
        return
    model = compiled(make_model(), rr.DistributedOptimizer(make(0.1)), **options)
    steps = Steps()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        own = batches_of(comm.rank)
        history = fit(model, own, known=known, epochs=epochs, callbacks=[steps])
    alone = functools.partial(trained_alone, epochs, make)
    say(
        case,
        digest=digest(model.get_weights()),
        difference=apart(model, alone),
        moved=apart(make_model(), alone),
        counts=steps.counts,
        traces=model.layers[1].count,
        iterations=int(model.optimizer.iterations.numpy()),
        loss=[float(loss) for loss in history.history["loss"]],
    )


def metrics_of_own_batches():
    """Empty steps count in no metric and in no moving average."""
    keras.utils.set_random_seed(6)
    norm = keras.layers.BatchNormalization(momentum=0.5)
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model = compiled(make_model(norm), optimizer, run_eagerly=IS_EAGER)
    own = batches_of(2 * comm.rank)  # Rank 1 has none.
    history = fit(model, own)
    norm_alone = keras.layers.BatchNormalization(momentum=0.5)
    alone = compiled(make_model(norm_alone), keras.optimizers.SGD(0.0), run_eagerly=True)
    expected = alone.fit(dataset_of(own), verbose=0, shuffle=False).history if own else None
    say(
        "metrics",
        mae=history.history["mae"],
        expected=comm.broadcast_object(expected and expected["mae"]),
        norm=digest(norm.non_trainable_variables),
        norm_alone=comm.broadcast_object(digest(norm_alone.non_trainable_variables)),
    )


class Parts(keras.Model):
    """No `call`: two parts, the second not built, an optimizer each, and a slow copy of one."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap
        self.first = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
        self.second = keras.layers.Dense(2)
        self.slow = keras.models.clone_model(self.first)
        self.slow.set_weights(self.first.get_weights())
        self.slow.trainable = False

    def compile(self, **options):
        super().compile(**options)
        self.optimizers = [self.wrap(keras.optimizers.Adam(0.01)) for _ in range(2)]
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        inputs, targets, *_ = data
        parts = self.first, self.second
        with tf.GradientTape(persistent=True) as tape:
            loss = LOSS(targets, self.second(keras.ops.tanh(self.first(inputs))))
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            weights = part.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        for slow, weight in zip(self.slow.weights, self.first.weights, strict=True):
            slow.assign(0.5 * slow + 0.5 * weight)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def parts():
    """All its weights are equal everywhere, also where empty steps were made."""

    def made(wrap, **options):
        keras.utils.set_random_seed(5)
        model = Parts(wrap)
        model.compile(**options)
        return model

    model = made(rr.DistributedOptimizer, run_eagerly=IS_EAGER)
    fit(model, batches_of(comm.rank))

    def alone():
        other = made(lambda optimizer: optimizer, run_eagerly=True)
        everyone = [batches_of(rank) for rank in range(comm.size)]
        for step in range(max(map(len, everyone))):
            batches = [batches[step] for batches in everyone if len(batches) > step]
            other.train_on_batch(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))
        return other

    weights = model.get_weights()
    say("parts", digest=digest(weights), count=len(weights), difference=apart(model, alone))


def losses_across_ranks():
    """A loss that compares own samples with all ranks': its gradients count by its own samples."""
    counts = [4, 3, 1][: comm.size]
    rows = np.random.default_rng(3).normal(size=(sum(counts), 4)).astype("float32")
    own = np.split(rows, np.cumsum(counts)[:-1])[comm.rank]
    weights = tf.Variable(np.random.default_rng(4).normal(size=(4, 2)).astype("float32"))

    def distances(some, every):
        return tf.reduce_mean(tf.square(some[:, tf.newaxis] - every[tf.newaxis]))

    def gradient():
        with rr.step_weight(len(own)):
            with rr.DistributedGradientTape() as tape:
                embedded = tf.tanh(own @ weights)
                loss = distances(embedded, rr.all_gather(embedded))
            return tape.gradient(loss, weights)

    with tf.GradientTape() as tape:
        embedded = tf.tanh(rows @ weights)
        loss = distances(embedded, embedded)
    expected = tape.gradient(loss, weights)
    for name, function in (("eager", gradient), ("graph", tf.function(gradient))):
        found = function()
        difference = float(tf.reduce_max(tf.abs(found - expected)))
        say(f"across ranks {name}", digest=digest([found]), difference=difference)


def moments_of_all_batches():
    """Normalization over all ranks leaves out who has no data, and is alike on all ranks."""

    # With weights before the layer, whose gradients pass through it, and those of other ranks.
    def layers(norm):
        return keras.layers.Dense(5), norm, keras.layers.Activation("tanh")

    norm = rr.SyncBatchNormalization(momentum=0.5)
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = compiled(make_model(*layers(norm)), optimizer, run_eagerly=IS_EAGER)
    fit(model, batches_of(comm.rank))

    def alone():
        return trained_alone(layers=layers(keras.layers.BatchNormalization(momentum=0.5)))

    say("synchronized", digest=digest(model.get_weights()), difference=apart(model, alone))


class Noisy(keras.Sequential):
    """Logs something that is no metric, too."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "largest": tf.reduce_max(data[0])}


def infinity_in_an_empty_step():
    """The logarithm of a sample of zeros is infinite; nobody is to see that."""
    keras.utils.set_random_seed(5)
    logarithm = keras.layers.Lambda(lambda x: tf.math.log(tf.abs(x)))
    layers = [keras.layers.Dense(3), rr.SyncBatchNormalization(), keras.layers.Dense(2)]
    model = Noisy([keras.Input((4,)), logarithm, *layers])
    compiled(model, rr.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    own = batches_of(comm.rank)
    steps = Steps()
    fit(model, own, callbacks=[steps, keras.callbacks.TerminateOnNaN()])
    say(
        "empty infinity",
        digest=digest(model.get_weights()),
        finite=bool(all(np.isfinite(w).all() for w in model.get_weights())),
        counts=steps.counts,
        largest=steps.logs.get("largest"),
        expected=float(own[-1][0].max()) if own else 0.0,
    )


def accumulated():
    """Two steps of unequal batches are one step over all their samples."""
    batches = [[4, 2, 3, 1], [2, 2], [1]]
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1), accumulate_steps=2)
    model = compiled(make_model(), optimizer, run_eagerly=IS_EAGER)
    fit(model, batches_of(comm.rank, batches))

    def alone():
        other = compiled(make_model(), keras.optimizers.SGD(0.1), run_eagerly=True)
        everyone = [batches_of(rank, batches) for rank in range(comm.size)]
        for step in (0, 2):
            parts = [part for own in everyone for part in own[step : step + 2]]
            other.train_on_batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        return other

    say("accumulated", digest=digest(model.get_weights()), difference=apart(model, alone))


def own_loop():
    """A loop of one's own over a function, with `joined`."""
    model = make_model()
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = LOSS(targets, model(inputs, training=True))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    step = step if IS_EAGER else tf.function(step, reduce_retracing=True)
    seen = []
    for (inputs, targets), samples in rr.joined(dataset_of(batches_of(comm.rank))):
        step(inputs, targets)
        seen.append(samples)
    weights = digest(model.get_weights())
    say("own loop", digest=weights, difference=apart(model, trained_alone), seen=seen)


def own_weights():
    """`step_weight` with a number, eagerly and inside a function."""
    variable = tf.Variable([0.0])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0))

    def apply(gradient, samples):
        with rr.step_weight(samples):
            optimizer.apply([gradient], [variable])

    gradient = tf.constant([float(comm.rank) if comm.rank else np.nan])
    apply(gradient, comm.rank)
    eagerly = variable.numpy().tolist()
    tf.function(apply)(gradient, tf.constant(comm.rank))
    say("own weight", eager=eagerly, graph=variable.numpy().tolist())
    own = tf.constant([float(comm.rank)])
    step = tf.function(lambda: optimizer.apply([own], [variable]))
    moved = []
    for outer, inner in ((1 + comm.rank, None), (1 + comm.rank, 1), (None, None)):
        variable.assign([0.0])
        if outer is None:
            step()  # As it was traced: weighted, but now by nothing.
        else:
            with rr.step_weight(outer):
                if inner is not None:
                    with rr.step_weight(inner):
                        pass
                step()
        moved.append(float(variable.numpy()[0]))
    say("nested weights", moved=moved)


def refusals():
    model = compiled(make_model(), rr.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    data = dataset_of(batches_of(0))
    say("no dataset", **error_of(lambda: next(rr.joined(np.zeros((3, 4))))))
    scalars = tf.data.Dataset.range(3)
    say("not batched", **error_of(lambda: rr.fit(model, scalars, sharded=True)))
    say("sharded arrays", **error_of(lambda: rr.fit(model, np.zeros((3, 4)), sharded=True)))
    limited = {"steps_per_epoch": 3, "batch_size": 4}
    say("sharded steps", **error_of(lambda: rr.fit(model, data, sharded=True, **limited)))


fitted("known", run_eagerly=IS_EAGER)
fitted("unknown", known=False, is_built=False)
fitted("adam", make=keras.optimizers.Adam, is_built=False)
fitted("several steps", known=False, steps_per_execution=2)
fitted("one execution", known=False, steps_per_execution=8)
fitted("eager", run_eagerly=True)
metrics_of_own_batches()
moments_of_all_batches()
infinity_in_an_empty_step()
accumulated()
own_loop()
own_weights()
losses_across_ranks()
parts()
refusals()
