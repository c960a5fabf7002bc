"""The trial of a training step: what it finds, what it leaves behind, and what it does not try."""

import signal
import warnings
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import ringreduce.keras as rr
from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.model import trial_in_fit
from ringreduce.keras.model.building import build
from ringreduce.keras.model.trial import Verdict, try_step
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary import words
from ringreduce.vocabulary.config import Config

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

ROWS = 20
GENERATOR = np.random.default_rng(3)
X = GENERATOR.normal(size=(ROWS, 5)).astype("float32")
Y = X.sum(1, keepdims=True)
CLASSES = np.arange(ROWS) % 3
WORDS = GENERATOR.integers(1, 9, (ROWS, 6)) * (np.arange(6) < 3 + np.arange(ROWS)[:, None] % 4)


def net(*inner, out=1):
    return [keras.Input((5,)), layers.Dense(4, "tanh"), *inner, layers.Dense(out)]


class Own(keras.Sequential):
    """A model whose step is its own, with state in Python."""

    def train_step(self, data):
        x, y = data
        self.steps = getattr(self, "steps", 0) + 1
        self.seen.append(x)
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"value": loss}

    def loss_of(self, x, y):
        return tf.reduce_mean((y - self(x, training=True)) ** 2)


class Alone(Own):
    """Divides by a number that is none of its rows."""

    def loss_of(self, x, y):
        return tf.reduce_sum((y - self(x, training=True)) ** 2) / ROWS


class Each(Own):
    """Returns a number for each row."""

    def loss_of(self, x, y):
        return keras.losses.mean_squared_error(y, self(x, training=True))


class Traced(Alone):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class Compared(Own):
    """Compares its rows with each other."""

    def loss_of(self, x, y):
        each = ops.normalize(self(x))
        scores = tf.matmul(each, each, transpose_b=True)
        own = tf.range(tf.shape(x)[0])
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(own, scores, True))


class Gathered(Own):
    def loss_of(self, x, y):
        return tf.reduce_mean(rr.all_gather(self(x), communicator=self.ring))


class Grouped(Own):
    def loss_of(self, x, y):
        return tf.reduce_mean(rr.all_reduce(self(x), communicator=self.group))


class Shuffled(Own):
    def loss_of(self, x, y):
        return tf.reduce_mean((tf.random.shuffle(y) - self(x)) ** 2)


class OfPython(Own):
    def loss_of(self, x, y):
        return super().loss_of(x, y) * np.random.default_rng().uniform()


class Needy(Own):
    def loss_of(self, x, y):
        return super().loss_of(x, tf.ensure_shape(y, (ROWS, 1)))


class Nothing(Own):
    def train_step(self, data):
        return None


class Centred(keras.Sequential):
    """It mixes rows in training alone."""

    def call(self, x, training=False, mask=None):
        y = super().call(x)
        return y - ops.mean(y) if training else y


class Mixing(keras.Model):
    """Its output for a row is of the rows beside it, as in a recommender of keras.io."""

    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(9, 4)

    def call(self, inputs):
        first, second = self.words(inputs[:, 0]), self.words(inputs[:, 1])
        return ops.tensordot(first, second, 2) + ops.sum(first, 1, keepdims=True)


class Switched(Own):
    """Among six rows rounding has switched a unit on, as in a deep network; nowhere else."""

    def loss_of(self, x, y):
        is_on = tf.cast(tf.shape(x)[0] == 6, tf.float32)
        return super().loss_of(x, y) + 0.01 * is_on * tf.reduce_sum(self.trainable_variables[0])


def two_outputs():
    """The second one has no loss."""
    x = keras.Input((5,))
    hidden = layers.Dense(4, "tanh")(x)
    return keras.Model(x, {"one": layers.Dense(1)(hidden), "two": layers.Softmax()(hidden)})


@tf.custom_gradient
def passed_forward(x):
    def backward(gradient):
        raise AssertionError("nothing asks for the gradients by weights")

    return x, backward


class Running(layers.Layer):
    """Keeps a mean of its rows, beside what no row changes: a count, and a copy of weights."""

    def build(self, shape):
        options = {"trainable": False, "initializer": "zeros"}
        self.kernel = self.add_weight(name="kernel", shape=shape[-1:])
        self.center = self.add_weight(name="center", shape=shape[-1:], **options)
        self.count = self.add_weight(name="count", shape=(), **options)
        self.follower = self.add_weight(name="follower", shape=shape[-1:], **options)
        self.plain = tf.Variable(tf.zeros(()), name="plain")

    def call(self, values):
        mean = ops.mean(values, 0)
        self.center.assign(0.9 * self.center + 0.1 * mean)
        self.plain.assign(tf.reduce_sum(tf.abs(values)))
        self.count.assign_add(1.0)
        self.follower.assign(0.9 * self.follower + self.kernel)
        return values * self.kernel


def masked(y, outputs):
    counts = ops.cast(y > 0, "float32")
    return ops.sum(counts * ops.square(y - outputs)) / ops.sum(counts)


def share_of(y, outputs):
    return ops.sum(y * outputs) / ops.sum(y)


class Adding(layers.Layer):
    def call(self, x):
        self.add_loss(ops.sum(ops.square(x)))
        return x


def is_divided():
    """Whether this Keras divides what an activity regularizer gives by the rows."""
    layer = layers.Dense(1, kernel_initializer="ones", activity_regularizer=ops.sum)
    losses = [layer(np.ones((rows, 1), "float32")) is not None and layer.losses for rows in (1, 2)]
    return float(losses[0][0]) == float(losses[1][0])


OF_SUM, OF_MEAN = ("mean", "neither") if is_divided() else ("neither", "mean")
ADDED = "what layers add to the loss"
OF_BITS = (np.arange(ROWS)[:, None] % 4 == 1).astype("float32")
SPARSE = keras.losses.SparseCategoricalCrossentropy
# A model, its compile arguments, x, y; the fit, and what is named or why it is not tried.
CASES = {
    "dropout": (lambda: keras.Sequential(net(layers.Dropout(0.5))), "mse", X, Y, "mean", ""),
    "noise": (lambda: keras.Sequential(net(layers.GaussianNoise(1.0))), "mse", X, Y, "mean", ""),
    "normalized": (
        lambda: keras.Sequential(net(layers.BatchNormalization())),
        *("mse", X, Y, "mean", ""),
    ),
    "regularized": (
        lambda: keras.Sequential(net(layers.Dense(3, kernel_regularizer="l2"))),
        *("mse", X, Y, "mean", ""),
    ),
    "of probabilities": (
        lambda: keras.Sequential(
            net(layers.Activation(passed_forward), layers.Dense(3, "softmax"))[:-1]
        ),
        *("sparse_categorical_crossentropy", X, CLASSES, "mean", ""),
    ),
    "two outputs": (two_outputs, {"one": "mse", "two": None}, X, {"one": Y}, "mean", ""),
    "mixed by an activation": (
        lambda: keras.Sequential(net(layers.Activation(lambda x: x - ops.mean(x, 0)))),
        *("mse", X, Y, "neither", "the model's output for a row"),
    ),
    "of activity": (
        lambda: keras.Sequential(net(layers.Dense(3, activity_regularizer="l2"))),
        *("mse", X, Y, OF_SUM, ADDED if OF_SUM == "neither" else ""),
    ),
    "of mean activity": (
        # Keras 3.15 divides it by the rows once more.
        lambda: keras.Sequential(net(layers.Dense(3, activity_regularizer=ops.mean))),
        *("mse", X, Y, OF_MEAN, ADDED if OF_MEAN == "neither" else ""),
    ),
    "switched": (lambda: Switched(net()), None, X, Y, "mean", ""),
    "dice": (
        lambda: keras.Sequential([*net(), layers.Activation("sigmoid")]),
        *(keras.losses.Dice(), X, OF_BITS, "neither", "the loss dice"),
    ),
    "ignored": (
        lambda: keras.Sequential(net(out=3)),
        *(SPARSE(True, ignore_class=2), X, CLASSES, "neither", "the loss sparse_categorical"),
    ),
    "summed": (
        lambda: keras.Sequential(net()),
        *(keras.losses.MeanSquaredError("sum"), X, Y, "sum", ""),
    ),
    "of none": (
        lambda: keras.Sequential(net()),
        *(masked, X, np.sort(OF_BITS, 0), "not finite", "the loss masked"),
    ),
    "recurrent": (
        lambda: keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(9, 3, mask_zero=True),
                layers.LSTM(3, dropout=0.5),
                layers.Dense(1),
            ]
        ),
        *("mse", WORDS, Y, "mean", ""),
    ),
    "adding": (
        lambda: keras.Sequential(net(Adding())),
        *("mse", X, Y, "neither", "what layers add to the loss"),
    ),
    "centred": (lambda: Centred(net()), "mse", X, Y, "neither", "the model's output for a row"),
    "mixing": (Mixing, "mse", WORDS, Y, "neither", "the model's output for a row"),
    "own": (lambda: Own(net()), None, X, Y, "mean", ""),
    "own sum": (lambda: Alone(net()), None, X, Y, "sum", ""),
    "own of each row": (lambda: Each(net()), None, X, Y, "sum", ""),
    "in a function": (lambda: Traced(net()), None, X, Y, "sum", ""),
    "compared": (lambda: Compared(net(out=3)), None, X, Y, "neither", "the gradients of compared/"),
    "gathered": (lambda: Gathered(net()), None, X, Y, "nothing", "it makes a collective call"),
    "in a group": (lambda: Grouped(net()), None, X, Y, "nothing", "it makes a collective call"),
    "shuffled": (lambda: Shuffled(net()), None, X, Y, "nothing", "draws what belongs to no row"),
    "of Python": (lambda: OfPython(net()), None, X, Y, "nothing", "random by other means"),
    "all rows": (lambda: Needy(net()), None, X, Y, "nothing", "it raises"),
    "no gradients": (lambda: Nothing(net()), None, X, Y, "nothing", "gets gradients of it"),
    "few rows": (lambda: Own(net()), None, X[:5], Y[:5], "nothing", "5 rows are too few"),
}


def made(case, ring, policy="float32", **options):
    make, loss, x, y, *_ = CASES[case]
    keras.config.set_dtype_policy(policy)
    try:
        model = make()
    finally:
        keras.config.set_dtype_policy("float32")
    if isinstance(model, Own):
        model.seen = []
    model.compile(rr.DistributedOptimizer(keras.optimizers.Adam(0.1), ring), loss, **options)
    build(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(4).element_spec)
    return model


@pytest.mark.parametrize("case", CASES)
def test_what_a_step_is(case):
    *_, x, y, fit, said = CASES[case]

    def work(ring):
        model = made(case, ring)
        if "group" in case or case == "gathered":
            model.ring, model.group = ring, ring.split(0)
        # Rank 1 makes no call: one of rank 0 would wait for it.
        return try_step(model, (x, y), ring) if ring.rank == 0 else None

    verdict, _ = ring_of_threads(2, work)
    assert (verdict.fit, said in (verdict.where or verdict.why)) == (fit, True), verdict


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_sixteen_bits_are_no_difference(policy):
    def work(ring):
        return try_step(made("dropout", ring, policy), (X, Y), ring)

    assert ring_of_threads(1, work)[0].fit == "mean"


def test_nothing_is_left_of_a_trial():
    def work(ring):
        model = made("own", ring)
        model.seen.append("before")
        dropout = layers.Dropout(0.5, seed=4)
        model.loss_of = lambda x, y: tf.reduce_mean((y - dropout(model(x), training=True)) ** 2)
        model.dropout = dropout
        np.random.seed(5)
        numbers = [np.array(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]
        assert try_step(model, (X, Y), ring).fit == "mean"
        after = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
        assert all(map(np.array_equal, numbers, after))
        assert model.seen == ["before"]
        assert not hasattr(model, "steps")
        return np.random.randint(1 << 30)

    [drawn] = ring_of_threads(1, work)
    np.random.seed(5)
    assert drawn == np.random.randint(1 << 30)


def fitted(size, case, *, data=None, **options):
    *_, x, y, _, _ = CASES[case]

    def work(ring):
        model = made(case, ring, run_eagerly=True)
        given = (x, y) if data is None else (data(ring),)
        how = {"verbose": 0, "shuffle": False, "communicator": ring, **options}
        return rr.fit(model, *given, **how).history

    return ring_of_threads(size, work)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "data",
    [None, lambda ring: tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)],
    ids=["arrays", "dataset"],
)
def test_fit_warns_of_a_sum_unless_it_is_told_not_to_look(data):
    how = {} if data is not None else {"batch_size": ROWS}
    for check in (True, "step"):
        with pytest.raises(rr.ParityWarning, match='gradients="sum"'):
            fitted(2, "own sum", data=data, check=check, **how)
    for check in ("data", False):
        fitted(2, "own sum", data=data, check=check, **how)
    fitted(1, "own sum", data=data, **how)


@pytest.mark.filterwarnings("ignore:nothing has divided")
def test_kerass_own_fit_with_together_tries_the_step_on_arrays():
    *_, x, y, _, _ = CASES["own sum"]

    def work(ring, check=True):
        model = made("own sum", ring, run_eagerly=True)
        together = rr.callbacks.Together([], ring, check=check)
        model.fit(x, y, batch_size=10, verbose=0, callbacks=[together])

    with pytest.warns(rr.ParityWarning, match='gradients="sum"'):
        ring_of_threads(2, work)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rr.ParityWarning)
        ring_of_threads(2, partial(work, check=False))


def test_what_layers_add_has_a_remedy_of_its_own():
    with pytest.warns(rr.ParityWarning, match=r"add_loss\) is no mean .* or what no row changes\)"):
        fitted(2, "adding", batch_size=ROWS)


class Both(keras.Sequential):
    """Two optimizers: the first gets sums over rows, the second means."""

    own_sums = True

    def compile(self, first, second):
        super().compile(run_eagerly=True)
        self.first, self.second = first, second

    def train_step(self, data):
        x, y = data
        head, tail = self.layers[0].trainable_variables, self.layers[1].trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            squares = (y - self(x)) ** 2
            mean = tf.reduce_mean(squares)
            loss = tf.reduce_sum(squares) / ROWS if self.own_sums else mean
        self.first.apply_gradients(zip(tape.gradient(loss, head), head, strict=True))
        self.second.apply_gradients(zip(tape.gradient(mean, tail), tail, strict=True))
        return {"value": mean}


def made_of_both(ring, *gradients):
    model = Both(net())
    # Ranks are threads here, which share a seed.
    model.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) for w in model.get_weights()])
    both = [keras.optimizers.SGD(0.1) for _ in range(2)]
    pairs = zip(both, gradients, strict=True)
    model.compile(*(rr.DistributedOptimizer(sgd, ring, gradients=g) for sgd, g in pairs))
    return model


def trained(size, *gradients, count=ROWS, change=None):
    """Rank 0's weights, and its optimizers' options in the end."""

    def work(ring):
        model = made_of_both(ring, *gradients)
        if change is not None:
            change(model, ring)
        how = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "communicator": ring}
        rr.fit(model, X[:count], Y[:count], **how)
        weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
        return weights, [w.options["gradients"] for w in (model.first, model.second)]

    return ring_of_threads(size, work)[0]


@pytest.mark.filterwarnings("error")
def test_each_of_two_optimizers_has_a_verdict_of_its_own():
    alone, _ = trained(1, "tried", "tried")
    with pytest.raises(rr.ParityWarning, match="the gradients that first gets of its train_step"):
        trained(2, "tried", "tried")
    with pytest.raises(rr.ParityWarning, match=r"and the gradients that second gets of its .* are"):
        trained(2, "sum", "sum")
    weights, _ = trained(2, "sum", "tried")
    assert np.abs(weights - alone).max() < 1e-6


@pytest.fixture
def unchanged_program(monkeypatch):
    """As with --unchanged, in a program that knows of no ranks."""
    monkeypatch.setattr(words, "_is_unchanged", True)
    monkeypatch.setattr(trial_in_fit, "names_of_ranks", str)


ADDED = "[0/2] the gradients that first gets of its train_step are sums over rows: the ranks' are"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [ROWS, 7])
def test_in_an_unchanged_program_sums_are_added_up(unchanged_program, caplog, count):
    alone, _ = trained(1, "tried", "tried", count=count)
    assert caplog.text == ""
    weights, options = trained(2, "tried", "tried", count=count)
    assert np.abs(weights - alone).max() < 1e-6
    assert options == ["sum", "tried"]
    assert caplog.text.count(ADDED) == caplog.text.count("added up") == 1


@pytest.mark.filterwarnings("error")
def test_in_a_fit_that_is_not_keras_s_too(unchanged_program, caplog):
    def change(model, _):
        model.make_train_function = lambda force=False: keras.Model.make_train_function(model)

    alone, _ = trained(1, "tried", "tried", change=change)
    weights, options = trained(2, "tried", "tried", change=change)
    assert np.abs(weights - alone).max() < 1e-6
    assert options == ["sum", "tried"]


def test_after_a_step_nothing_is_added_up_in_a_fit_that_is_not_keras_s(unchanged_program, caplog):
    def change(model, ring):
        model.make_train_function = lambda force=False: keras.Model.make_train_function(model)
        rr.fit(model, X[:5], Y[:5], batch_size=5, verbose=0, communicator=ring)

    with pytest.warns(rr.ParityWarning, match="on a dataset or in a fit before; let its"):
        assert trained(2, "tried", "tried", change=change)[1] == ["tried", "tried"]
    assert "added up" not in caplog.text


@pytest.mark.filterwarnings("error")
def test_a_step_that_has_become_a_mean_is_one_again(unchanged_program):
    def change(model, ring):
        model.run_eagerly = False
        rr.fit(model, X, Y, batch_size=ROWS, verbose=0, communicator=ring)
        assert ring.size == 1 or model.first.options["gradients"] == "sum"
        model.own_sums = False
        model.train_function = None

    alone, _ = trained(1, "tried", "tried", change=change)
    weights, options = trained(2, "tried", "tried", change=change)
    assert options == ["tried", "tried"]
    assert np.abs(weights - alone).max() < 1e-6


def test_an_unchanged_program_is_told_that_its_own_step_was_not_tried(unchanged_program, caplog):
    for count in (ROWS, 5):
        trained(2, "mean", "mean", count=count)
    assert caplog.text.count("[0/2] the step was not tried: 5 rows are too few. If its") == 1
    assert caplog.text.count("was not tried") == 1


def test_a_program_that_knows_ranks_may_have_counted_them(unchanged_program, monkeypatch, caplog):
    monkeypatch.setattr(trial_in_fit, "names_of_ranks", lambda: "train.py:3 names WORLD_SIZE")
    text = "not added up, since train.py:3 names WORLD_SIZE, so that it may count them already; let"
    with pytest.warns(rr.ParityWarning, match=text) as shown:
        assert trained(2, "tried", "tried")[1] == ["tried", "tried"]
    assert not [warning for warning in shown if "rr." in str(warning.message)]
    assert "added up" not in caplog.text


def test_ranks_with_data_of_their_own_tell_each_other():
    def own(ring):
        bits = OF_BITS if ring.rank else np.ones_like(OF_BITS)
        return tf.data.Dataset.from_tensor_slices((X, bits)).batch(10)

    with pytest.warns(rr.ParityWarning, match="the loss masked is not finite"):
        fitted(2, "of none", data=own, per_rank_data=True)


class Odd(Exception):
    def __str__(self):
        raise ValueError("it has no text")


def raising(error):
    def loss_of(self, x, y):
        if len(x) < 8:
            raise error
        return tf.reduce_mean((y - self(x)) ** 2)

    return type("Raising", (Own,), {"loss_of": loss_of})


class Filtering(Own):
    """Has rows left among many, and none among few."""

    def loss_of(self, x, y):
        among = tf.range(tf.shape(x)[0]) >= 7
        return tf.reduce_mean((tf.boolean_mask(y - self(x), among)) ** 2)


class Constant(Own):
    def loss_of(self, x, y):
        return tf.reduce_mean((y - tf.reshape(self(x), (10, 1))) ** 2)


FAILING = {
    "raises": (raising(ValueError("few\nrows")), "on few rows it raises ValueError: few rows"),
    "exits": (raising(SystemExit(3)), "on few rows it raises SystemExit: 3"),
    "is odd": (raising(Odd()), "on few rows it raises Odd"),
    "needs its batch": (Constant, "on few rows it raises InvalidArgumentError"),
    "filters": (Filtering, ""),
}


@pytest.mark.filterwarnings("ignore:2 ranks will not train exactly")
@pytest.mark.parametrize("case", FAILING)
def test_training_goes_on_where_a_trial_fails(case, caplog):
    make, why = FAILING[case]

    def work(ring):
        model = make(net())
        model.seen = []
        model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.1), ring), run_eagerly=True)
        how = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "communicator": ring}
        rr.fit(model, X, Y, check="step", **how)
        return [len(rows) for rows in model.seen]

    caplog.set_level("INFO")
    assert ring_of_threads(2, work) == [[ROWS // 2]] * 2
    lines = [each.getMessage() for each in caplog.records if "not tried" in each.getMessage()]
    assert len(lines) == (2 if why else 0)
    assert all(f"the step was not tried: {why}" in line and "\n" not in line for line in lines)


def test_what_a_signal_raises_in_a_trial_is_obeyed():
    def leave(*_):
        raise SystemExit(7)

    def loss_of(x, y):
        signal.raise_signal(signal.SIGUSR2)
        return tf.reduce_mean(x)

    def work(ring):
        model = made("own", ring)
        model.loss_of = loss_of
        return try_step(model, (X, Y), ring)

    before = signal.signal(signal.SIGUSR2, leave)
    try:
        with pytest.raises(SystemExit, match="7"), Communicator(Config(rank=0, size=1)) as ring:
            work(ring)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_rank_without_data_is_told():
    def own(ring):
        rows = ROWS if ring.rank else 0
        return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(10)

    with pytest.warns(rr.ParityWarning, match='gradients="sum"'):
        fitted(2, "own sum", data=own, per_rank_data=True, check="step")


def test_what_rows_set_is_named_and_what_follows_from_weights_is_not():
    def work(ring):
        inner = [Running(name="running"), layers.BatchNormalization()]
        inner.append(layers.SpectralNormalization(layers.Dense(3)))
        verdicts = []
        for part in (inner, inner[:1]):
            model = keras.Sequential(net(*part))
            model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.1), ring), "mse")
            build(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).element_spec)
            verdicts.append(try_step(model, (X, Y), ring))
        rr.fit(model, X, Y, batch_size=10, verbose=0, communicator=ring, check="step")
        return verdicts

    with pytest.warns(rr.ParityWarning, match="each rank sets .*running/center") as shown:
        verdicts, _ = ring_of_threads(2, work)
    assert not any("follower" in str(each.message) for each in shown)
    for verdict in verdicts:
        center, plain = verdict.of_rows
        assert verdict.fit == "mean"
        assert center.endswith("running/center")
        assert plain.endswith("running/plain:0")


def test_what_any_rank_has_found_on_its_own_rows_is_named():
    found = [Verdict("mean", of_rows=("center",)), Verdict(why="no rows"), Verdict("sum")]
    found.append(Verdict("mean", of_rows=("center", "plain")))
    assert trial_in_fit._gravest(found).of_rows == ("center", "plain")
    assert trial_in_fit._gravest(found).fit == "sum"


class _CountsRows(keras.Model):
    """Right for 12 rows and for 6, wrong for 4 and 8."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        is_wrong = tf.shape(x)[0] % 3 != 0
        return self.dense(x) * tf.where(is_wrong, 0.5, 1.0)


def test_a_call_of_ones_own_is_tried_in_unequal_parts_too():
    def work(ring):
        model = _CountsRows()
        model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.1), ring), "mse")
        x, y = (np.ones((12, width), "float32") for width in (3, 1))
        build(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(4).element_spec)
        return try_step(model, (x, y), ring).fit

    assert ring_of_threads(1, work) == ["neither"]
