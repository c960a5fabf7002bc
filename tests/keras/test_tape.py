"""`DistributedGradientTape`: averages what a tape gives, and keeps what the ranks agreed on."""

import gc
import inspect
import json
import weakref

import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl.conversion import is_allowlisted

import ringreduce
import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce.keras.tape import _Shared
from ringreduce.tensorflow.kept import kept
from ringreduce.vocabulary.errors import ConfigError
from tests.jobs import run_job
from tests.scope import in_full
from tests.tensor_facts import SIZES, WAYS, facts_of, of_every_rank, on_2_only

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

every_size = pytest.mark.parametrize("size", SIZES)
every_way = pytest.mark.parametrize("how", WAYS)


@on_2_only("eager")
def test_training_with_it_is_training_with_the_wrapper(how, size):
    first = facts_of(size)["tape"][0]
    for fact in facts_of(size)["tape"]:
        assert fact[f"{how} tape"] == fact[f"{how} wrapper"] == first[f"{how} tape"]


@pytest.mark.parametrize("size", [2, in_full(3)])
def test_all_tapes_share_a_bridge(size):
    for fact in facts_of(size)["tape"]:
        assert fact["bridges"] == 1


@pytest.mark.parametrize("size", [2, in_full(3)])
def test_a_new_tape_has_nothing_to_agree_on_again(size):
    # The gradients are those that the training loops before have agreed on; one bucket holds all.
    for fact in facts_of(size)["tape collectives"]:
        assert fact["counts"][1:] == [1, 1]


@every_size
@every_way
def test_every_rank_begins_with_rank_0s_values(how, size):
    mean = (size + 1) / 2
    # Eagerly the other ranks computed the first ones with other weights: they are left out.
    begun = 1 if how == "eager" else mean
    for rank, fact in enumerate(facts_of(size)[f"tape initial {how}"]):
        one, second, third = fact["gradients"]
        assert one["a"][0] == [2 * begun, 4 * begun]
        assert third == [6 * mean, {"b": [2 * mean, 4 * mean]}, [2 * mean, 4 * mean]]
        assert second == [6 * begun, {"b": [2 * begun, 4 * begun]}, [2 * begun, 4 * begun]]
        # No source, so left alone.
        assert fact["values"] == [[1, 2], 3, rank]


@pytest.mark.parametrize("size", [2, in_full(3)])
@every_way
def test_values_travel_once(how, size):
    for fact in facts_of(size)[f"tape initial {how}"]:
        assert fact["collectives"][2] == 1
        assert fact["collectives"][1] > 1


@every_size
@every_way
def test_variables_that_a_function_makes_begin_alike(how, size):
    for fact in facts_of(size)[f"tape made {how}"]:
        assert fact["gradient_and_value"] == [2, 1]


@every_size
@every_way
def test_gradients_have_the_structure_of_the_sources(how, size):
    mean = (size + 1) / 2
    # Of the table each rank has picked its own row twice and row 3 once.
    rows = [[2 / size] * 2 if row < size else [0, 0] for row in range(3)]
    expected = {"a": [[2 * mean, 4 * mean], None], "b": [mean, [*rows, [1, 1]]]}
    for got in of_every_rank("tape structure", size, how):
        assert got["a"] == expected["a"]
        assert got["b"][0] == expected["b"][0]
        for row, wanted in zip(got["b"][1], expected["b"][1], strict=True):
            assert row == pytest.approx(wanted, rel=1e-6)


@on_2_only("eager", "graph")
def test_options_of_gradient_reach_the_tape(how, size):
    mean = (size + 1) / 2
    assert of_every_rank("tape options", size, how) == [[[0, mean], 10 * mean]] * size


@on_2_only("eager", "graph")
def test_what_the_tape_can_it_can(how, size):
    mean = (size + 1) / 2
    assert of_every_rank("tape of a tensor", size, how) == [[[2 * mean, 4 * mean], 0]] * size
    for rank, fact in enumerate(facts_of(size)["tape jacobian"]):
        assert fact["eager"] == [[rank + 1, 0], [0, rank + 1]]


@on_2_only("eager", "graph")
def test_without_gradients_nothing_is_sent(how, size):
    assert of_every_rank("tape of nothing", size, how) == [[[], None]] * size


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((5,), {}, "no tf.GradientTape"),
        ((), {"bucket_bytes": 0}, "bucket_bytes is 0"),
        ((), {"check_numerics": "maybe"}, "check_numerics is 'maybe'"),
    ],
    ids=["no tape", "bucket_bytes", "check_numerics"],
)
def test_what_it_cannot_use_is_refused(arguments, options, text):
    with pytest.raises(ConfigError, match=text):
        rr.DistributedGradientTape(*arguments, **options)


def test_bridges_go_with_their_communicator():
    value = tf.Variable(1.0)
    with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as alone:
        with rr.DistributedGradientTape(communicator=alone) as tape:
            result = value * 2.0
        assert float(tape.gradient(result, value)) == 2.0
        shared = weakref.ref(kept(alone, _Shared))
    del alone, tape
    gc.collect()
    assert shared() is None


def test_variables_are_not_kept():
    with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as alone:
        value = tf.Variable(1.0)
        with rr.DistributedGradientTape(communicator=alone) as tape:
            result = value * 2.0
        tape.gradient(result, value)
        given = kept(alone, _Shared).initial._given
        assert list(given.values()) == [value]
        del value, result, tape
        gc.collect()
        assert not given


def test_a_name_that_neither_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such"):
        _ = rr.DistributedGradientTape().no_such


def test_in_a_function_autograph_leaves_it_as_it_is(monkeypatch):
    """Else TensorFlow warns of each function that it cannot read, and asks for a report to it."""
    warned = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda *text: warned.append(text))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = value * value
        return hvd.DistributedGradientTape(tape).gradient(loss, value)

    value = tf.Variable(3.0)
    hvd.init()
    try:
        assert float(step()) == 6.0
    finally:
        hvd.shutdown()
    assert warned == []


def test_autograph_leaves_all_public_functions_as_they_are():
    modules = ringreduce, rr, hvd, rr.callbacks, rr.elastic, rr.parts
    named = [getattr(module, name) for module in modules for name in module.__all__]
    found = [each for each in named if inspect.isclass(each) or inspect.isroutine(each)]
    for each in filter(inspect.isclass, named):
        methods = inspect.getmembers(each, inspect.isfunction)
        found += [method for _, method in methods if method.__module__.startswith("ringreduce.")]
    assert len(found) > 300
    assert [each for each in found if not is_allowlisted(each)] == []


def test_the_custom_loop_learns_and_its_workers_end_alike():
    """The example as a user runs it."""
    result = run_job(2, ["examples/custom_loop.py", "--epochs", "4"])
    assert result.exit_code == 0, result.errors
    lines = [line.partition("] ")[2] for line in result.output.splitlines()]
    shown = json.loads("".join(line for line in lines if not line.startswith("epoch")))
    assert len(shown["weights_sha256"]) == 2
    assert len(set(shown["weights_sha256"])) == 1
    assert shown["accuracy"] > 0.9
