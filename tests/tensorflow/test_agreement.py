"""Models and training steps in which ranks disagree: all find out soon, and name the variable.

Real processes. Each way that ranks reach each other, and each bridge, goes through all
scenarios in one start of the workers, a ring for each.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from ringreduce.effects import native
from tests.rings import MISMATCH_S, Ring
from tests.scope import in_full

pytestmark = pytest.mark.tensorflow

VICTIM = 1

PREAMBLE = """
import keras
import tensorflow as tf
from ringreduce.keras import DistributedGradientTape, DistributedOptimizer
from ringreduce.keras import fit as fit_divided
from ringreduce.tensorflow import ops

assert ops.are_available() is {native}
ODD = RANK == {victim}
ones = np.ones((2, 4), np.float32)

class Gate(keras.layers.Layer):
    '''Passes gradients on, or not.'''

    closed = False

    def call(self, inputs):
        return tf.stop_gradient(inputs) if self.closed else inputs + 0.0

    def compute_output_shape(self, shape):
        return shape

def make(
    names=("first", "second", "third"),
    bucket_bytes=100,
    units=4,
    dtype="float32",
    rate=0.0,
    accumulate_steps=1,
    sgd=(),
    activation=None,
    run_eagerly=True,
):
    '''Eager, since a trace takes long, but where what is traced is told apart.'''
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(units, activation, name=name, dtype=dtype) for name in names]
    gate = Gate()
    model = keras.Sequential([keras.Input((4,)), layers[0], gate, *layers[1:]], name="model")
    model.gate = gate
    # A bucket for each layer.
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(rate, **dict(sgd)),
        communicator=ring,
        bucket_bytes=bucket_bytes,
        accumulate_steps=accumulate_steps,
    )
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=run_eagerly)
    return model

def fit(model):
    model.fit(ones, np.ones((2, model.output_shape[-1]), np.float32), verbose=0)

def fit_twice(**options):
    '''The second time without the first layer's gradients, on one rank.'''
    model = make(**options)
    fit(model)
    model.gate.closed = ODD
    model.make_train_function(force=True)
    fit(model)

def fit_closed():
    model = make(run_eagerly=False)
    model.gate.closed = ODD
    fit(model)

def stepper(model, wrap=tf.function):
    model.optimizer.build(model.trainable_variables)

    def step(closed, backwards=False):
        model.gate.closed = closed
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(ones) ** 2)
        variables = model.trainable_variables
        pairs = list(zip(tape.gradient(loss, variables), variables))
        model.optimizer.apply_gradients(pairs[::-1] if backwards else pairs)

    return wrap(step)

def steps(wrap):
    step = stepper(make(), wrap)
    for number in range(5):
        step(ODD and number >= 3)

def back_and_forth():
    step = stepper(make())
    for closed in (False, True, False, True):
        step(closed)
    step(ODD)

def backwards():
    step = stepper(make())
    step(False)
    step(False, ODD)

def pretending(module):
    true = module.__version__
    if ODD:
        module.__version__ = "99.0"
    try:
        fit(make())
    finally:
        module.__version__ = true

def decay(rate):
    return keras.optimizers.schedules.ExponentialDecay(rate, 10, 0.5)

class Taped(keras.Model):
    '''Averages gradients by itself.'''

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, data):
        with DistributedGradientTape(communicator=ring) as tape:
            loss = tf.reduce_mean(self(data[0]) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

class FasterOnOneRank(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if ODD and epoch == 1:
            self.model.optimizer.learning_rate = 0.5

def divided(loss="mse", activation=None, own_step=False, **options):
    model = make(rate=0.25, activation=activation)
    if own_step:
        model = Taped(model)
    optimizer = "sgd" if own_step else model.optimizer
    model.compile(optimizer=optimizer, loss=loss, run_eagerly=True)
    x = np.arange(48, dtype=np.float32).reshape(12, 4) % 5
    usual = {"batch_size": 12, "epochs": 2, "verbose": 0, "communicator": ring}
    fit_divided(model, x, x, **{**usual, **options})

def timed(name, call):
    def run():
        try:
            call()
        finally:
            say(name + " at", at=time.monotonic())
    attempt(name, run)

rings = []
for number, (name, call) in enumerate(SCENARIOS.items()):
    ring = join(number)
    rings.append(ring)
    timed(name, call)
    attempt(name + " again", ring.barrier)
hold()
"""

# What is called, and what must be in every rank's error.
CLOSED = ("model/first/kernel: float32 of shape (4, 4)", "model/first/kernel: no gradient (None)")
SCENARIOS = {
    "names": (
        "fit(make(('first', *('second', 'third')[:: -1 if ODD else 1]), run_eagerly=False))",
        ("model/second/kernel: float32", "model/third/kernel: float32", "has another model"),
    ),
    "more variables": (
        "fit(make(('first', 'second', 'third', 'fourth')[: 4 if ODD else 3]))",
        ("model/fourth/kernel: float32", "8 variables", "6 variables"),
    ),
    "shape": (
        "fit(make(units=5 if ODD else 4))",
        ("model/first/kernel: float32 of shape (4, 5)", "float32 of shape (4, 4)"),
    ),
    "TensorFlow": ("pretending(tf)", ("runs TensorFlow 99.0", "runs TensorFlow 2.")),
    "Keras": ("pretending(keras)", ("runs Keras 99.0", "runs Keras 3.")),
    "buckets": (
        "fit(make(bucket_bytes=10_000 if ODD else 100))",
        ("1 bucket, the first of ", "(bucket_bytes=10000)", "(bucket_bytes=100)"),
    ),
    "momentum": (
        "fit(make(sgd={'momentum': 0.5 if ODD else 0.75}))",
        ("found different optimizers: momentum is 0.75 on rank 0 and 0.5 on rank 1",),
    ),
    "schedule": (
        "fit(make(rate=decay(0.5 if ODD else 0.25)))",
        ("learning_rate.config.initial_learning_rate is 0.25 on rank 0 and 0.5 on rank 1",),
    ),
    "accumulated steps": (
        "fit(make(accumulate_steps=3 if ODD else 2))",
        ("strategy.steps is 2 on rank 0 and 3 on rank 1",),
    ),
    "activation": (
        "fit(make(activation='tanh' if ODD else 'relu'))",
        (
            "found different models: layer 'first': activation is 'relu' on rank 0 and 'tanh' on "
            "rank 1, in comparison of settings.",
            "Build the same model on every rank, and adapt layers",
        ),
    ),
    "activation in a step of the user's": (
        "divided(activation='tanh' if ODD else 'relu', own_step=True)",
        ("found different models: layer 'third': activation is 'relu' on rank 0 and 'tanh' on",),
    ),
    "batch size and seed of rr.fit": (
        "divided(batch_size=6, seed=3) if ODD else divided()",
        (
            "found different arguments of rr.fit and compile: batch_size is 12 on rank 0 and 6 on "
            "rank 1; seed is 0 on rank 0 and 3 on rank 1",
        ),
    ),
    "loss": ("divided('mae' if ODD else 'mse')", ("loss is 'mse' on rank 0 and 'mae' on rank 1",)),
    "a callback of one rank": (
        "divided(callbacks=[FasterOnOneRank()])",
        ("the learning rate is 0.25 on rank 0 and 0.5 on rank 1", "alike on all ranks"),
    ),
    "None from the start": ("fit_closed()", CLOSED),
    "None later in fit": ("fit_twice(run_eagerly=False)", CLOSED),
    "None later in fit, eagerly": ("fit_twice()", CLOSED),
    "None later in a function": ("steps(tf.function)", CLOSED),
    "None later in an eager loop": ("steps(lambda step: step)", CLOSED),
    "a plan of before": ("back_and_forth()", CLOSED),
    "another order later": (
        "backwards()",
        ("model/first/kernel: float32", "model/third/bias: float32"),
    ),
}

# How ranks reach each other, their number and hosts, and whether there is a native library.
WAYS = {
    "shm": ("shm", 2, (), True),
    "two hosts": ("auto", 3, ("a", "a", "b"), True),
    "zmq, in Python": ("zmq", 3, (), False),
}


@pytest.fixture(
    scope="module",
    params=["shm", in_full("two hosts"), in_full("zmq, in Python")],
)
def disagreements(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    """What each rank said in each scenario."""
    transport, size, hosts, is_native = WAYS[request.param]
    if is_native and native.library() is None:
        pytest.skip(native.why_missing())
    calls = ", ".join(f"{name!r}: lambda: {call}" for name, (call, _) in SCENARIOS.items())
    program = PREAMBLE.replace("{native}", str(is_native)).replace("{victim}", str(VICTIM))
    program = program.replace("rings = []\n", f"SCENARIOS = {{{calls}}}\nrings = []\n")
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    if not is_native:
        environment["RINGREDUCE_NATIVE"] = "0"
    with Ring(
        tmp_path_factory.mktemp("agreement"),
        size,
        textwrap.dedent(program),
        rings=len(SCENARIOS),
        transport=transport,
        hosts=hosts,
        environment=environment,
    ) as ring:
        found = {}
        for name in SCENARIOS:
            for event in (name, f"{name} at", f"{name} again"):
                found[event] = ring.wait(event)
        ring.release()
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_get_a_mismatch_with_both_sides(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    for fact in disagreements[name]:
        assert fact["kind"] == "MismatchError", fact
        for words in SCENARIOS[name][1]:
            assert words in fact["text"], fact
    for fact in disagreements[f"{name} again"]:
        assert fact["kind"] == "MismatchError", fact
        assert fact["seconds"] < 2


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_find_out_soon(name: str, disagreements: dict[str, list[dict[str, Any]]]) -> None:
    """The first cannot know before the last has come to the call in which they differ."""
    times = [fact["at"] for fact in disagreements[f"{name} at"]]
    assert max(times) - min(times) < MISMATCH_S, times
