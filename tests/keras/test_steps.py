"""First steps, half precision, accumulation, dropout: training on a ring of two.

What must come out is computed beside it, by plain Keras, on the data of both ranks together.
"""

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce import ConfigError, RingReduceError
from ringreduce.effects import native
from tests.jobs import run_job
from tests.programs.shared import built, difference, digest
from tests.ranks import on_ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def data(steps, batch, seed=0):
    """Inputs and targets, (steps * size * batch, ...): a step's global batch after another."""
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(steps * rr.size() * batch, 4)).astype("float32")
    return inputs, inputs[:, :2] - inputs[:, 2:] ** 2


def rows(arrays, batch):
    """This rank's batches of those that `data` gives."""
    shares = [array.reshape(-1, rr.size(), batch, array.shape[1]) for array in arrays]
    return [share[:, rr.rank()].reshape(-1, share.shape[-1]) for share in shares]


def make_model(*layers, seed=5):
    keras.utils.set_random_seed(seed)
    middle = layers or (keras.layers.Dense(6, activation="tanh"),)
    return keras.Sequential([keras.Input((4,)), *middle, keras.layers.Dense(2)])


@contextlib.contextmanager
def policy(name):
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def fit_alone(model, optimizer, arrays, batch):
    """Train by plain Keras, on rank 0; untraced, since tracing would take longer."""
    model.compile(optimizer, "mse", run_eagerly=True)
    if rr.rank() == 0:
        model.fit(*arrays, batch_size=batch, shuffle=False, verbose=0)


def fit(model, optimizer, arrays, batch, callbacks=(), is_built=True, **options):
    model.compile(optimizer=optimizer, loss="mse", **options)
    if is_built:
        built(model)
    model.fit(*arrays, batch_size=batch, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


class Spike(keras.layers.Layer):
    """Passes its input on, times infinity where that is large."""

    def call(self, inputs):
        return inputs * tf.where(tf.reduce_any(inputs > 100.0), np.inf, 1.0)


@on_ranks(2)
def test_one_ranks_infinity_skips_the_step_on_all():
    inputs, targets = rows(data(6, 4), 4)
    if rr.rank() == 1:
        inputs[8:12] = 1000.0
    with policy("mixed_float16"):
        model = make_model(Spike(dtype="float32"), keras.layers.Dense(6, activation="tanh"))
    first = model.get_weights()[0].copy()
    fit(model, rr.DistributedOptimizer(Adam(0.01)), (inputs, targets), 4, is_built=False)
    optimizer = model.optimizer
    # `compile` puts a LossScaleOptimizer around ours: it goes inside.
    assert isinstance(optimizer, rr.DistributedOptimizer)
    assert type(optimizer).__name__ == type(optimizer._inner).__name__ == "LossScaleOptimizer"
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert (first != model.get_weights()[0]).any()
    assert {weight.dtype.name for weight in model.get_weights()} == {"float32"}
    scale, steps = float(optimizer.dynamic_scale.numpy()), int(optimizer.iterations.numpy())
    assert scale <= 2**14
    assert 0 < steps < 6
    return scale, steps, digest(model.get_weights())


@on_ranks(2)
def test_a_loss_scale_optimizer_goes_inside():
    ours = rr.DistributedOptimizer(SGD(0.1), compression="bf16")
    outer = keras.optimizers.LossScaleOptimizer(ours, initial_scale=8.0)
    assert isinstance(outer, rr.DistributedOptimizer)
    assert (outer.initial_scale, outer._options["compression"]) == (8.0, "bf16")
    assert float(outer.learning_rate) == np.float32(0.1)
    again = keras.optimizers.LossScaleOptimizer(outer)
    assert again._inner is outer._inner
    plain = keras.optimizers.LossScaleOptimizer(SGD(0.1))
    assert type(plain) is keras.optimizers.LossScaleOptimizer


def scaled(rate, scale):
    return keras.optimizers.LossScaleOptimizer(SGD(rate), initial_scale=scale)


@pytest.mark.parametrize(
    ("make", "dtypes", "options"),
    [
        (lambda: Adam(0.01, global_clipnorm=0.1), "float32", {"run_eagerly": True}),
        (lambda: SGD(0.1, momentum=0.5), "float32", {"steps_per_execution": 4}),
        (lambda: scaled(0.1, 16.0), "mixed_float16", {"run_eagerly": True}),
    ],
    ids=["adam, clipped, eager", "several steps", "half precision"],
)
@on_ranks(2)
def test_accumulated_steps_equal_one_of_the_whole_batch(make, dtypes, options):
    """Seven steps by three leave one over."""
    arrays = data(7, 4, seed=1)
    with policy(dtypes):
        model, alone, untrained = make_model(), make_model(), make_model()
    optimizer = rr.DistributedOptimizer(make(), gradient_accumulation_steps=3)
    fit(model, optimizer, rows(arrays, 4), 4, **options)
    fit_alone(alone, make(), [array[: 6 * rr.size() * 4] for array in arrays], 3 * rr.size() * 4)
    assert int(model.optimizer.iterations.numpy()) == 2
    if rr.rank() == 0:
        # Activations of half precision are rounded, so that only their digits agree: 11 bits.
        assert difference(model, alone) < (2e-6 if dtypes == "float32" else 2e-3)
        assert difference(alone, untrained) > 0.01
        if dtypes == "float32":
            assert len(model.optimizer.variables) == len(alone.optimizer.variables)
    return digest(model.get_weights())


@on_ranks(2)
def test_collectives_around_accumulation_keep_the_order_of_the_program():
    """Two optimizers that reduce in conditions, and collectives around and between them.

    The conditions touch variables, and each of them others: nothing but the program's order says
    what comes first.
    """
    models = [make_model(), make_model()]
    optimizers = [rr.DistributedOptimizer(SGD(0.1), gradient_accumulation_steps=2) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    inputs, targets = rows(data(8, 4, seed=3), 4)

    @tf.function
    def step(x, y):
        sums = [rr.all_reduce(tf.ones(1))]
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                value = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            sums.append(rr.all_reduce(tf.ones(2)))
        return tf.concat([*sums, rr.all_reduce(tf.ones(3))], 0)

    sums = [step(inputs[i : i + 4], targets[i : i + 4]) for i in range(0, len(inputs), 4)]
    assert (np.stack(sums) == rr.size()).all()
    assert len({digest(model.get_weights()) for model in models}) == 1
    return digest(models[0].get_weights())


@on_ranks(2)
def test_an_accumulated_infinity_is_forgotten_after_its_update():
    inputs, targets = rows(data(6, 4, seed=2), 4)
    if rr.rank() == 0:
        inputs[4:8] = 1000.0
    model = make_model(Spike(), keras.layers.Dense(3))
    optimizer = rr.DistributedOptimizer(scaled(0.01, 4.0), gradient_accumulation_steps=2)
    fit(model, optimizer, (inputs, targets), 4, run_eagerly=True)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert int(optimizer.iterations.numpy()) == 2
    assert float(optimizer.dynamic_scale.numpy()) == 2.0
    return digest(model.get_weights())


def of_all(values):
    """By rank, the bytes of the arrays that it passes."""
    return rr.init().all_gather_object([np.asarray(value).tobytes() for value in values])


@on_ranks(2)
def test_callbacks_that_copy_and_compare_weights_leave_local_variables_alone():
    model = make_model()
    optimizer = rr.DistributedOptimizer(SGD(0.1, momentum=0.5))
    layer, shared = model.layers
    for variable in layer.trainable_variables:
        optimizer.register_local_var(variable)
        variable.assign(variable + rr.rank())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), rr.callbacks.VerifyReplicas(1)]
    fit(model, optimizer, rows(data(3, 4), 4), 4, callbacks=callbacks, run_eagerly=True)
    momenta = {v.path.rpartition("/")[2]: v for v in optimizer.variables}
    names = [f"{v.path.replace('/', '_')}_momentum" for v in layer.trainable_variables]
    first, second = of_all([*layer.get_weights(), *(momenta[name] for name in names)])
    assert all(a != b for a, b in zip(first, second, strict=True))
    return digest(shared.get_weights())


@on_ranks(2)
def test_layers_in_eight_bits_are_refused():
    """The new value of a scale is from what one rank has seen."""
    model = make_model()
    for layer in model.layers:
        layer.quantize("float8")
    with pytest.raises(
        (RingReduceError, tf.errors.OpError), match="inputs_scale, a scale of 8-bit"
    ):
        fit(model, rr.DistributedOptimizer(SGD(0.1)), rows(data(6, 4), 4), 4)


@on_ranks(2)
def test_only_what_is_trainable_is_trained():
    model, alone = make_model(), make_model()
    model.layers[0].trainable = alone.layers[0].trainable = False
    before = model.layers[0].get_weights()
    arrays = data(4, 4, seed=3)
    fit(model, rr.DistributedOptimizer(SGD(0.1)), rows(arrays, 4), 4, run_eagerly=True)
    fit_alone(alone, SGD(0.1), arrays, 4 * rr.size())
    for weight, expected in zip(model.layers[0].get_weights(), before, strict=True):
        assert (weight == expected).all()
    if rr.rank() == 0:
        assert difference(model, alone) < 2e-6
    return digest(model.get_weights())


@on_ranks(2)
def test_models_and_optimizers_of_equal_shapes_in_turns():
    arrays = data(2, 4, seed=4)
    models, alone = ([make_model(seed=7), make_model(seed=8)] for _ in range(2))
    plain = [Adam(0.01) for _ in models]
    for model in models:
        model.compile(rr.DistributedOptimizer(Adam(0.01)), "mse", run_eagerly=True)
        built(model)
    for _ in range(2):
        for model in models:
            model.fit(*rows(arrays, 4), batch_size=4, shuffle=False, verbose=0)
        for model, optimizer in zip(alone, plain, strict=True):
            fit_alone(model, optimizer, arrays, 4 * rr.size())
    if rr.rank() == 0:
        assert all(difference(*pair) < 2e-6 for pair in zip(models, alone, strict=True))
    return [digest(model.get_weights()) for model in models]


@pytest.mark.parametrize("run_eagerly", [False, True])
@on_ranks(2)
def test_masks_of_dropout_differ_between_ranks_and_weights_do_not(run_eagerly):
    keras.utils.set_random_seed(11)
    layer = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(32), layer])
    if run_eagerly:
        rr.fold_seeds(model)
    optimizer = rr.DistributedOptimizer(SGD(0.1))
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=run_eagerly)
    model.fit(np.ones((4, 4)), np.ones((4, 32)), batch_size=2, verbose=0)
    seed = layer.seed_generator.state.numpy()[0]
    rr.fold_seeds(model)
    rr.broadcast_variables(model.variables, root_rank=0)
    # Neither folding again nor a copy of all variables makes the seeds of ranks equal again.
    assert layer.seed_generator.state.numpy()[0] == seed
    mask = layer(np.ones((1, 64)), training=True).numpy() != 0
    first, second = of_all([seed, mask])
    assert all(a != b for a, b in zip(first, second, strict=True))
    return digest(model.get_weights())


@pytest.mark.parametrize(("is_built", "is_eager"), [(False, False), (True, True)])
@on_ranks(2)
def test_the_first_step_begins_with_rank_0s_weights(is_built, is_eager):
    """Unbuilt, they do not exist before the first batch; the first eager gradients are of others.

    On the same data, rank 0 does what it would do alone.
    """
    ends = []
    for optimizer, eagerly in ((rr.DistributedOptimizer(SGD(0.5)), is_eager), (SGD(0.5), True)):
        keras.utils.set_random_seed(rr.rank())
        inputs = [keras.Input((4,))] if is_built else []
        model = keras.Sequential([*inputs, keras.layers.Dense(3), keras.layers.Dense(2)])
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0)
        ends.append(model.get_weights())
    for weight, expected in zip(*ends, strict=True):
        if rr.rank() == 0:
            np.testing.assert_allclose(weight, expected, rtol=1e-6)
        else:
            assert np.abs(weight - expected).max() > 0.01
    return digest(ends[0])


@on_ranks(2)
def test_jit_compile_works_or_is_refused_with_advice():
    refusal = pytest.raises(ConfigError, match="jit_compile=False")
    with contextlib.nullcontext() if native.library() else refusal:
        fit(make_model(), rr.DistributedOptimizer(SGD(0.1)), data(1, 2), 2, jit_compile=True)


@pytest.mark.parametrize("autograph", [True, False])
@on_ranks(2)
def test_a_reduction_inside_a_condition_is_refused(autograph):
    """In a function that AutoGraph has converted, and in one that it has not."""
    variable = tf.Variable([0.0])
    optimizer = rr.DistributedOptimizer(SGD(0.1))

    def converted(rank):
        if rank > 0:
            optimizer.apply([tf.ones(1)], [variable])
        return rank

    def plain(rank):
        return tf.cond(rank > 0, lambda: converted(1), lambda: rank)

    step = tf.function(converted if autograph else plain, autograph=autograph)
    with pytest.raises(ConfigError, match=r"tf\.cond"):
        step(tf.constant(rr.rank()))


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_digits_end_to_end(tmp_path, size):
    """The example as a user runs it: equal digests, and it learns."""
    file = tmp_path / "out.json"
    result = run_job(size, ["examples/digits.py", "--epochs", "1", "--json", str(file)])
    assert result.exit_code == 0, result.errors
    out = json.loads(file.read_text())
    assert out["weights_sha256"] == [out["weights_sha256"][0]] * size
    assert out["accuracy"] > 0.8
    assert out["samples_per_s"] > 0
