"""Noise by TensorFlow's random numbers, for the rows of each rank: other numbers, or a warning."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.keras.checks.warnings import differences
from ringreduce.keras.model.weighted import changed_by_steps
from ringreduce.tensorflow.private import XLA_DRAWS_ALIKE
from tests.programs.shared import digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

SGD = keras.optimizers.SGD


class Noise(keras.layers.Layer):
    """Adds what it draws, and shows the first column of it."""

    def __init__(self, kind):
        super().__init__()
        # No variable of the layer's: those are rank 0's on all ranks when an epoch ends.
        drawn = tf.Variable(tf.zeros(4))
        self.kind, self.note, self.drawn = kind, drawn.assign, drawn.numpy
        if kind == "generator":
            self.source = tf.random.Generator.from_seed(5)
        if kind == "own function":
            self.draw = tf.function(self.draw, autograph=False)

    def draw(self, values):
        shape = tf.shape(values)
        return self.source.normal(shape) if self.kind == "generator" else tf.random.normal(shape)

    def call(self, values):
        noise = self.draw(values)
        self.note(noise[:, 0])
        return values + noise


class Noisy(SGD):
    """Whose noise must be the same on all ranks."""

    def update_step(self, gradient, variable, learning_rate):
        noise = tf.random.normal(variable.shape, stddev=0.01)
        super().update_step(gradient + noise, variable, learning_rate)


class Averaging(keras.Model):
    """A `train_step` of one's own, by a tape and a plain optimizer."""

    def train_step(self, data):
        x, y = data
        with rr.DistributedGradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def trained(kind, *, optimizer=None, of=keras.Sequential, how="rr.fit", **options):
    """Numbers that this rank's layer has drawn last, its weights, and the warnings of it."""
    keras.utils.set_random_seed(3)
    noise, x, y = Noise(kind), np.ones((8, 1), "float32"), np.ones((8, 1), "float32")
    model = keras.Sequential([keras.Input((1,)), noise, keras.layers.Dense(1)])
    model = model if of is keras.Sequential else of(model.inputs, model.outputs)
    optimizer = optimizer or rr.DistributedOptimizer(SGD(0.1))
    model.compile(optimizer, "mse", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "rr.fit":
            rr.fit(model, x, y, batch_size=8, epochs=2, verbose=0)
        elif how == "model.fit":
            warnings.simplefilter("ignore", rr.DataWarning)
            model.fit(x[:4], y[:4], batch_size=4, verbose=0)
        else:
            loop(model, optimizer, x[:4], y[:4])
    told = [str(each.message) for each in caught if "draw the same" in str(each.message)]
    return noise.drawn().tolist(), model.get_weights(), told


def loop(model, optimizer, x, y):
    optimizer.build(model.trainable_variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step()


def everyone(numbers):
    return [number for part in rr.init().all_gather_object(numbers) for number in part]


@pytest.mark.parametrize("kind", ["normal", "generator", in_full("own function")])
@on_ranks(2)
def test_rows_get_other_noise_on_each_rank_and_the_same_in_each_run(kind):
    numbers, weights, told = trained(kind)
    if kind == "own function":  # Which was traced before, when the model was built.
        assert len(told) == (rr.rank() == 0)
    else:
        assert len(set(everyone(numbers))) == 8
        assert told == []
        assert trained(kind)[0] == numbers
    after = tf.random.normal((4,)).numpy().tolist()
    return digest(weights), after, np.random.rand()


@pytest.mark.skipif(XLA_DRAWS_ALIKE, reason="XLA draws the same in every process")
@on_ranks(2)
def test_what_xla_draws_by_process_is_no_warning():
    numbers, _, told = trained("normal", how="rr.fit", jit_compile=True)
    assert len(set(everyone(numbers))) == 8
    assert told == []


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("model.fit", {}),
        ("own loop", {}),
        ("rr.fit", {"run_eagerly": True}),
        pytest.param(
            *("rr.fit", {"jit_compile": True}),
            marks=pytest.mark.skipif(not XLA_DRAWS_ALIKE, reason="XLA draws by process"),
        ),
    ],
    ids=["model.fit", "own loop", "eagerly", "XLA"],
)
@on_ranks(2)
def test_the_same_noise_on_all_ranks_is_a_warning(how, options):
    numbers, weights, told = trained("normal", how=how, **options)
    every = everyone(numbers)
    assert every[:4] == every[4:]
    assert len(told) == (rr.rank() == 0)
    for text in told:
        place = "eagerly" if "run_eagerly" in options else r"RandomStandardNormal \(\S+\.py:\d+\)"
        assert re.search(f"ranks draw the same random numbers for other rows, in .*{place}", text)
        assert "seed=self.seed, where self.seed = keras.random.SeedGenerator(1)" in text
    return digest(weights)


@pytest.mark.parametrize("how", ["model.fit", "own loop"])
@on_ranks(2)
def test_a_generator_of_tensorflow_differs_where_ranks_only_share_an_optimizer(how):
    numbers, weights, told = trained("generator", how=how)
    assert len(set(everyone(numbers))) == 8
    assert told == []
    return digest(weights)


@on_ranks(2)
def test_noise_of_optimizers_stays_equal():
    numbers, weights, _ = trained("normal", optimizer=rr.DistributedOptimizer(Noisy(0.1)))
    assert len(set(everyone(numbers))) == 8
    numbers, others, _ = trained("normal", optimizer=Noisy(0.1), of=Averaging)
    assert len(set(everyone(numbers))) == 8
    return digest([*weights, *others])


@on_ranks(2)
def test_a_seed_for_each_rank_is_not_warned_of():
    set_seed = keras.utils.set_random_seed
    keras.utils.set_random_seed = lambda seed: set_seed(seed + rr.rank())
    try:
        numbers, weights, told = trained("normal", how="own loop")
    finally:
        keras.utils.set_random_seed = set_seed
    assert len(set(everyone(numbers))) == 8
    assert told == []
    return digest(weights)


@pytest.mark.full
@on_ranks(4)
def test_ranks_with_the_same_rows_draw_the_same():
    comm = rr.init()
    pair, data = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    for kind in ("normal", "generator"):
        keras.utils.set_random_seed(3)
        noise, column = Noise(kind), rr.ColumnParallelDense(4, communicator=pair)
        row = rr.RowParallelDense(1, communicator=pair)
        model = keras.Sequential([keras.Input((1,)), noise, column, row])
        model.compile(rr.DistributedOptimizer(SGD(0.1), data), "mse")
        x = np.ones((8, 1), "float32")
        rr.fit(model, x, x, batch_size=8, verbose=0, communicator=data)
        first, same, other, others = comm.all_gather_object(noise.drawn().tolist())
        assert first == same
        assert other == others
        assert len({*first, *other}) == 8


def test_generators_of_tensorflow_are_found_in_layers():
    """So a step, or what follows a commit, draws the same when it is made again."""
    layer = Noise("generator")
    model = keras.Sequential([keras.Input((1,)), keras.Sequential([layer])])
    state = rr.elastic.KerasState(model, SGD())
    first = layer.source.normal((3,)).numpy().tolist()
    state.restore()
    assert layer.source.normal((3,)).numpy().tolist() == first
    assert any(state is layer.source.state for state in changed_by_steps(model))
    [text] = differences(model)
    assert text == f"{layer.name}: each rank draws other random numbers"
