"""The wrapper in one process, where it must be nothing but the optimizer that it wraps."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import schedules

import ringreduce
import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce.keras.callbacks.metric_average import MetricAverage
from ringreduce.keras.strategies import Accumulate, EveryStep
from ringreduce.testing import ring_of_threads
from tests.models import EAGERLY, fit, make_model
from tests.scope import in_full


@pytest.fixture
def world_of_one():
    """A default communicator of one rank."""
    with ringreduce.init() as communicator:
        yield communicator
    ringreduce.shutdown()


@pytest.mark.parametrize(
    ("make", "way"),
    [
        in_full(lambda: keras.optimizers.SGD(0.1, momentum=0.9), EAGERLY),
        in_full(lambda: keras.optimizers.Adam(0.1, clipnorm=0.5), EAGERLY),
        (lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2), EAGERLY),
        (lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0), EAGERLY),
        in_full(lambda: keras.optimizers.SGD(schedules.ExponentialDecay(0.1, 1, 0.5)), EAGERLY),
    ],
    ids=["momentum", "clipnorm", "ema", "loss scale", "schedule"],
)
def test_training_alone_is_exactly_the_inner_optimizer(world_of_one, make, way):
    plain = fit(make_model(), make(), compile=way)
    wrapped = fit(make_model(), rr.DistributedOptimizer(make()), compile=way)
    for expected, actual in zip(plain.get_weights(), wrapped.get_weights(), strict=True):
        assert (expected == actual).all()
    for expected, actual in zip(
        plain.optimizer.variables, wrapped.optimizer.variables, strict=True
    ):
        assert (expected.numpy() == actual.numpy()).all()


def test_it_is_a_keras_optimizer_without_variables_of_its_own(world_of_one):
    inner = keras.optimizers.Adam(0.1)
    optimizer = rr.DistributedOptimizer(inner)
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    assert isinstance(optimizer, rr.DistributedOptimizer)
    assert keras.optimizers.get(optimizer) is optimizer
    assert optimizer.inner_optimizer is inner
    assert optimizer._variables is inner._variables
    optimizer.build(make_model().trainable_variables)
    assert [v is w for v, w in zip(optimizer.variables, inner.variables, strict=True)]
    assert optimizer.built
    assert inner.built


@pytest.mark.parametrize("op", ["min", "max"])
def test_gradients_are_averaged_or_added(op):
    for make in (
        lambda: rr.DistributedOptimizer(keras.optimizers.SGD(), op=op),
        lambda: rr.DistributedGradientTape(op=op),
    ):
        with pytest.raises(ringreduce.ConfigError, match=f"op is '{op}'; accepted .*: mean, sum"):
            make()


def test_learning_rate_reads_and_writes_the_inner_one(world_of_one):
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5))
    optimizer.learning_rate = 0.125
    assert float(optimizer.inner_optimizer.learning_rate) == 0.125
    assert float(optimizer.learning_rate) == 0.125


def test_a_schedule_cannot_be_overwritten_as_in_keras(world_of_one):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(schedule))
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        optimizer.learning_rate = 0.5


class Halved(keras.optimizers.SGD):
    """A user's own class, which overrides what Keras's training step calls."""

    def apply_gradients(self, grads_and_vars, factor=0.5):
        self.seen = [(gradient * factor, variable) for gradient, variable in grads_and_vars]
        super().apply_gradients(self.seen)
        return "seen"


@pytest.mark.parametrize("way", [in_full("eagerly"), "graph"])
def test_apply_gradients_of_ones_own_is_called(world_of_one, way):
    plain = fit(make_model(), Halved(0.1), compile=EAGERLY)
    model = make_model()
    model.compile(rr.DistributedOptimizer(Halved(0.1)), loss="mse", run_eagerly=way == "eagerly")
    fit(model)
    for expected, actual in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "seen"),
    [
        # Ranks have gradients 1 and 3 in the first step, 3 and 5 in the second.
        (EveryStep(), [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]),
        (Accumulate(2), [[None, 1.5, None], [None, 1.5, None]]),
        (rr.LocalSGD(3), [[0.5, 1.5, 2.0], [1.5, 2.5, 2.0]]),
    ],
    ids=["EveryStep", "Accumulate", "LocalSGD"],
)
def test_apply_gradients_of_ones_own_gets_means_and_options(strategy, seen):
    def work(comm):
        inner, variable, found = Halved(0.25), keras.Variable([8.0]), []
        optimizer = rr.DistributedOptimizer(inner, comm, strategy=strategy)
        optimizer.build([variable])
        ones = 1.0 + 2 * comm.rank, 3.0 + 2 * comm.rank, 1.0
        for one, options in zip(ones, ({}, {}, {"factor": 2.0}), strict=True):
            returned = optimizer.apply_gradients([(tf.constant([one]), variable)], **options)
            is_applied = isinstance(returned, str)  # Else it is the step counter.
            found.append(float(inner.seen[0][0][0]) if is_applied else None)
        return found

    assert ring_of_threads(2, work) == seen


class Noisy(keras.optimizers.SGD):
    """Each rank may draw other noise."""

    def __init__(self, source):
        super().__init__(0.5)
        self.source = source
        if source == "own":
            self.seed = keras.random.SeedGenerator()

    def update_step(self, gradient, variable, learning_rate):
        noise = {
            "own": lambda: keras.random.normal(variable.shape, seed=self.seed),
            "of keras": lambda: keras.random.normal(variable.shape),
            "of tensorflow": lambda: tf.random.normal(variable.shape),
            "by step": lambda: tf.random.stateless_normal(
                variable.shape, [1, tf.cast(self.iterations, "int32")]
            ),
        }[self.source]()
        super().update_step(gradient + noise, variable, learning_rate)


def of_two_noisy_ranks(source, wrap, strategy=None, callbacks=lambda comm: [], **compile):
    """Each rank's weights after two epochs, or its error's text."""

    def work(comm):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = rr.DistributedOptimizer(wrap(Noisy(source)), comm, strategy=strategy)
        model.compile(optimizer, loss="mse", **compile)
        optimizer.build(model.trainable_variables)
        x, y = np.ones((2, 2), "float32"), np.ones((2, 1), "float32")
        try:
            history = model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks(comm))
        except ringreduce.ConfigError as error:
            return f"{error} after {optimizer.iterations.numpy()} epochs"
        assert len(history.epoch) == 2
        return [weight.tolist() for weight in model.get_weights()]

    return ring_of_threads(2, work)


def plain(optimizer):
    return optimizer


@pytest.mark.filterwarnings("ignore::ringreduce.keras.mistakes.DataWarning")
@pytest.mark.parametrize(
    ("source", "eagerly"),
    [("own", False), ("by step", True), in_full("own", True), in_full("by step", False)],
)
def test_noise_of_an_optimizer_is_equal_on_all_ranks(source, eagerly):
    first, second = of_two_noisy_ranks(source, plain, run_eagerly=eagerly)
    assert not isinstance(first, str), first
    assert first == second


@pytest.mark.filterwarnings("ignore::ringreduce.keras.mistakes.DataWarning")
@pytest.mark.parametrize(
    ("source", "wrap", "callbacks", "epochs"),
    [
        ("of keras", plain, lambda comm: [], 2),
        (
            "of tensorflow",
            keras.optimizers.LossScaleOptimizer,
            lambda comm: [MetricAverage(comm)],
            1,
        ),
    ],
    ids=["when training ends", "when an epoch ends"],
)
def test_noise_that_differs_between_ranks_is_named(source, wrap, callbacks, epochs):
    for text in of_two_noisy_ranks(source, wrap, None, callbacks, run_eagerly=True):
        assert "weights have gone apart, which Noisy updates" in text
        assert "self.seed = keras.random.SeedGenerator(1)" in text
        assert text.endswith(f"after {epochs} epochs")


@pytest.mark.filterwarnings("ignore::ringreduce.keras.mistakes.DataWarning")
def test_ranks_that_step_alone_may_draw_other_noise():
    first, second = of_two_noisy_ranks("of tensorflow", plain, rr.LocalSGD(2), run_eagerly=True)
    assert first == second, "after a meeting"


def test_what_would_average_nothing_is_refused(world_of_one):
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5))
    with pytest.raises(ringreduce.ConfigError, match=r"stateless_apply.*Call apply"):
        optimizer.stateless_apply([], [], [])


class Around(keras.optimizers.SGD):
    """A user's own, with others in attributes."""

    def __init__(self, **held):
        super().__init__(0.5)
        vars(self).update(held)


needs_several = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has no MultiOptimizer yet"
)


@pytest.mark.parametrize(
    "around",
    [
        lambda once: once,
        lambda once: Around(slow=once),
        lambda once: keras.optimizers.LossScaleOptimizer(Around(those=[once])),
        lambda once: Around(those={"a": once}),
        pytest.param(lambda once: keras.optimizers.MultiOptimizer(once), marks=needs_several),
        pytest.param(
            lambda once: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(once)),
            marks=needs_several,
        ),
    ],
)
def test_wrapping_twice_is_refused_also_with_something_in_between(around):
    once = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ringreduce.ConfigError, match="already distributed"):
        rr.DistributedOptimizer(around(once))


@needs_several
def test_wrapping_twice_is_refused_where_it_shows_only_later(world_of_one):
    several = keras.optimizers.MultiOptimizer(
        lambda variable: rr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    )
    with pytest.raises(ringreduce.ConfigError, match="already distributed"):
        rr.DistributedOptimizer(several).build(make_model().trainable_variables)


@pytest.mark.parametrize("inner", ["adam", None, keras.layers.Dense(1)])
def test_what_is_no_optimizer_is_refused(inner):
    with pytest.raises(ringreduce.ConfigError, match="no Keras 3 optimizer"):
        rr.DistributedOptimizer(inner)


def test_training_before_init_says_what_to_do():
    assert not ringreduce.is_initialized()
    with pytest.raises(ringreduce.ClosedError, match=r"ringreduce.init\(\)"):
        fit(make_model(), rr.DistributedOptimizer(keras.optimizers.SGD()))


@pytest.mark.filterwarnings("ignore:rr.shard leaves out")
@pytest.mark.parametrize("size", [1, in_full(2), 3])
@pytest.mark.parametrize("known", [True, False], ids=["known length", "unknown length"])
def test_shards_are_disjoint_complete_and_equally_long(size, known):
    dataset = tf.data.Dataset.from_tensor_slices({"x": np.arange(11), "y": np.arange(11) * 2})
    if not known:
        dataset = dataset.filter(lambda element: True)
        assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY

    def work(comm):
        return [(int(e["x"]), int(e["y"])) for e in rr.shard(dataset, comm)]

    parts = ring_of_threads(size, work)
    whole = 11 // size * size if size > 1 else 11
    for rank, part in enumerate(parts):
        assert part == [(i, 2 * i) for i in range(rank, whole, size)]


def test_tuples_of_unknown_number_are_sharded():
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(5), np.arange(5) * 2))
    dataset = dataset.filter(lambda x, y: True)
    parts = ring_of_threads(2, lambda comm: [int(y) for _, y in rr.shard(dataset, comm)])
    assert parts == [[0, 4], [2, 6]]


def test_an_endless_dataset_is_sharded():
    dataset = tf.data.Dataset.range(4).repeat()
    parts = ring_of_threads(2, lambda comm: [int(x) for x in rr.shard(dataset, comm).take(4)])
    assert parts == [[0, 2, 0, 2], [1, 3, 1, 3]]


def test_broadcast_variables_copies_the_roots_values():
    def work(comm):
        variables = [
            tf.Variable(np.full((3,), comm.rank, "float32")),
            tf.Variable(comm.rank == 1),
            keras.Variable(np.full((2, 2), 10 + comm.rank)),
        ]
        rr.broadcast_variables(variables, root_rank=1, communicator=comm)
        return [variables[0].numpy().tolist(), bool(variables[1].numpy()), variables[2].numpy()]

    for flat, flag, square in ring_of_threads(3, work):
        assert flat == [1, 1, 1]
        assert flag is True
        assert (square == 11).all()


def test_models_of_different_shape_are_an_error_that_names_the_variable():
    def work(comm):
        variable = keras.Variable(np.zeros(3 + comm.rank), name="gamma")
        rr.broadcast_variables([variable], communicator=comm)

    with pytest.raises(ringreduce.MismatchError, match=r"gamma: float64 of shape \(3,\)"):
        ring_of_threads(2, work)


@pytest.mark.parametrize(
    ("options", "mode"),
    [({}, "off"), ({"check_numerics": "warn"}, "warn"), ({"check_numerics": "raise"}, "raise")],
)
def test_a_gradient_that_is_no_number_is_reported_as_asked(options, mode, caplog):
    def work(comm):
        variable = tf.Variable([1.0, 2.0], name="weights")
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1), comm, **options)
        try:
            optimizer.apply([tf.constant([0.0, np.nan])], [variable])
        except ringreduce.NumericsError as error:
            return str(error)
        return ""

    texts = ring_of_threads(2, work)
    warnings = [r.getMessage() for r in caplog.records if "nan at [1] of weights" in r.getMessage()]
    assert len(warnings) == (2 if mode == "warn" else 0)
    assert all(("nan at [1] of weights" in text) is (mode == "raise") for text in texts)


def test_local_variables_are_known_to_what_a_loss_scale_makes_of_it():
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5))
    scaled = keras.optimizers.LossScaleOptimizer(optimizer)
    variable = make_model().trainable_variables[0]
    optimizer.register_local_var(variable)
    assert variable in scaled._local


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_steps": 0},
        {"compression": "int4"},
        {"bucket_bytes": 0},
        {"check_numerics": "always"},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ringreduce.ConfigError, match=str(next(iter(options.values())))):
        rr.DistributedOptimizer(keras.optimizers.SGD(0.5), **options)


@pytest.mark.parametrize("variable", [keras.layers.Dense(1), "kernel", None])
def test_what_is_no_variable_cannot_be_local(variable):
    with pytest.raises(ringreduce.ConfigError, match="local variable"):
        rr.DistributedOptimizer(keras.optimizers.SGD(0.5), local_variables=[variable])


def trained_with_local(optimizer, variable=None):
    model = make_model()
    optimizer.register_local_var(model.trainable_variables[0] if variable is None else variable)
    return fit(model, optimizer, compile=EAGERLY)


@pytest.mark.parametrize(
    ("inner", "word"),
    [
        (lambda: keras.optimizers.SGD(0.5, global_clipnorm=1.0), "global_clipnorm"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)), "loss scale"),
        (lambda: Halved(0.5), "its own apply_gradients"),
    ],
)
def test_local_variables_beside_what_joins_all_gradients_are_refused(world_of_one, inner, word):
    with pytest.raises(ringreduce.ConfigError, match=word):
        trained_with_local(rr.DistributedOptimizer(inner()))


def test_a_local_variable_must_be_trained(world_of_one):
    with pytest.raises(ringreduce.ConfigError, match="not trained"):
        trained_with_local(
            rr.DistributedOptimizer(keras.optimizers.SGD(0.5)), keras.Variable([1.0])
        )


def test_a_local_variable_comes_too_late_after_the_first_step(world_of_one):
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model = trained_with_local(optimizer)
    with pytest.raises(ringreduce.ConfigError, match="after the first step"):
        optimizer.register_local_var(model.trainable_variables[1])


def test_a_local_variable_may_be_the_one_in_a_variable_of_keras(world_of_one):
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5))
    variable = make_model().trainable_variables[0]
    optimizer.register_local_var(variable.value)
    optimizer.build([variable])
    assert optimizer.shared([variable]) == []


def test_another_loss_scale_around_the_wrapper_is_refused():
    class Careful(keras.optimizers.LossScaleOptimizer):
        pass

    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5))
    with pytest.raises(ringreduce.ConfigError, match=r"DistributedOptimizer\(Careful"):
        Careful(optimizer)


def test_local_variables_may_have_other_names_and_numbers_on_each_rank():
    def work(comm):
        shared = keras.Variable([1.0], name="shared")
        local = [keras.Variable([0.0], name=f"expert_{'ab'[comm.rank]}") for _ in range(comm.rank)]
        optimizer = rr.DistributedOptimizer(
            keras.optimizers.SGD(1.0), comm, local_variables=[*local]
        )
        optimizer.apply([[comm.rank + 1.0]] * (1 + comm.rank), [*local, shared])
        return [float(variable.numpy()[0]) for variable in (*local, shared)]

    assert ring_of_threads(2, work) == [[-0.5], [-2.0, -0.5]]


def test_fit_over_other_ranks_than_the_optimizers_is_refused():
    def work(comm):
        group = comm.split(comm.rank)
        model = make_model()
        model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(), group), loss="mse")
        with pytest.raises(ringreduce.ConfigError, match=r"averages over 1 of them.* to rr\.fit"):
            rr.fit(model, np.ones((4, 3)), np.ones((4, 1)), communicator=comm)

    ring_of_threads(2, work)


@pytest.mark.filterwarnings("ignore::ringreduce.keras.DataWarning")
def test_layers_with_local_variables_may_be_configured_differently():
    def work(comm):
        expert = keras.layers.Dense(1, "relu" if comm.rank else "tanh", use_bias=False)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), expert])
        local = expert.trainable_variables
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5), comm, local_variables=local)
        model.compile(optimizer, loss="mse", run_eagerly=True)
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
        return [variable.numpy().tolist() for variable in model.layers[0].trainable_variables]

    first, second = ring_of_threads(2, work)
    assert first == second


@pytest.mark.parametrize(("name", "word"), [("allreduce", "all_reduce"), ("Adasum", "none")])
def test_names_of_horovods_that_are_not_there_say_what_is(name, word):
    with pytest.raises(AttributeError, match=word):
        getattr(rr, name)


def test_options_of_horovods_that_are_not_there_say_what_is():
    with pytest.raises(TypeError, match="accumulate_steps"):
        rr.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2)
    with pytest.raises(TypeError, match="no_such"):
        rr.DistributedOptimizer(keras.optimizers.SGD(), no_such=2)


HOROVODS_OPTIONS = {
    "device_dense": "",
    "device_sparse": "",
    "compression": hvd.Compression.none,
    "sparse_as_dense": False,
    "gradient_predivide_factor": 1.0,
    "op": hvd.Average,
    "num_groups": 0,
    "groups": None,
    "process_set": hvd.global_process_set,
    "scale_local_gradients": False,
}


def test_horovods_options_are_accepted_where_they_mean_what_is_done():
    passes = {"backward_passes_per_step": 1, "average_aggregated_gradients": False}
    sgd = keras.optimizers.SGD
    assert hvd.DistributedOptimizer(sgd(), name="D", **passes, **HOROVODS_OPTIONS).inner_optimizer
    assert hvd.DistributedOptimizer(sgd(), "D", average_aggregated_gradients=True)
    assert hvd.DistributedGradientTape(tf.GradientTape(), **HOROVODS_OPTIONS)


def test_horovods_passes_are_accumulated_as_a_mean():
    given = {"backward_passes_per_step": 3}
    with pytest.raises(ringreduce.ConfigError, match="multiply the learning rate by"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **given)
    made = hvd.DistributedOptimizer(
        keras.optimizers.SGD(), average_aggregated_gradients=True, **given
    )
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
    with pytest.raises(ringreduce.ConfigError, match=advice):
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
    with pytest.raises(ringreduce.ConfigError, match=r"average=False and op=.*Pass op alone"):
        hvd.allreduce(value, average=False, op=hvd.Sum)
    with pytest.raises(ringreduce.ArrayError, match="IndexedSlices with op='max'"):
        hvd.allreduce(tf.IndexedSlices(value, tf.constant([0])), op=hvd.Max)


def test_horovods_process_sets_have_numbers(world_of_one):
    own = hvd.add_process_set([0])
    for number in (0, own.process_set_id):
        assert int(hvd.size_op(number)) == 1
        assert int(hvd.process_set_included_op(number)) == 1
    number = own.process_set_id
    hvd.remove_process_set(own)
    with pytest.raises(ringreduce.ConfigError, match=f"process_set_id={number}"):
        hvd.size_op(process_set_id=number)
