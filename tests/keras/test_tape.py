"""`DistributedGradientTape`: averages what a tape gives, and keeps what the ranks agreed on."""

import functools
import gc
import inspect
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl.conversion import is_allowlisted

import ringreduce
import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.optimizer.tape import _Shared
from ringreduce.tensorflow.kept import kept
from ringreduce.vocabulary.errors import ConfigError
from tests.ways import by, outcomes, plain, wrapped

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]
REWRITES_GRAPHS = True

every_way = by("eager", "graph", "jit")


def counted(action):
    """Return what an action returns, as lists, and how many collectives it took."""
    statistics = default_communicator().statistics
    before = statistics().collectives
    return plain(action()), statistics().collectives - before


def trained(how, with_tape):
    """The weights after three steps, by the tape or by the wrapper, and each step's collectives."""
    data = tf.reshape(tf.range(48.0), (12, 4))[rr.rank() :: rr.size()] / 48
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = keras.optimizers.SGD(0.5)
    if not with_tape:
        optimizer = rr.DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)

    def step():
        with rr.DistributedGradientTape() if with_tape else tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(data, training=True) - data[:, :2]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    step = wrapped(how, step)
    return plain(model.get_weights()), [counted(step)[1] for _ in range(3)]


@by("eager", full=("graph", "jit"))
def test_training_with_it_is_training_with_the_wrapper(how):
    """All tapes share a bridge, and have nothing to agree on again; one bucket holds all."""
    bridges = kept(default_communicator(), _Shared).bridges
    weights, _ = trained(how, with_tape=True)
    seen = list(bridges.items())
    again, collectives = trained(how, with_tape=True)
    assert weights == again == trained(how, with_tape=False)[0]
    assert list(bridges.items()) == seen
    assert rr.size() == 1 or collectives[1:] == [1, 1]
    return weights


@every_way
def test_every_rank_begins_with_rank_0s_values_which_travel_once(how):
    """A second variable is a source from the second step on; a third one never."""
    rank, mean = rr.rank(), (rr.size() + 1) / 2
    data = tf.constant(rank + 1.0)
    first = keras.Variable([2.0 * rank + 1, 2.0])
    second, apart = tf.Variable(10.0 * rank + 3), tf.Variable(float(rank))

    def step(sources):
        with rr.DistributedGradientTape() as tape:
            tape.watch(data)
            squares = tf.reduce_sum(tf.square(first)) + tf.square(second) + tf.square(apart)
            loss = data * squares
        return tape.gradient(loss, sources)

    sources = [second, {"b": first}, first]
    # No arguments: a tf.function would make tensors of variables.
    steps = [
        wrapped(how, functools.partial(step, chosen))
        for chosen in ({"a": [first, data]}, sources, sources)
    ]
    gradients, counts = zip(*map(counted, steps), strict=True)
    # Eagerly the other ranks computed the first ones with other weights: they are left out.
    begun = 1 if how == "eager" else mean
    assert gradients[0]["a"][0] == [2 * begun, 4 * begun]
    for gradient, factor in zip(gradients[1:], (begun, mean), strict=True):
        of_first = [2 * factor, 4 * factor]
        assert gradient == [6 * factor, {"b": of_first}, of_first]
    assert plain([first, second, apart]) == [[1, 2], 3, rank]
    if rr.size() > 1:
        assert counts[1] > counts[2] == 1


@every_way
def test_variables_that_a_function_makes_begin_alike(how):
    """It has values for them only when it is traced again."""
    made = []

    def step():
        if not made:
            made.append(tf.Variable(rr.rank() + 1.0))
        with rr.DistributedGradientTape() as tape:
            loss = tf.square(made[0])
        return tape.gradient(loss, made[0]), made[0]

    assert plain(wrapped(how, step)()) == [2, 1]


@every_way
def test_gradients_have_the_structure_of_the_sources(how):
    """And what the tape can, it can: its options, watched tensors, no sources, a jacobian."""
    rank, size = rr.rank(), rr.size()
    mean = (size + 1) / 2
    first, second = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    unused, table = tf.Variable(1.0), tf.Variable(tf.ones((4, 2)))
    constant = tf.constant([1.0, 2.0])

    def loss_of(tape):
        with tape:
            picked = tf.gather(table, [rank, rank, 3])
            loss = (tf.reduce_sum(first**2) + second) * (rank + 1.0) + tf.reduce_sum(picked)
        return loss

    def nested():
        tape = rr.DistributedGradientTape()
        return tape.gradient(loss_of(tape), {"a": [first, unused], "b": (second, table)})

    def with_options():
        tape = rr.DistributedGradientTape(tf.GradientTape(True))
        loss = loss_of(tape)
        zero = tf.UnconnectedGradients.ZERO
        return (
            tape.gradient(loss, [unused, second], unconnected_gradients=zero),
            tape.gradient(loss, second, output_gradients=tf.constant(10.0)),
            tape.gradient(loss, []),
            tape.gradient(loss, unused),
        )

    def watched():
        with rr.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
            tape.watch(constant)
            result = constant**2 * (rank + 1.0)
        return tape.gradient(result, constant), len(tape.watched_variables())

    # Of the table each rank has picked its own row twice and row 3 once.
    rows = [[2 / size] * 2 if row < size else [0, 0] for row in range(3)]
    structure, options, of_a_tensor = outcomes(how, nested, with_options, watched)
    assert structure["a"] == [[2 * mean, 4 * mean], None]
    assert structure["b"] == [mean, np.float32([*rows, [1, 1]]).tolist()]
    assert options == [[0, mean], 10 * mean, [], None]
    assert of_a_tensor == [[2 * mean, 4 * mean], 0]
    with rr.DistributedGradientTape(tf.GradientTape(True)) as tape:
        result = first * (rank + 1.0)
    jacobian = tape.jacobian(result, first, experimental_use_pfor=False)
    assert plain(jacobian) == [[rank + 1, 0], [0, rank + 1]]


@every_way
def test_local_sources_stay_local_and_sums_are_sums(how):
    rank, total = rr.rank(), rr.size() * (rr.size() + 1) / 2
    local, shared = tf.Variable([[1.0, 2.0]] * 2), tf.Variable([1.0])

    def gradients():
        options = {"local_variables": [local], "op": "sum"}
        with rr.DistributedGradientTape(tf.GradientTape(True), **options) as tape:
            loss = (tf.reduce_sum(local) + tf.reduce_sum(shared)) * (rank + 1)
        return tape.gradient(loss, local), tape.gradient(loss, shared)

    assert outcomes(how, gradients) == [[[[rank + 1] * 2] * 2, [total]]]
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    weight = keras.Variable([0.0])
    optimizer.apply([[rank + 1.0]], [weight])
    assert plain(weight) == [-total]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tape": 5}, "no tf.GradientTape"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"op": "min"}, "op is 'min'; accepted .*: mean, sum"),
        ({"check_numerics": "maybe"}, "check_numerics is 'maybe'"),
    ],
)
def test_what_it_cannot_use_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        rr.DistributedGradientTape(**options)
    with pytest.raises(AttributeError, match="no_such"):
        _ = rr.DistributedGradientTape().no_such


def test_bridges_go_with_their_communicator_and_variables_with_their_users():
    with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as alone:
        value = tf.Variable(1.0)
        with rr.DistributedGradientTape(communicator=alone) as tape:
            result = value * 2.0
        assert float(tape.gradient(result, value)) == 2.0
        shared = weakref.ref(kept(alone, _Shared))
        given = shared().initial._given
        assert list(given.values()) == [value]
        del value, result, tape
        gc.collect()
        assert not given
    del alone
    gc.collect()
    assert shared() is None


def test_in_a_function_autograph_leaves_it_as_it_is(world_of_one, monkeypatch):
    """Else TensorFlow warns of each function that it cannot read, and asks for a report to it."""
    warned = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda *text: warned.append(text))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = value * value
        return hvd.DistributedGradientTape(tape).gradient(loss, value)

    value = tf.Variable(3.0)
    assert float(step()) == 6.0
    assert warned == []


def test_autograph_leaves_all_public_functions_as_they_are():
    modules = ringreduce, rr, hvd, rr.callbacks, rr.elastic, rr.parts
    named = [getattr(module, name) for module in modules for name in module.__all__]
    functions = [item for item in named if inspect.isclass(item) or inspect.isroutine(item)]
    for item in filter(inspect.isclass, named):
        methods = inspect.getmembers(item, inspect.isfunction)
        functions += [m for _, m in methods if m.__module__.startswith("ringreduce.")]
    assert len(functions) > 300
    assert [function for function in functions if not is_allowlisted(function)] == []
