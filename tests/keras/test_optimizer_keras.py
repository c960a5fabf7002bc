"""A wrapped optimizer, alone in its ring, does exactly what Keras promises of the plain one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers
from keras.optimizers import LossScaleOptimizer

import ringreduce
import ringreduce.keras as rr
from tests.models import (
    EAGERLY,
    INPUTS,
    MUON_TRAINS,
    TARGETS,
    assert_equal_state,
    fit,
    make_model,
)
from tests.scope import in_full

# New in Keras 3.14.
needs_multi_optimizer = pytest.mark.skipif(
    not hasattr(optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)


@pytest.fixture(autouse=True)
def _world_of_one():
    with ringreduce.init():
        yield
    ringreduce.shutdown()


def plain_and_wrapped(make):
    """Two optimizers whose variables have the same names."""
    # Without a collection: that looks at all that tests before have left.
    keras.backend.clear_session(free_memory=False)
    plain = make()
    keras.backend.clear_session(free_memory=False)
    return plain, rr.DistributedOptimizer(make())


def assert_same(make, use):
    """`use` returns the same, exactly, for the plain optimizer and for the wrapped one."""
    plain, wrapped = map(use, plain_and_wrapped(make))
    assert len(plain) == len(wrapped)
    for expected, actual in zip(plain, wrapped, strict=True):
        assert type(expected) is type(actual)
        np.testing.assert_array_equal(actual, expected)
    return wrapped


def values(*variables):
    return [np.array(v.numpy()) for v in variables]


def after_steps(*gradients, start=(1.0, 2.0, 3.0, 4.0), constraint=None):
    """A `use`: what a variable and the optimizer's own are after steps with these gradients."""

    def use(optimizer):
        variable = keras.Variable(np.array(start, "float32"), name="weights")
        variable.constraint = constraint
        for gradient in gradients:
            optimizer.apply([tf.constant(gradient)], [variable])
        return values(variable, *optimizer.variables)

    return use


STEP = [0.5, -1.0, 2.0, 100.0]

# Every class of an optimizer that updates variables by itself.
PLAIN = sorted(
    name
    for name, value in vars(optimizers).items()
    if isinstance(value, type)
    and issubclass(value, optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    and (name != "Muon" or MUON_TRAINS)
)


@pytest.mark.parametrize("name", PLAIN)
def test_every_optimizer_of_keras_updates_as_it_does_alone(name):
    def make():
        return getattr(optimizers, name)(learning_rate=0.125)

    before = np.array([1.0, 2.0, 3.0, 4.0])
    after = assert_same(make, after_steps(STEP, STEP, [1.0, 1.0, -1.0, 0.5]))
    assert (after[0] != before).any()


@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 1.0},
        {"clipvalue": 0.75},
        {"global_clipnorm": 1.0},
        {"weight_decay": 0.25},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 4.0},
    ],
    ids=lambda options: " ".join(options),
)
def test_each_option_of_an_optimizer_does_what_it_does_alone(options):
    def make(**some):
        return optimizers.SGD(0.5, momentum=0.5, **some)

    gradients = STEP, STEP, STEP
    with_it = assert_same(lambda: make(**options), after_steps(*gradients))
    without = after_steps(*gradients)(make())
    assert (with_it[0] != without[0]).any()


def test_iterations_are_counted():
    def use(optimizer):
        variable = keras.Variable(np.zeros(2, "float32"))
        counts = [int(optimizer.iterations)]
        for _ in range(3):
            returned = optimizer.apply_gradients([(tf.constant([1.0, 2.0]), variable)])
            counts += [int(optimizer.iterations), int(returned)]
        return np.array(counts)

    assert assert_same(lambda: optimizers.SGD(0.5), use).tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_no_gradient_at_all_is_the_error_of_keras():
    variables = [keras.Variable(np.zeros(2)), keras.Variable(np.zeros(3))]
    for optimizer in plain_and_wrapped(optimizers.Adam):
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            optimizer.apply([None, None], variables)


def test_a_missing_gradient_is_the_warning_of_keras():
    def use(optimizer):
        variables = [keras.Variable(np.ones(2), name=name) for name in ("used", "unused")]
        with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['unused'\]"):
            optimizer.apply([tf.constant([1.0, 2.0]), None], variables)
        return values(*variables, *optimizer.variables)

    assert assert_same(lambda: optimizers.Adam(0.5), use)[1].tolist() == [1.0, 1.0]


def test_an_empty_list_of_gradients_is_no_step():
    def use(optimizer):
        optimizer.apply([], [])
        return values(optimizer.iterations)

    assert assert_same(optimizers.SGD, use) == [0]


@pytest.mark.parametrize(
    ("gradients", "variables", "text"),
    [
        ([[1.0]], None, "must already be built"),
        ([[1.0], [2.0]], "built", "one-to-on"),
        ([[1.0]], "other", "Unknown variable"),
    ],
)
def test_wrong_calls_are_the_errors_of_keras(gradients, variables, text):
    for optimizer in plain_and_wrapped(optimizers.SGD):
        if variables:
            optimizer.build([keras.Variable(np.zeros(1))])
        given = [keras.Variable(np.zeros(1))] if variables == "other" else None
        with pytest.raises(ValueError, match=text):
            optimizer.apply([tf.constant(g) for g in gradients], given)


def test_gradients_for_only_some_variables_are_refused():
    variables = [keras.Variable(np.zeros(1)), keras.Variable(np.zeros(1))]
    optimizer = rr.DistributedOptimizer(optimizers.SGD(0.5))
    with pytest.raises(ringreduce.ConfigError, match="1 gradients for 2 variables"):
        optimizer.apply([tf.constant([1.0])], variables)


def test_gradients_alone_go_to_the_variables_it_was_built_for():
    def use(optimizer):
        variable = keras.Variable(np.array([1.0, 2.0], "float32"), name="weights")
        optimizer.build([variable])
        optimizer.apply([tf.constant([1.0, 1.0])])
        return values(variable)

    assert assert_same(lambda: optimizers.SGD(0.5), use)[0].tolist() == [0.5, 1.5]


def test_constraints_are_applied():
    after = assert_same(
        lambda: optimizers.SGD(1.0), after_steps(STEP, constraint=keras.constraints.NonNeg())
    )
    assert after[0].tolist() == [0.5, 3.0, 1.0, 0.0]


def test_variables_of_tensorflow_and_of_keras_are_mixed():
    def use(optimizer):
        variables = [tf.Variable([1.0, 2.0], name="a"), keras.Variable([3.0], name="b")]
        optimizer.apply([tf.constant([1.0, 1.0]), tf.constant([1.0])], variables)
        return values(*variables, *optimizer.variables)

    after = assert_same(lambda: optimizers.SGD(0.5), use)
    assert [v.tolist() for v in after[:2]] == [[0.5, 1.5], [2.5]]


def test_a_variable_that_its_gradient_overwrites():
    def use(optimizer):
        plain, overwritten = (keras.Variable([1.0, 2.0], name=name) for name in "ab")
        overwritten.overwrite_with_gradient = True
        for _ in range(2):
            optimizer.apply([tf.constant([1.0, 1.0])] * 2, [plain, overwritten])
        return values(plain, overwritten, *optimizer.variables)

    after = assert_same(lambda: optimizers.SGD(0.5, momentum=0.5), use)
    assert after[1].tolist() == [1.0, 1.0]


def test_excluding_variables_from_weight_decay():
    def use(optimizer):
        kernel, bias = (keras.Variable([1.0, 2.0], name=name) for name in ("kernel", "bias"))
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.apply([tf.constant([0.0, 0.0])] * 2, [kernel, bias])
        return values(kernel, bias)

    after = assert_same(lambda: optimizers.AdamW(0.5, weight_decay=0.5), use)
    assert [v.tolist() for v in after] == [[0.75, 1.5], [1.0, 2.0]]


def test_set_weights():
    def use(optimizer):
        variable = keras.Variable(np.array([1.0, 2.0], "float32"), name="weights")
        with pytest.raises(ValueError, match="not yet been built"):
            optimizer.set_weights([])
        optimizer.build([variable])
        optimizer.set_weights([np.array(5), np.array(0.5), np.array([4.0, 8.0], "float32")])
        optimizer.apply([tf.constant([1.0, 1.0])], [variable])
        return values(variable, *optimizer.variables)

    after = assert_same(lambda: optimizers.SGD(0.25, momentum=0.5), use)
    assert after[1] == 6
    assert after[0].tolist() == [2.5, 5.5]


def test_variables_have_the_names_that_they_have_alone():
    def use(optimizer):
        optimizer.build(make_model().trainable_variables)
        return np.array([v.path for v in optimizer.variables])

    def make():
        return LossScaleOptimizer(optimizers.Adam(0.5))

    assert "kernel_momentum" in assert_same(make, use)[6]


# Learning rates.


def test_a_learning_rate_that_is_a_function():
    def use(optimizer):
        rates = [float(optimizer.learning_rate)]
        optimizer.learning_rate = lambda: 0.25
        rates.append(float(optimizer.learning_rate))
        return [*values(*optimizer.variables), *rates, *after_steps(STEP)(optimizer)]

    after = assert_same(lambda: optimizers.SGD(lambda: 0.5), use)
    assert after[1:3] == [0.5, 0.25]


def test_a_function_in_place_of_a_number_gives_up_the_variable():
    def use(optimizer):
        before = len(optimizer.variables)
        optimizer.learning_rate = lambda: 0.25
        return np.array([before, len(optimizer.variables)])

    assert assert_same(lambda: optimizers.SGD(0.5), use).tolist() == [2, 1]


def test_a_schedule_follows_the_steps():
    def make():
        return optimizers.SGD(optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))

    after = assert_same(make, after_steps([1.0], [1.0], start=[4.0]))
    assert after[0].tolist() == [3.25]


def test_learning_rate_scheduler():
    def use(optimizer):
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        model = fit(make_model(), optimizer, compile=EAGERLY, epochs=2, callbacks=[scheduler])
        return [*model.get_weights(), np.array(model.history_seen["learning_rate"])]

    after = assert_same(lambda: optimizers.SGD(0.5), use)
    assert after[-1].tolist() == [0.25, 0.125]


# Moving averages of weights.


@pytest.mark.full
@pytest.mark.parametrize("frequency", [2, None])
def test_moving_averages_end_in_the_model(frequency):
    def make():
        return optimizers.Adam(
            0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=frequency
        )

    plain, wrapped = (fit(make_model(), o, compile=EAGERLY) for o in plain_and_wrapped(make))
    assert_equal_state(plain, wrapped)
    average = wrapped.optimizer._model_variables_moving_average[0]
    assert (average.numpy() == wrapped.trainable_variables[0].numpy()).all()


def with_averages():
    return optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)


def two_optimizers():
    mapping = {"(.*/)?first/.*": optimizers.Adam(0.1, use_ema=True)}
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.SGD(0.5, momentum=0.5), mapping)
    )


WITH_AVERAGES = [
    pytest.param(with_averages, id="plain", marks=pytest.mark.full),
    pytest.param(two_optimizers, id="several", marks=[needs_multi_optimizer, pytest.mark.full]),
    pytest.param(
        lambda: LossScaleOptimizer(two_optimizers()),
        id="loss scale of several",
        marks=needs_multi_optimizer,
    ),
]


@pytest.mark.parametrize("swap_on_epoch", [True, in_full(False)])
@pytest.mark.parametrize("make", WITH_AVERAGES)
def test_swapping_averages_in(make, swap_on_epoch):
    def use(optimizer):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
        validation = (INPUTS[::2], TARGETS[::2])
        options = {"epochs": 2, "callbacks": [swap], "validation_data": validation}
        model = fit(make_model(), optimizer, compile=EAGERLY, **options)
        return [
            *model.get_weights(),
            *values(*optimizer.variables),
            *(np.array(model.history_seen[name]) for name in ("loss", "val_loss")),
        ]

    assert_same(make, use)


def test_swapping_averages_that_are_not_kept_is_the_error_of_keras():
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    optimizer = rr.DistributedOptimizer(optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="use_ema=True"):
        fit(make_model(), optimizer, compile=EAGERLY, callbacks=[swap])


# Loss scaling.


def test_a_loss_scale_goes_up_and_down():
    gradients = [[value] for value in (8.0, np.nan, 8.0, 8.0, np.inf)]

    def make():
        return LossScaleOptimizer(
            optimizers.SGD(0.5, momentum=0.5), initial_scale=8.0, dynamic_growth_steps=2
        )

    def use(optimizer):
        scales = [np.array(optimizer.scale_loss(2.0))]
        after = after_steps(*gradients, start=[1.0])(optimizer)
        scales += [np.array(optimizer.scale_loss(2.0)), optimizer.dynamic_scale.numpy()]
        return [*after, *scales, optimizer.iterations.numpy()]

    assert_same(make, use)


def test_a_static_loss_scale():
    def use(optimizer):
        scaled = np.array(optimizer.scale_loss(tf.constant(3.0)))
        return [scaled, *after_steps([4.0], start=[1.0])(optimizer)]

    after = assert_same(lambda: optimizers.SGD(0.5, loss_scale_factor=4.0), use)
    assert (after[0], after[1].tolist()) == (12.0, [0.5])


@pytest.mark.parametrize(
    "inner",
    [
        in_full(lambda: optimizers.Adam(0.1)),
        pytest.param(two_optimizers, marks=needs_multi_optimizer),
    ],
    ids=["one", "several"],
)
def test_training_with_a_loss_scale_in_a_graph(inner):
    def make():
        return LossScaleOptimizer(inner(), initial_scale=4.0, dynamic_growth_steps=2)

    models = [fit(make_model(), o) for o in plain_and_wrapped(make)]
    assert_equal_state(*models)
    names = [[v.path for v in model.optimizer.variables] for model in models]
    assert names[0] == names[1]


# Several optimizers, by variable.


@needs_multi_optimizer
def test_callbacks_reach_the_rates_of_several_optimizers():
    def use(optimizer):
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=9.0)
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.75)
        model = fit(
            make_model(), optimizer, compile=EAGERLY, epochs=2, callbacks=[scheduler, plateau]
        )
        return [
            *model.get_weights(),
            np.array([float(o.learning_rate) for o in optimizer.optimizers]),
        ]

    *_, rates = assert_same(two_optimizers, use)
    assert (rates < [0.1, 0.5]).all()


@needs_multi_optimizer
def test_several_optimizers_have_no_common_rate():
    optimizer = rr.DistributedOptimizer(two_optimizers())
    with pytest.raises(AttributeError, match="cannot be accessed on a MultiOptimizer"):
        _ = optimizer.learning_rate
    with pytest.raises(AttributeError, match="cannot be set on a MultiOptimizer"):
        optimizer.learning_rate = 0.5


# Attributes.


def test_options_are_read_and_written_through():
    inner = optimizers.Adam(0.5, clipnorm=0.25, use_ema=True, name="mine")
    optimizer = rr.DistributedOptimizer(inner)
    assert (optimizer.clipnorm, optimizer.use_ema, optimizer.name) == (0.25, True, "mine")
    optimizer.clipnorm, optimizer.beta_1 = 0.75, 0.5
    assert (inner.clipnorm, inner.beta_1) == (0.75, 0.5)
    assert "clipnorm" not in vars(optimizer)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_an_attribute_of_the_users_own_stays_on_the_wrapper():
    inner = optimizers.SGD(0.5)
    optimizer = rr.DistributedOptimizer(inner)
    optimizer.remark = "mine"
    assert optimizer.remark == "mine"
    assert not hasattr(inner, "remark")


def test_variables_are_added_to_the_inner_optimizer():
    inner = optimizers.SGD(0.5)
    optimizer = rr.DistributedOptimizer(inner)
    reference = keras.Variable(np.zeros(3), name="weights")
    added = [
        optimizer.add_variable((), name="extra"),
        optimizer.add_variable_from_reference(reference, "more"),
        *optimizer.add_optimizer_variables([reference], "most"),
    ]
    assert [any(v is w for w in inner.variables) for v in added] == [True] * 3


def test_weights_decay_as_an_optimizer_decays_them_itself():
    """Muon asks in there what only it knows."""
    kernel = keras.Variable(np.ones((2, 2)), name="kernel")
    optimizer = rr.DistributedOptimizer(optimizers.Muon(0.5, weight_decay=0.25))
    optimizer.build([kernel])
    optimizer._apply_weight_decay([kernel])
    assert kernel.numpy().tolist() == [[0.875, 0.875], [0.875, 0.875]]


def test_repr_names_both():
    text = repr(rr.DistributedOptimizer(optimizers.SGD(0.5)))
    assert text.startswith("<DistributedOptimizer of <keras.")
    assert "SGD" in text


def test_the_class_makes_another_one_from_its_config_which_is_the_inner_one():
    inner = optimizers.SGD(0.5, momentum=0.25, name="mine")
    optimizer = rr.DistributedOptimizer(inner)
    assert optimizer.get_config() == inner.get_config()
    again = type(optimizer).from_config(optimizer.get_config())
    assert isinstance(again, rr.DistributedOptimizer)
    assert type(again.inner_optimizer) is optimizers.SGD
    assert again.get_config() == optimizer.get_config()


def test_inner_optimizer_is_below_a_loss_scale_as_in_keras():
    scaled = LossScaleOptimizer(optimizers.SGD(0.5), initial_scale=8.0)
    optimizer = rr.DistributedOptimizer(scaled)
    assert optimizer.inner_optimizer is scaled.inner_optimizer
    assert optimizer.initial_scale == 8.0


# Of what Keras's base class offers, what works on the wrapper as it is: it only calls the rest, or
# only the variables that it is given.
WITHOUT_STATE = {"assign", "assign_add", "assign_sub"}


def test_everything_else_that_keras_offers_is_forwarded():
    """Until it is forwarded, an addition of Keras's would act on the wrapper's base."""
    offered = {name for name in dir(optimizers.Optimizer) if not name.startswith("_")}
    ours = rr.DistributedOptimizer.__mro__[:2]
    forwarded = {name for name in offered if any(name in vars(one) for one in ours)}
    assert offered - forwarded - WITHOUT_STATE == set()
