"""Steps of programs: what the trial says of each, and what two and three ranks make of it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import ringreduce.keras as rr
from ringreduce.testing import ring_of_threads
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(200)]

BATCH, ROWS = 24, 37  # The last batch has 13: unequal parts of it for two ranks and for three.
GENERATOR = np.random.default_rng(2)
X = GENERATOR.normal(size=(ROWS, 3)).astype("float32")
Y = (1 + np.arange(ROWS)[:, None] % 5).astype("float32") / 5
WORDS = GENERATOR.integers(1, 9, (ROWS, 4))
OF_UNEQUAL_LENGTHS = WORDS * (np.arange(4) < 1 + np.arange(ROWS)[:, None] % 4)
SPANS = 1 + np.arange(ROWS) % 3
WITH_NAN = np.where(np.arange(ROWS)[:, None] == 3, np.nan, X).astype("float32")


def fixed(model):
    """Ranks are threads here, which share a seed."""
    for variable in model.trainable_variables:
        values = np.cos(np.arange(np.prod(variable.shape))).reshape(variable.shape) / 2
        variable.assign(values.astype("float32"))
    return model


def stepping(loss_of, *, change=lambda gradients: gradients, around=lambda step: step):
    """A model whose step has that loss, changes its gradients, and is decorated."""

    class Own(keras.Sequential):
        @around
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(self, y, self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            gradients = change(tape.gradient(scaled, self.trainable_variables))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"value": loss}

    return lambda: Own([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])


def mean(_, y, outputs):
    return tf.reduce_mean((y - tf.cast(outputs, y.dtype)) ** 2)


def of_constant(_, y, outputs):
    return tf.reduce_sum((y - tf.cast(outputs, y.dtype)) ** 2) / BATCH


def against_others(_, y, outputs):
    return tf.reduce_mean((outputs - tf.transpose(outputs)) ** 2 * y)


def of_layers(model, y, outputs):
    return of_constant(model, y, outputs) + tf.add_n(model.losses)


class Adding(layers.Layer):
    """Adds a loss of what passes, as a function makes it."""

    def __init__(self, loss_of):
        super().__init__()
        self.loss_of = loss_of

    def call(self, values):
        self.add_loss(self.loss_of(values))
        return values


def adding(loss_of):
    return lambda: keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, "tanh"), Adding(loss_of), layers.Dense(1)]
    )


def dense():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])


def of_words(mask_zero):
    def make():
        words = layers.Embedding(9, 3, mask_zero=mask_zero)
        return keras.Sequential([keras.Input((4,), dtype="int32"), words, layers.Dense(1)])

    return make


class OfUneven(keras.Model):
    def __init__(self):
        super().__init__()
        self.words, self.out = layers.Embedding(9, 3), layers.Dense(1)

    def call(self, x):
        return self.out(tf.reduce_mean(tf.ragged.map_flat_values(self.words, x), 1))


def of_dict():
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    outputs = layers.Dense(1)(layers.concatenate([layers.Dense(2)(left), right]))
    return keras.Model({"left": left, "right": right}, outputs)


class Gan(keras.Model):
    """Tells rows from those of a generator, with noise on labels; each has its optimizer."""

    noise, reduce = 0.0, staticmethod(tf.reduce_mean)

    def __init__(self):
        super().__init__()
        self.critic, self.generator = layers.Dense(1), layers.Dense(3)

    def call(self, x):
        return self.critic(self.generator(x))

    def compile(self, optimizer, *_, **options):
        super().compile(optimizer, **options)
        self.other = rr.DistributedOptimizer(keras.optimizers.SGD(0.1), **optimizer.options_of_test)

    def train_step(self, data):
        x, _ = data
        rows = tf.shape(x)[0]
        latent = x + self.noise * tf.random.normal(tf.shape(x))
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], 0)
        labels += self.noise * tf.random.uniform(tf.shape(labels))
        both = tf.concat([self.generator(latent), x], 0)
        with tf.GradientTape() as tape:
            loss = self.reduce((labels - self.critic(both)) ** 2)
        self.of(tape, loss, self.critic, self.optimizer)
        with tf.GradientTape() as tape:
            loss = self.reduce(self.critic(self.generator(latent)) ** 2)
        self.of(tape, loss, self.generator, self.other)
        return {"value": loss}

    def of(self, tape, loss, layer, optimizer):
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)


class Noisy(Gan):
    noise = 0.05


class Added(Gan):
    def reduce(self, values):
        return tf.reduce_sum(values) / BATCH


class Counting(keras.Sequential):
    """Has state in Python: it applies each second step what both gave, or each alone."""

    together = False

    def train_step(self, data):
        x, y = data
        self.steps = getattr(self, "steps", 0) + 1
        with tf.GradientTape() as tape:
            loss = mean(self, y, self(x)) * self.steps
        found = tape.gradient(loss, self.trainable_variables)
        if self.together:
            self.kept = getattr(self, "kept", None)
            self.kept = (
                [a + b for a, b in zip(self.kept, found, strict=True)] if self.kept else found
            )
            found = self.kept if self.steps % 2 == 0 else []
        if found:
            self.optimizer.apply(found, self.trainable_variables)
        return {"value": loss}


class Accumulating(Counting):
    together = True


@dataclass(frozen=True)
class Case:
    """A step, and what the trial is to say of it."""

    kind: str  # mean, sum, neither, or not tried
    make: Callable[[], Any]
    x: Any = field(default_factory=lambda: X)
    y: Any = field(default_factory=lambda: Y)
    inner: Callable[[], Any] = lambda: keras.optimizers.SGD(0.02)
    of_wrapper: dict[str, Any] = field(default_factory=dict)
    of_fit: dict[str, Any] = field(default_factory=dict)
    loss: Any = "mse"
    policy: str = "float32"
    near: float = 1e-6
    batch: int = BATCH
    is_random: bool = False


def clipped(to):
    return lambda gradients: tf.clip_by_global_norm(gradients, to)[0]


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.02), 8.0)


JIT = tf.function(jit_compile=True)
MEAN_WEIGHTED = keras.losses.MeanSquaredError("mean_with_sample_weight")
CASES = {
    "gan": Case("mean", Gan),
    "gan with label noise": Case("mean", Noisy, is_random=True),
    "gan of a constant": Case("sum", Added),
    "accumulated here": Case("mean", stepping(mean), of_wrapper={"gradient_accumulation_steps": 2}),
    "sum, accumulated here": Case(
        "sum", stepping(of_constant), of_wrapper={"gradient_accumulation_steps": 2}
    ),
    "accumulated by its own code": Case(
        "not tried",
        lambda: Accumulating([keras.Input((3,)), layers.Dense(1)]),
        *(X[:24], Y[:24]),
        batch=12,
    ),
    "state in Python": Case("mean", lambda: Counting([keras.Input((3,)), layers.Dense(1)])),
    "clipped": Case("neither", stepping(mean, change=clipped(0.1))),
    "clipped above what is": Case("mean", stepping(mean, change=clipped(1e6))),
    "scaled loss": Case("mean", stepping(mean), inner=scaled),
    "sum, scaled loss": Case("sum", stepping(of_constant), inner=scaled),
    "float16": Case("mean", dense, inner=scaled, policy="mixed_float16", near=1e-2),
    "bfloat16": Case("mean", dense, policy="mixed_bfloat16", near=3e-2),
    "float16, own step": Case(
        "mean", stepping(mean), inner=scaled, policy="mixed_float16", near=1e-2
    ),
    "sum, float16": Case(
        "sum", stepping(of_constant), inner=scaled, policy="mixed_float16", near=1e-2
    ),
    "add_loss, mean": Case("mean", adding(lambda v: ops.mean(v**2))),
    "add_loss, sum": Case("neither", adding(lambda v: ops.sum(v**2))),
    "add_loss, sum beside a sum": Case(
        "sum",
        lambda: stepping(of_layers)().__class__(
            [keras.Input((3,)), layers.Dense(4), Adding(lambda v: ops.sum(v**2)), layers.Dense(1)]
        ),
    ),
    "activities": Case(
        "mean",
        lambda: keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, activity_regularizer="l2"), layers.Dense(1)]
        ),
    ),
    "contrastive": Case("neither", stepping(against_others)),
    "masked tokens": Case(
        "neither", of_words(True), OF_UNEQUAL_LENGTHS, np.tile(Y, (1, 4))[..., None]
    ),
    "no masks": Case("mean", of_words(False), OF_UNEQUAL_LENGTHS, np.tile(Y, (1, 4))[..., None]),
    "NaN": Case("mean", dense, WITH_NAN),
    "ragged": Case(
        "mean",
        OfUneven,
        tf.RaggedTensor.from_row_lengths(GENERATOR.integers(1, 9, SPANS.sum()), SPANS),
    ),
    "dict": Case("mean", of_dict, {"left": X, "right": X[:, ::-1].copy()}),
    "class weights": Case(
        "mean",
        lambda: keras.Sequential([keras.Input((3,)), layers.Dense(3, "softmax")]),
        y=np.arange(ROWS) % 3,
        loss="sparse_categorical_crossentropy",
        of_fit={"class_weight": {0: 1.0, 1: 4.0, 2: 0.5}},
    ),
    "sample weights": Case("mean", dense, of_fit={"sample_weight": Y[:, 0]}),
    "mean by sample weights": Case(
        "neither", dense, of_fit={"sample_weight": Y[:, 0]}, loss=MEAN_WEIGHTED
    ),
    "tf.function": Case("mean", stepping(mean, around=tf.function)),
    "sum, tf.function": Case("sum", stepping(of_constant, around=tf.function)),
    "jit": Case("mean", stepping(mean, around=JIT)),
    "contrastive, jit": Case("neither", stepping(against_others, around=JIT)),
}


# Some of each kind. What the trial says of functions and of compared rows is in test_trial too.
NEAR = [
    *("gan with label noise", "sum, accumulated here", "accumulated by its own code"),
    *("float16, own step", "add_loss, sum", "masked tokens", "NaN", "class weights"),
]


def trained(name, size, **options):
    """Weights of rank 0 after two epochs, with a short last batch, and what was warned of."""
    case = CASES[name]

    def work(ring):
        of_test = {"communicator": ring, **case.of_wrapper, **options}
        keras.config.set_dtype_policy(case.policy)
        try:
            model = case.make()
        finally:
            keras.config.set_dtype_policy("float32")
        optimizer = rr.DistributedOptimizer(case.inner(), **of_test)
        optimizer.options_of_test = of_test
        if not model.built:
            model(tf.nest.map_structure(lambda v: v[:2], case.x))
        model.compile(optimizer, case.loss, run_eagerly=True)
        fixed(model)
        how = {
            "batch_size": case.batch,
            "shuffle": False,
            "verbose": 0,
            "epochs": 2,
            "check": "step",
        }
        rr.fit(model, case.x, case.y, communicator=ring, **how, **case.of_fit)
        return [np.array(v, "float32") for v in model.trainable_variables]

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        weights = ring_of_threads(size, work)[0]
    texts = [str(each.message) for each in shown if each.category is rr.ParityWarning]
    # Without what is known of random numbers, of which an earlier test may have set the seed.
    texts = [text for text in texts if not text.startswith("ranks draw the same random numbers")]
    return weights, [text for text in texts if "rows" in text or "mask" in text]


def are_near(weights, others, by):
    pairs = zip(weights, others, strict=True)
    return all(np.allclose(a, b, rtol=0, atol=by, equal_nan=True) for a, b in pairs)


# Ranks in threads wait for each other in graphs, and TensorFlow has a thread for each core.
IN_GRAPHS = "tf.function", "sum, tf.function"
RUNS = [(name, size) for name in CASES for size in (2, 3) if size == 2 or name not in IN_GRAPHS]


@pytest.mark.parametrize(
    ("name", "size"),
    [run if run[0] in NEAR and run[1] == 2 else in_full(*run) for run in RUNS],
)
def test_what_is_said_of_a_step_is_so(name, size, caplog):
    case = CASES[name]
    caplog.set_level("INFO")
    alone, nothing = trained(name, 1)
    weights, texts = trained(name, size)
    assert nothing == []
    assert bool(texts) == (case.kind in ("sum", "neither")), texts
    assert all(('gradients="sum"' in text) == (case.kind == "sum") for text in texts)
    assert ("was not tried" in caplog.text) == (case.kind == "not tried"), caplog.text
    if not case.is_random:
        assert are_near(alone, weights, case.near) == (not texts)
    if case.kind == "sum":
        weights, texts = trained(name, size, gradients="sum")
        assert texts == []
        assert are_near(alone, weights, case.near)
