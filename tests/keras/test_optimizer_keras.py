"""A wrapped optimizer, alone in its ring, does exactly what Keras promises of the plain one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers
from keras.optimizers import SGD, Adam, LossScaleOptimizer

import ringreduce
import ringreduce.keras as rr
from tests.models import EAGERLY, INPUTS, MUON_TRAINS, TARGETS, assert_equal_state, fit, make_model
from tests.scope import in_full

pytestmark = pytest.mark.usefixtures("world_of_one")
# New in Keras 3.14.
needs_multi_optimizer = pytest.mark.skipif(
    not hasattr(optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
ONES = [1.0, 1.0]


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


def variable(*start, name="weights"):
    return keras.Variable(np.array(start, "float32"), name=name)


def apply(optimizer, variables, *gradients):
    """Make a step with these gradients; return the values of variables and of the optimizer's."""
    optimizer.apply([g if g is None else tf.constant(g) for g in gradients], variables)
    return values(*variables, *optimizer.variables)


def after_steps(*gradients, start=(1.0, 2.0, 3.0, 4.0), constraint=None):
    """A `use`: what a variable and the optimizer's own are after steps with these gradients."""

    def use(optimizer):
        weights = variable(*start)
        weights.constraint = constraint
        return [apply(optimizer, [weights], gradient) for gradient in gradients][-1]

    return use


def after_fit(*names, callbacks=lambda: [], **options):
    """A `use`: weights, the optimizer's variables and some of the history after training."""

    def use(optimizer):
        how = {"compile": EAGERLY, "callbacks": callbacks(), **options}
        model = fit(make_model(), optimizer, **how)
        history = [np.array(model.history_seen[name]) for name in names]
        return [*model.get_weights(), *values(*optimizer.variables), *history]

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

    after = assert_same(make, after_steps(STEP, STEP, [1.0, 1.0, -1.0, 0.5]))
    assert after[0].tolist() != [1.0, 2.0, 3.0, 4.0]


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
)
def test_each_option_of_an_optimizer_does_what_it_does_alone(options):
    def make(**some):
        return SGD(0.5, momentum=0.5, **some)

    use = after_steps(STEP, STEP, STEP)
    assert (assert_same(lambda: make(**options), use)[0] != use(make())[0]).any()


def test_iterations_are_counted():
    def use(optimizer):
        weights = variable(0, 0)
        counts = [int(optimizer.iterations)]
        for _ in range(3):
            returned = optimizer.apply_gradients([(tf.constant([1.0, 2.0]), weights)])
            counts += [int(optimizer.iterations), int(returned)]
        return np.array(counts)

    assert assert_same(lambda: SGD(0.5), use).tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_a_missing_gradient_is_the_warning_of_keras():
    def use(optimizer):
        variables = [variable(1, 1, name=name) for name in ("used", "unused")]
        with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['unused'\]"):
            return apply(optimizer, variables, [1.0, 2.0], None)

    assert assert_same(lambda: Adam(0.5), use)[1].tolist() == ONES


def test_an_empty_list_of_gradients_is_no_step():
    assert assert_same(SGD, lambda optimizer: apply(optimizer, [])[:1]) == [0]


@pytest.mark.parametrize(
    ("gradients", "variables", "text"),
    [
        ([[1.0]], None, "must already be built"),
        ([[1.0], [2.0]], "built", "one-to-on"),
        ([[1.0]], "other", "Unknown variable"),
        ([None], "built", "No gradients provided for any variable"),
    ],
)
def test_wrong_calls_are_the_errors_of_keras(gradients, variables, text):
    for optimizer in plain_and_wrapped(SGD):
        if variables:
            optimizer.build([variable(0)])
        others = [variable(0)] if variables == "other" else None
        with pytest.raises(ValueError, match=text):
            apply(optimizer, others, *gradients)


def test_gradients_for_only_some_variables_are_refused():
    with pytest.raises(ringreduce.ConfigError, match="1 gradients for 2 variables"):
        apply(rr.DistributedOptimizer(SGD(0.5)), [variable(0), variable(0)], [1.0])


def test_gradients_alone_go_to_the_variables_it_was_built_for():
    def use(optimizer):
        weights = variable(1, 2)
        optimizer.build([weights])
        optimizer.apply([tf.constant(ONES)])
        return values(weights)

    assert assert_same(lambda: SGD(0.5), use)[0].tolist() == [0.5, 1.5]


def test_constraints_are_applied():
    use = after_steps(STEP, constraint=keras.constraints.NonNeg())
    assert assert_same(lambda: SGD(1.0), use)[0].tolist() == [0.5, 3.0, 1.0, 0.0]


def test_variables_of_tensorflow_and_of_keras_are_mixed():
    def use(optimizer):
        return apply(optimizer, [tf.Variable([1.0, 2.0], name="a"), variable(3)], ONES, [1.0])

    after = assert_same(lambda: SGD(0.5), use)
    assert [v.tolist() for v in after[:2]] == [[0.5, 1.5], [2.5]]


def test_a_variable_that_its_gradient_overwrites():
    def use(optimizer):
        variables = [variable(1, 2, name=name) for name in "ab"]
        variables[1].overwrite_with_gradient = True
        return [apply(optimizer, variables, ONES, ONES) for _ in range(2)][-1]

    assert assert_same(lambda: SGD(0.5, momentum=0.5), use)[1].tolist() == ONES


def test_excluding_variables_from_weight_decay():
    def use(optimizer):
        variables = [variable(1, 2, name=name) for name in ("kernel", "bias")]
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return apply(optimizer, variables, [0.0, 0.0], [0.0, 0.0])[:2]

    after = assert_same(lambda: optimizers.AdamW(0.5, weight_decay=0.5), use)
    assert [v.tolist() for v in after] == [[0.75, 1.5], [1.0, 2.0]]


def test_set_weights():
    def use(optimizer):
        weights = variable(1, 2)
        with pytest.raises(ValueError, match="not yet been built"):
            optimizer.set_weights([])
        optimizer.build([weights])
        optimizer.set_weights([np.array(5), np.array(0.5), np.array([4.0, 8.0], "float32")])
        return apply(optimizer, [weights], ONES)

    after = assert_same(lambda: SGD(0.25, momentum=0.5), use)
    assert after[1] == 6
    assert after[0].tolist() == [2.5, 5.5]


def test_variables_have_the_names_that_they_have_alone():
    def use(optimizer):
        optimizer.build(make_model().trainable_variables)
        return np.array([v.path for v in optimizer.variables])

    assert "kernel_momentum" in assert_same(lambda: LossScaleOptimizer(Adam(0.5)), use)[6]


@pytest.mark.parametrize(("rate", "counts"), [(lambda: 0.5, [1, 1]), (0.5, [2, 1])])
def test_a_learning_rate_that_is_a_function_has_no_variable(rate, counts):
    def use(optimizer):
        rates, variables = [float(optimizer.learning_rate)], [len(optimizer.variables)]
        optimizer.learning_rate = lambda: 0.25
        rates.append(float(optimizer.learning_rate))
        variables.append(len(optimizer.variables))
        return [rates, variables, *after_steps(STEP)(optimizer)]

    assert assert_same(lambda: SGD(rate), use)[:2] == [[0.5, 0.25], counts]


def test_a_schedule_follows_the_steps():
    def make():
        return SGD(optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))

    after = assert_same(make, after_steps([1.0], [1.0], start=[4.0]))
    assert after[0].tolist() == [3.25]


def halving_rate():
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]


def test_learning_rate_scheduler():
    use = after_fit("learning_rate", epochs=2, callbacks=halving_rate)
    assert assert_same(lambda: SGD(0.5), use)[-1].tolist() == [0.25, 0.125]


@pytest.mark.full
@pytest.mark.parametrize("frequency", [2, None])
def test_moving_averages_end_in_the_model(frequency):
    def make():
        return Adam(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=frequency)

    plain, wrapped = (fit(make_model(), o, compile=EAGERLY) for o in plain_and_wrapped(make))
    assert_equal_state(plain, wrapped)
    average = wrapped.optimizer._model_variables_moving_average[0]
    assert (average.numpy() == wrapped.trainable_variables[0].numpy()).all()


def two_optimizers():
    mapping = {"(.*/)?first/.*": Adam(0.1, use_ema=True)}
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(SGD(0.5, momentum=0.5), mapping))


@pytest.mark.parametrize("swap_on_epoch", [True, in_full(False)])
@pytest.mark.parametrize(
    "make",
    [
        in_full(lambda: SGD(0.1, use_ema=True, ema_momentum=0.5)),
        pytest.param(two_optimizers, marks=[needs_multi_optimizer, pytest.mark.full]),
        pytest.param(lambda: LossScaleOptimizer(two_optimizers()), marks=needs_multi_optimizer),
    ],
)
def test_swapping_averages_in(make, swap_on_epoch):
    def callbacks():
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)]

    options = {"epochs": 2, "validation_data": (INPUTS[::2], TARGETS[::2])}
    assert_same(make, after_fit("loss", "val_loss", callbacks=callbacks, **options))


def test_swapping_averages_that_are_not_kept_is_the_error_of_keras():
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    optimizer = rr.DistributedOptimizer(SGD(0.1))
    with pytest.raises(ValueError, match="use_ema=True"):
        fit(make_model(), optimizer, compile=EAGERLY, callbacks=[swap])


def test_a_loss_scale_goes_up_and_down():
    gradients = [[value] for value in (8.0, np.nan, 8.0, 8.0, np.inf)]

    def make():
        return LossScaleOptimizer(SGD(0.5, momentum=0.5), initial_scale=8.0, dynamic_growth_steps=2)

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

    after = assert_same(lambda: SGD(0.5, loss_scale_factor=4.0), use)
    assert (after[0], after[1].tolist()) == (12.0, [0.5])


@pytest.mark.parametrize(
    "inner", [in_full(lambda: Adam(0.1)), pytest.param(two_optimizers, marks=needs_multi_optimizer)]
)
def test_training_with_a_loss_scale_in_a_graph(inner):
    def make():
        return LossScaleOptimizer(inner(), initial_scale=4.0, dynamic_growth_steps=2)

    models = [fit(make_model(), o) for o in plain_and_wrapped(make)]
    assert_equal_state(*models)
    names = [[v.path for v in model.optimizer.variables] for model in models]
    assert names[0] == names[1]


def test_training_with_a_loss_scale_that_does_not_change():
    assert_same(lambda: SGD(0.1, loss_scale_factor=8.0), after_fit("loss"))


@needs_multi_optimizer
def test_callbacks_reach_the_rates_of_several_optimizers():
    def callbacks():
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=9.0)
        return [*halving_rate(), plateau]

    def use(optimizer):
        after = after_fit(epochs=2, callbacks=callbacks)(optimizer)
        return [*after, np.array([float(o.learning_rate) for o in optimizer.optimizers])]

    *_, rates = assert_same(two_optimizers, use)
    assert (rates < [0.1, 0.5]).all()


@needs_multi_optimizer
def test_several_optimizers_have_no_common_rate():
    optimizer = rr.DistributedOptimizer(two_optimizers())
    with pytest.raises(AttributeError, match="cannot be accessed on a MultiOptimizer"):
        _ = optimizer.learning_rate
    with pytest.raises(AttributeError, match="cannot be set on a MultiOptimizer"):
        optimizer.learning_rate = 0.5


def test_options_are_read_and_written_through_and_others_stay_on_the_wrapper():
    inner = Adam(0.5, clipnorm=0.25, use_ema=True, name="mine")
    optimizer = rr.DistributedOptimizer(inner)
    assert (optimizer.clipnorm, optimizer.use_ema, optimizer.name) == (0.25, True, "mine")
    optimizer.clipnorm, optimizer.beta_1, optimizer.remark = 0.75, 0.5, "mine"
    assert (inner.clipnorm, inner.beta_1, optimizer.remark) == (0.75, 0.5, "mine")
    assert "clipnorm" not in vars(optimizer)
    assert not hasattr(inner, "remark")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_variables_are_added_to_the_inner_optimizer():
    inner, reference = SGD(0.5), variable(0, 0, 0)
    optimizer = rr.DistributedOptimizer(inner)
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


def test_the_class_makes_another_one_from_its_config_which_is_the_inner_one():
    inner = SGD(0.5, momentum=0.25, name="mine")
    optimizer = rr.DistributedOptimizer(inner)
    assert repr(optimizer).startswith("<DistributedOptimizer of <keras.")
    assert "SGD" in repr(optimizer)
    assert optimizer.get_config() == inner.get_config()
    again = type(optimizer).from_config(optimizer.get_config())
    assert isinstance(again, rr.DistributedOptimizer)
    assert type(again.inner_optimizer) is SGD
    assert again.get_config() == optimizer.get_config()


def test_inner_optimizer_is_below_a_loss_scale_as_in_keras():
    scaled = LossScaleOptimizer(SGD(0.5), initial_scale=8.0)
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
