"""The wrapper in one process and on rings of threads: calls, options and local variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD, LossScaleOptimizer, schedules

import ringreduce
import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce import ConfigError
from ringreduce.keras.callbacks.metric_average import MetricAverage
from ringreduce.testing import ring_of_threads
from tests.models import EAGERLY, fit, make_model
from tests.scope import in_full

without_data_warnings = pytest.mark.filterwarnings("ignore::ringreduce.keras.DataWarning")
needs_several = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has no MultiOptimizer yet"
)


def wrapped(inner=None, communicator=None, **options):
    return rr.DistributedOptimizer(inner or SGD(0.5), communicator, **options)


def test_it_is_a_keras_optimizer_without_variables_of_its_own(world_of_one):
    inner = keras.optimizers.Adam(0.1)
    optimizer = wrapped(inner)
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    assert isinstance(optimizer, rr.DistributedOptimizer)
    assert keras.optimizers.get(optimizer) is optimizer
    assert optimizer.inner_optimizer is inner
    assert optimizer._variables is inner._variables
    optimizer.build(make_model().trainable_variables)
    assert all(v is w for v, w in zip(optimizer.variables, inner.variables, strict=True))
    assert optimizer.built
    assert inner.built


def test_learning_rate_is_that_of_the_inner_one(world_of_one):
    optimizer = wrapped()
    optimizer.learning_rate = 0.125
    assert float(optimizer.inner_optimizer.learning_rate) == 0.125
    assert float(optimizer.learning_rate) == 0.125
    scheduled = wrapped(SGD(schedules.ExponentialDecay(0.1, 1, 0.5)))
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        scheduled.learning_rate = 0.5


class Halved(SGD):
    """A user's own class, which overrides what Keras's training step calls."""

    def apply_gradients(self, grads_and_vars):
        super().apply_gradients([(gradient / 2, variable) for gradient, variable in grads_and_vars])


def test_apply_gradients_of_ones_own_is_called_in_a_graph(world_of_one):
    plain = fit(make_model(), Halved(0.1), compile=EAGERLY)
    model = fit(make_model(), wrapped(Halved(0.1)))
    for expected, actual in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


NOISE = {
    "own": lambda optimizer, shape: keras.random.normal(shape, seed=optimizer.seed),
    "of keras": lambda optimizer, shape: keras.random.normal(shape),
    "of tensorflow": lambda optimizer, shape: tf.random.normal(shape),
    "by step": lambda optimizer, shape: tf.random.stateless_normal(
        shape, [1, tf.cast(optimizer.iterations, "int32")]
    ),
}


class Noisy(SGD):
    """Each rank may draw other noise."""

    def __init__(self, source):
        super().__init__(0.5)
        self.source = source
        if source == "own":
            self.seed = keras.random.SeedGenerator()

    def update_step(self, gradient, variable, learning_rate):
        noise = NOISE[self.source](self, variable.shape)
        super().update_step(gradient + noise, variable, learning_rate)


def of_two_noisy_ranks(inner, strategy=None, is_eager=True, callbacks=lambda comm: []):
    """Each rank's weights after two epochs, or its error's text."""

    def work(comm):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = wrapped(inner(), comm, strategy=strategy)
        model.compile(optimizer, loss="mse", run_eagerly=is_eager)
        optimizer.build(model.trainable_variables)
        x, y = np.ones((2, 2), "float32"), np.ones((2, 1), "float32")
        try:
            history = model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks(comm))
        except ConfigError as error:
            return f"{error} after {optimizer.iterations.numpy()} epochs"
        assert len(history.epoch) == 2
        return [weight.tolist() for weight in model.get_weights()]

    return ring_of_threads(2, work)


@without_data_warnings
@pytest.mark.parametrize(
    ("source", "is_eager"),
    [("own", False), ("by step", True), in_full("own", True), in_full("by step", False)],
)
def test_noise_of_an_optimizer_is_equal_on_all_ranks(source, is_eager):
    first, second = of_two_noisy_ranks(lambda: Noisy(source), is_eager=is_eager)
    assert not isinstance(first, str), first
    assert first == second


@without_data_warnings
def test_noise_that_differs_between_ranks_is_named_when_training_or_an_epoch_ends():
    def scaled():
        return LossScaleOptimizer(Noisy("of tensorflow"))

    of_keras = of_two_noisy_ranks(lambda: Noisy("of keras"))
    checked = of_two_noisy_ranks(scaled, callbacks=lambda comm: [MetricAverage(comm)])
    for texts, epochs in ((of_keras, 2), (checked, 1)):
        for text in texts:
            assert "weights have gone apart, which Noisy updates" in text
            assert "self.seed = keras.random.SeedGenerator(1)" in text
            assert text.endswith(f"after {epochs} epochs")


@without_data_warnings
def test_ranks_that_step_alone_may_draw_other_noise():
    first, second = of_two_noisy_ranks(lambda: Noisy("of tensorflow"), rr.LocalSGD(2))
    assert first == second, "after a meeting"


class Around(SGD):
    """A user's own, with others in attributes."""

    def __init__(self, **held):
        super().__init__(0.5)
        vars(self).update(held)


@pytest.mark.parametrize(
    "around",
    [
        lambda once: once,
        lambda once: Around(slow=once),
        lambda once: LossScaleOptimizer(Around(those=[once])),
        lambda once: Around(those={"a": once}),
        *(
            pytest.param(around, marks=needs_several)
            for around in (
                lambda once: keras.optimizers.MultiOptimizer(once),
                lambda once: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(once)),
            )
        ),
    ],
)
def test_wrapping_twice_is_refused_also_with_something_in_between(around):
    once = wrapped()
    with pytest.raises(ConfigError, match="already distributed"):
        wrapped(around(once))


@needs_several
def test_wrapping_twice_is_refused_where_it_shows_only_later(world_of_one):
    optimizer = wrapped(keras.optimizers.MultiOptimizer(lambda variable: wrapped()))
    with pytest.raises(ConfigError, match="already distributed"):
        optimizer.build(make_model().trainable_variables)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        *(
            case
            for bad in ("adam", None, keras.layers.Dense(1))
            for case in (
                (lambda bad=bad: rr.DistributedOptimizer(bad), "no Keras 3 optimizer"),
                (lambda bad=bad: wrapped(local_variables=[bad]), "local variable"),
            )
        ),
        (lambda: wrapped(op="max"), "op is 'max'; accepted .*: mean, sum"),
        (lambda: wrapped(gradient_accumulation_steps=0), "0"),
        (lambda: wrapped(bucket_bytes=0), "0"),
        *(
            (lambda wrap=wrap: wrapped(wrap(SGD(gradient_accumulation_steps=4))), "pass it to Dist")
            for wrap in (lambda inner: inner, LossScaleOptimizer)
        ),
        (lambda: wrapped(check_numerics="always"), "always"),
        (lambda: wrapped().stateless_apply([], [], []), r"stateless_apply.*Call apply"),
        (
            lambda: type("Careful", (LossScaleOptimizer,), {})(wrapped()),
            r"DistributedOptimizer\(Careful",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()


def test_training_before_init_says_what_to_do():
    assert not ringreduce.is_initialized()
    with pytest.raises(ringreduce.ClosedError, match=r"ringreduce.init\(\)"):
        fit(make_model(), wrapped())


def test_tuples_of_unknown_number_and_endless_data_are_sharded():
    """Others are in test_data."""
    pairs = tf.data.Dataset.from_tensor_slices((np.arange(5), np.arange(5) * 2))
    some, endless = pairs.filter(lambda x, y: True), tf.data.Dataset.range(4).repeat()

    def work(comm):
        first = [int(number) for number in rr.shard(endless, comm).take(4)]
        return [int(y) for _, y in rr.shard(some, comm)], first

    assert ring_of_threads(2, work) == [([0, 4], [0, 2, 0, 2]), ([2, 6], [1, 3, 1, 3])]


def test_models_of_different_shape_are_an_error_that_names_the_variable():
    def work(comm):
        variable = keras.Variable(np.zeros(3 + comm.rank), name="gamma")
        rr.broadcast_variables([variable], communicator=comm)

    with pytest.raises(ringreduce.MismatchError, match=r"gamma: float64 of shape \(3,\)"):
        ring_of_threads(2, work)


@pytest.mark.parametrize(("options", "count"), [({}, 0), ({"check_numerics": "warn"}, 2)])
def test_a_gradient_that_is_no_number_is_reported_if_asked(options, count, caplog):
    def work(comm):
        variable = tf.Variable([1.0, 2.0], name="weights")
        wrapped(None, comm, **options).apply([tf.constant([0.0, np.nan])], [variable])

    ring_of_threads(2, work)
    assert caplog.text.count("nan at [1] of weights") == count


def test_local_variables_are_known_to_what_a_loss_scale_makes_of_it():
    optimizer = wrapped()
    scaled = LossScaleOptimizer(optimizer)
    variable = make_model().trainable_variables[0]
    optimizer.register_local_var(variable)
    assert variable in scaled._local


def trained_with_local(optimizer, other=None):
    """Train a model, of which a variable is local, or another one with this value."""
    model = make_model()
    optimizer.register_local_var(keras.Variable(other) if other else model.trainable_variables[0])
    return fit(model, optimizer, compile=EAGERLY)


@pytest.mark.parametrize(
    ("inner", "other", "text"),
    [
        (lambda: SGD(0.5, global_clipnorm=1.0), None, "global_clipnorm"),
        (lambda: LossScaleOptimizer(SGD(0.5)), None, "loss scale"),
        (lambda: Halved(0.5), None, "its own apply_gradients"),
        (lambda: SGD(0.5), [1.0], "not trained"),
    ],
)
def test_local_variables_need_gradients_of_their_own(world_of_one, inner, other, text):
    with pytest.raises(ConfigError, match=text):
        trained_with_local(wrapped(inner()), other)


def test_a_local_variable_comes_too_late_after_the_first_step(world_of_one):
    optimizer = wrapped()
    model = trained_with_local(optimizer)
    with pytest.raises(ConfigError, match="after the first step"):
        optimizer.register_local_var(model.trainable_variables[1])


def test_a_local_variable_may_be_the_one_in_a_variable_of_keras(world_of_one):
    optimizer, variable = wrapped(), make_model().trainable_variables[0]
    optimizer.register_local_var(variable.value)
    optimizer.build([variable])
    assert optimizer.shared([variable]) == []


def test_local_variables_may_have_other_names_and_numbers_on_each_rank():
    def work(comm):
        shared = keras.Variable([1.0], name="shared")
        local = [keras.Variable([0.0], name=f"expert_{'ab'[comm.rank]}") for _ in range(comm.rank)]
        optimizer = wrapped(SGD(1.0), comm, local_variables=[*local])
        optimizer.apply([[comm.rank + 1.0]] * (1 + comm.rank), [*local, shared])
        return [float(variable.numpy()[0]) for variable in (*local, shared)]

    assert ring_of_threads(2, work) == [[-0.5], [-2.0, -0.5]]


def test_fit_over_other_ranks_than_the_optimizers_is_refused():
    def work(comm):
        model = make_model()
        model.compile(optimizer=wrapped(None, comm.split(comm.rank)), loss="mse")
        with pytest.raises(ConfigError, match=r"averages over 1 of them.* to rr\.fit"):
            rr.fit(model, np.ones((4, 3)), np.ones((4, 1)), communicator=comm)

    ring_of_threads(2, work)


@without_data_warnings
def test_layers_with_local_variables_may_be_configured_differently():
    def work(comm):
        expert = keras.layers.Dense(1, "relu" if comm.rank else "tanh", use_bias=False)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), expert])
        optimizer = wrapped(None, comm, local_variables=expert.trainable_variables)
        model.compile(optimizer, loss="mse", run_eagerly=True)
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
        return [variable.numpy().tolist() for variable in model.layers[0].trainable_variables]

    first, second = ring_of_threads(2, work)
    assert first == second


def test_names_and_options_of_horovods_that_are_not_there_say_what_is():
    for name, word in (("allreduce", "keras.horovod, which has it"), ("Adasum", "none")):
        with pytest.raises(AttributeError, match=word):
            getattr(rr, name)
    for option, word in (
        ("backward_passes_per_step", "gradient_accumulation_steps"),
        ("no_such", "no_such"),
    ):
        with pytest.raises(TypeError, match=word):
            wrapped(**{option: 2})


HOROVODS_OPTIONS = {
    **dict.fromkeys(("device_dense", "device_sparse"), ""),
    **dict.fromkeys(("sparse_as_dense", "scale_local_gradients"), False),
    "compression": hvd.Compression.none,
    "gradient_predivide_factor": 1.0,
    "op": hvd.Average,
    "num_groups": 0,
    "groups": None,
    "process_set": hvd.global_process_set,
}


def test_horovods_options_are_accepted_where_they_mean_what_is_done():
    passes = {"backward_passes_per_step": 1, "average_aggregated_gradients": False}
    assert hvd.DistributedOptimizer(SGD(), name="D", **passes, **HOROVODS_OPTIONS).inner_optimizer
    assert hvd.DistributedOptimizer(SGD(), "D", average_aggregated_gradients=True)
    assert hvd.DistributedGradientTape(tf.GradientTape(), **HOROVODS_OPTIONS)


def test_horovods_passes_are_accumulated_as_a_mean():
    passes = {"backward_passes_per_step": 3}
    with pytest.raises(ConfigError, match="multiply the learning rate by"):
        hvd.DistributedOptimizer(SGD(), **passes)
    made = hvd.DistributedOptimizer(SGD(), average_aggregated_gradients=True, **passes)
    assert made.settings()[0].found["strategy.steps"] == "3"


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ({"groups": 2}, "got groups=2. Leave it out, or use bucket_bytes"),
        ({"gradient_predivide_factor": 2.0}, "got gradient_predivide_factor=2.0. Leave it out"),
        ({"device_dense": "/gpu:0"}, "got device_dense='/gpu:0'. Leave it out"),
    ],
)
@pytest.mark.parametrize("make", [hvd.DistributedOptimizer, hvd.DistributedGradientTape])
def test_other_values_of_horovods_options_say_what_to_do(make, option, advice):
    with pytest.raises(ConfigError, match=advice):
        make(None, **option)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_horovods_factors_are_not_rounded_to_half(world_of_one, dtype):
    value, factor = tf.cast(tf.range(1, 128), dtype), 0.3
    expected = tf.cast(tf.cast(value, tf.float32) * factor, dtype).numpy().tolist()
    assert expected != (value * tf.cast(factor, dtype)).numpy().tolist()
    for reduce in (hvd.allreduce, hvd.reducescatter):
        for name in ("prescale_factor", "postscale_factor"):
            assert reduce(value, **{name: factor}).numpy().tolist() == expected


def test_horovods_old_argument_means_what_it_meant(world_of_one):
    value = tf.constant([2.0])
    for average in (True, False):
        assert hvd.allreduce(value, average=average).numpy().tolist() == [2.0]
    with pytest.raises(ConfigError, match=r"average=False and op=.*Pass op alone"):
        hvd.allreduce(value, average=False, op=hvd.Sum)
