"""Half precision, accumulation, local variables, dropout: training on a ring of two.

What must come out is computed beside it, by plain Keras, on the data of both ranks together.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce import ConfigError, MismatchError
from tests.programs.shared import built, difference, digest, error_of
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
    return [
        array.reshape(-1, rr.size(), batch, array.shape[1])[:, rr.rank()].reshape(
            -1, array.shape[1]
        )
        for array in arrays
    ]


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


def is_finite(model):
    return all(np.isfinite(weight).all() for weight in model.get_weights())


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
    assert is_finite(model)
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
    optimizer = rr.DistributedOptimizer(make(), accumulate_steps=3)
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
    optimizers = [rr.DistributedOptimizer(SGD(0.1), accumulate_steps=2) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    inputs, targets = rows(data(8, 4, seed=3), 4)
    counter = tf.Variable(0.0)
    loss = keras.losses.MeanSquaredError()

    @tf.function
    def step(x, y):
        sums = [rr.all_reduce(tf.ones(1))]
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                value = loss(y, model(x))
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            sums.append(rr.all_reduce(tf.ones(2)))
        for _ in tf.range(2):
            counter.assign_add(rr.all_reduce(1.0))
        return tf.concat([*sums, rr.all_reduce(tf.ones(3))], 0)

    sums = [step(inputs[i : i + 4], targets[i : i + 4]) for i in range(0, len(inputs), 4)]
    assert (np.stack(sums) == rr.size()).all()
    assert float(counter) == 8 * 2 * rr.size()
    assert len({digest(model.get_weights()) for model in models}) == 1
    return digest(models[0].get_weights())


@on_ranks(2)
def test_an_accumulated_infinity_is_forgotten_after_its_update():
    inputs, targets = rows(data(6, 4, seed=2), 4)
    if rr.rank() == 0:
        inputs[4:8] = 1000.0
    model = make_model(Spike(), keras.layers.Dense(3))
    optimizer = rr.DistributedOptimizer(scaled(0.01, 4.0), accumulate_steps=2)
    fit(model, optimizer, (inputs, targets), 4, run_eagerly=True)
    assert is_finite(model)
    assert int(optimizer.iterations.numpy()) == 2
    assert float(optimizer.dynamic_scale.numpy()) == 2.0
    return digest(model.get_weights())


@on_ranks(2)
def test_accumulated_sparse_gradients_equal_the_whole_batch():
    keras.utils.set_random_seed(30)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(7, 2)])
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())
    index = np.arange(2 * rr.size() * 3).reshape(2, rr.size(), 3) % 5
    optimizer = rr.DistributedOptimizer(SGD(1.0), accumulate_steps=2)
    fit(model, optimizer, (index[:, rr.rank()], np.zeros((2, 3, 2))), 1, run_eagerly=True)
    rows = index.reshape(-1, 3)
    fit_alone(alone, SGD(1.0), (rows, np.zeros((len(rows), 3, 2))), len(rows))
    if rr.rank() == 0:
        assert difference(model, alone) < 1e-6
    return digest(model.get_weights())


@on_ranks(2)
def test_accumulation_by_the_inner_optimizer_is_refused_with_the_reason():
    inner = SGD(0.1, gradient_accumulation_steps=4)
    for optimizer in (inner, keras.optimizers.LossScaleOptimizer(inner)):
        with pytest.raises(ConfigError, match="accumulate_steps"):
            rr.DistributedOptimizer(optimizer)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@on_ranks(2)
def test_a_local_variable_is_each_ranks_own(accumulate_steps):
    """Its values, its gradients and the optimizer's state of it."""
    shared, local = (keras.Variable(np.full(3, float(rr.rank()))) for _ in range(2))
    optimizer = rr.DistributedOptimizer(
        SGD(1.0, momentum=0.5), accumulate_steps=accumulate_steps, local_variables=[local]
    )

    @tf.function
    def step(gradient):
        optimizer.apply([gradient, gradient], [shared, local])

    for factor in (1.0, 3.0):
        step(tf.fill((3,), factor * (rr.rank() + 1)))
    # Momentum adds half of the first step's gradient to the second's; accumulated, the mean is 2.
    moved = 1.0 + 0.5 + 3.0 if accumulate_steps == 1 else 2.0
    assert shared.numpy().tolist() == [-1.5 * moved] * 3
    assert local.numpy().tolist() == [rr.rank() - moved * (rr.rank() + 1)] * 3


def local_layer():
    """Train with callbacks that copy and compare weights; return those of both layers."""
    model = make_model()
    optimizer = rr.DistributedOptimizer(SGD(0.1, momentum=0.5))
    for variable in model.layers[0].trainable_variables:
        optimizer.register_local_var(variable)
        variable.assign(variable + rr.rank())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), rr.callbacks.VerifyReplicas(1)]
    fit(model, optimizer, rows(data(3, 4), 4), 4, callbacks=callbacks, run_eagerly=True)
    momenta = {v.path.rpartition("/")[2]: v.numpy().tobytes() for v in optimizer.variables}
    names = [f"{v.path.replace('/', '_')}_momentum" for v in model.layers[0].trainable_variables]
    local, shared = ([w.tobytes() for w in layer.get_weights()] for layer in model.layers)
    return [*local, *(momenta[name] for name in names)], shared


def test_callbacks_leave_local_variables_alone(ranks):
    (local, shared), (other_local, other_shared) = ranks(2, local_layer)
    assert shared == other_shared
    assert all(a != b for a, b in zip(local, other_local, strict=True))


@on_ranks(2)
def test_layers_in_eight_bits_are_refused():
    """The new value of a scale is from what one rank has seen."""
    model = make_model()
    for layer in model.layers:
        layer.quantize("float8")
    error = error_of(lambda: fit(model, rr.DistributedOptimizer(SGD(0.1)), rows(data(6, 4), 4), 4))
    assert "inputs_scale, a scale of 8-bit floats" in error["text"]


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


def dropout(run_eagerly):
    keras.utils.set_random_seed(11)
    layer = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(32), layer])
    if run_eagerly:
        rr.fold_seeds(model)
    optimizer = rr.DistributedOptimizer(SGD(0.1))
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=run_eagerly)
    model.fit(np.ones((4, 4)), np.ones((4, 32)), batch_size=2, verbose=0)
    state = layer.seed_generator.state.numpy().tolist()
    rr.fold_seeds(model)
    rr.broadcast_variables(model.variables, root_rank=0)
    # Neither folding again nor a copy of all variables makes the seeds of ranks equal again.
    assert layer.seed_generator.state.numpy().tolist()[0] == state[0]
    mask = layer(np.ones((1, 64)), training=True).numpy() != 0
    return state, mask.tolist(), digest(model.get_weights())


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_masks_of_dropout_differ_between_ranks_and_weights_do_not(ranks, run_eagerly):
    (state, mask, weights), (other_state, other_mask, other_weights) = ranks(
        2, dropout, run_eagerly
    )
    assert weights == other_weights
    assert state[0] != other_state[0]
    assert mask != other_mask


@pytest.mark.parametrize("steps", [1, 2])
@on_ranks(2)
def test_variables_that_are_applied_in_parts_begin_alike_and_have_steps_of_their_own(steps):
    first, second = (keras.Variable(np.full(2, float(rr.rank()))) for _ in range(2))
    inner = SGD(1.0)
    inner.build([first, second])
    optimizer = rr.DistributedOptimizer(inner, accumulate_steps=steps)
    for _ in range(4):
        optimizer.apply([tf.ones(2)], [first])
        optimizer.apply([tf.ones(2)], [second])
    for variable in (first, second):
        assert variable.numpy().tolist() == [-4.0 / steps] * 2


@on_ranks(2)
def test_ranks_that_exchange_other_things_get_a_mismatch():
    model = make_model()
    optimizer = rr.DistributedOptimizer(SGD(0.1))
    model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(MismatchError):
        optimizer.build(model.trainable_variables) if rr.rank() == 0 else rr.fold_seeds(model)
