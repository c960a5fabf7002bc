"""What callbacks change on some ranks only is told before a step makes one model of two."""

import functools
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.layers import Dense
from keras.optimizers import SGD

import ringreduce.keras as rr
from ringreduce import MismatchError
from ringreduce.keras.callbacks.one_sided import OneSided
from ringreduce.keras.repeating import Repeating, told_by_ranks
from ringreduce.tensorflow.kept import kept
from ringreduce.testing import ring_of_threads
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

X = np.arange(16, dtype="float32").reshape(8, 2)
ALONE = {"strategy": rr.LocalSGD(2)}
SHARDED = {"shard_state": True}


def made(ring, **options):
    model = keras.Sequential([keras.Input((2,)), Dense(40, name="first"), Dense(1)])
    inner = SGD(0.0, momentum=0.5)
    model.compile(rr.DistributedOptimizer(inner, ring, **options), "mse", run_eagerly=True)
    return model


def train(model, ring, callbacks=(), **options):
    """Two epochs of two steps."""
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    rr.fit(model, X, X[:, :1], callbacks=list(callbacks), communicator=ring, **options)


def on_hook(hook, act, at):
    """A callback that acts when `hook` is called for that time, from 1."""
    calls = []

    def look(*_, **__):
        calls.append(0)
        if len(calls) == at:
            act()

    return keras.callbacks.LambdaCallback(**{hook: look})


def said(change, hook="on_epoch_begin", at=2, *, ranks=(0,), options=SHARDED, size=2, **given):
    """What all ranks raise where `ranks` change their models in a hook."""

    def work(ring):
        model = made(ring, **options)
        act = functools.partial(change, model) if ring.rank in ranks else bool
        try:
            train(model, ring, [on_hook(hook, act, at)], **given)
        except MismatchError as error:
            return str(error)
        return ""

    errors = ring_of_threads(size, work)
    assert len({bool(error) for error in errors}) == 1, errors
    return errors[0]


def kernel(model):
    return model.get_layer("first").kernel


def set_kernel(model):
    kernel(model).assign(tf.ones((2, 40)) * 7)


def set_nan(model):
    kernel(model).assign(tf.fill((2, 40), np.nan))


def set_what_it_is(model):
    model.set_weights(model.get_weights())


def set_rate(model):
    model.optimizer.learning_rate = 0.5


def forget_momentum(model):
    for variable in model.optimizer.variables[2:]:
        variable.assign(tf.ones_like(variable) * 3)


VALIDATED = {"validation_data": (X, X[:, :1])}
KERNEL = r"has its own value of .*first/kernel"


@pytest.mark.parametrize(
    ("change", "hook", "at", "text"),
    [
        (set_kernel, "on_epoch_begin", 2, KERNEL),
        in_full(set_kernel, "on_epoch_end", 1, KERNEL),
        (set_nan, "on_train_batch_begin", 2, KERNEL),
        in_full(set_nan, "on_train_batch_end", 1, KERNEL),
        (set_nan, "on_train_batch_end", 4, KERNEL),
        (set_kernel, "on_test_end", 1, KERNEL),
        (set_rate, "on_train_batch_begin", 2, "before a step, that the learning rate is 0.5 on"),
        (
            *(forget_momentum, "on_epoch_begin", 2),
            "rank 0 has changed .*momentum.* share of the optimizer's state, and ranks? 1",
        ),
    ],
)
def test_a_change_of_one_rank_is_told_before_a_sharded_step(change, hook, at, text):
    assert re.search(text, said(change, hook, at, **VALIDATED if "test" in hook else {}))


def test_a_change_of_one_rank_is_told_before_an_elastic_step(monkeypatch):
    """A rank that is behind after a loss would take the state of another."""
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")

    def work(ring):
        model, begun = made(ring), []
        act = functools.partial(set_nan, model) if ring.rank else bool
        callbacks = [on_hook("on_epoch_end", act, 1)]
        callbacks += [keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: begun.append(0))]
        with pytest.raises(MismatchError, match=KERNEL):
            train(model, ring, callbacks, epochs=3)
        return len(begun)

    assert ring_of_threads(2, work) == [2, 2]


def set_kernel_in_a_function(model):
    weight = kernel(model).value
    tf.function(lambda: weight.assign(tf.ones((2, 40)) * 7))()


RATE = "the learning rate is 0 on rank 0 and 0.5 on rank 1"


@pytest.mark.parametrize(
    ("change", "at", "text"),
    [
        (set_kernel_in_a_function, 1, KERNEL),
        (set_nan, 2, KERNEL),  # The last of an epoch.
        in_full(set_kernel, 3, KERNEL),
        (set_rate, 1, RATE),
        (set_rate, 2, ""),  # The end of an epoch makes it rank 0's on all.
        (set_what_it_is, 1, ""),
        in_full(set_what_it_is, 2, ""),
    ],
)
@pytest.mark.parametrize("begins", [in_full(True), False])
def test_what_a_hook_for_batches_changes_is_told_in_elastic_training(
    change, at, text, begins, monkeypatch
):
    """Also where hooks for the begin of batches make the ranks compare before each step."""
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")

    def work(ring):
        model, ended = made(ring), []
        act = functools.partial(change, model) if ring.rank else bool
        hook = on_hook("on_train_batch_end", act, at)
        if begins:
            hook.on_train_batch_begin = lambda *_, **__: None
        try:
            train(
                model, ring, [hook, on_hook("on_train_batch_end", lambda: ended.append(0), at + 1)]
            )
        except MismatchError as error:
            return len(ended), str(error)
        return len(ended), ""

    (steps, error), (steps_there, error_there) = ring_of_threads(2, work)
    assert steps == steps_there == (0 if text else 1)
    for said_there in (error, error_there):
        assert re.search(text, said_there) if text else said_there == ""


def test_a_rate_that_all_set_after_a_batch_hides_no_change_at_the_end_of_the_epoch(monkeypatch):
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")

    def work(ring):
        model = made(ring)
        act = functools.partial(set_kernel, model) if ring.rank else bool
        rates = on_hook("on_train_batch_end", functools.partial(set_rate, model), 2)
        with pytest.raises(MismatchError, match=KERNEL):
            train(model, ring, [rates, on_hook("on_epoch_end", act, 1)])

    ring_of_threads(2, work)


def test_what_a_rank_hears_of_one_that_is_lost_now_is_compared_too():
    """It missed the end of an exchange, whose result another rank gives it in the next ring."""

    def work(ring):
        model = made(ring, shard_state=True)
        model.optimizer.build(model.trainable_variables)
        kept(ring, Repeating).by = lambda meeting: _with_rank_2(meeting())
        one_sided = OneSided(model, [], ring)
        one_sided.compare()  # Of what it began with.
        with one_sided.noting(is_batch=False):
            pass
        one_sided.compare()
        return list(told_by_ranks(ring, ring.rank))

    assert ring_of_threads(2, work) == [[0, 1, 2]] * 2


def _with_rank_2(result):
    is_by_ranks = isinstance(result, list) and isinstance(result[0], tuple)
    return [*result, [2, result[0][1]]] if is_by_ranks else result


def test_the_rank_that_has_changed_something_is_named_among_three():
    assert "found that rank 2 has its own value" in said(set_nan, ranks=[2], size=3)


@pytest.mark.parametrize("options", [SHARDED, in_full(ALONE)], ids=["sharded", "alone"])
@pytest.mark.parametrize("change", [set_kernel, in_full(set_what_it_is), forget_momentum])
def test_changes_of_all_ranks_are_right(change, options):
    for hook in ("on_epoch_begin", "on_train_batch_begin"):
        assert said(change, hook, ranks=[0, 1], options=options) == ""


def test_what_a_rank_puts_back_before_the_next_step_is_right():
    assert said(set_what_it_is, "on_epoch_begin") == ""
    assert said(set_what_it_is, "on_train_batch_end", 1) == ""

    def work(ring):
        model, kept = made(ring, **SHARDED), []

        def swap():
            kept.append(kernel(model).numpy())
            set_kernel(model)

        hooks = [on_hook("on_test_begin", swap, 1)]
        hooks += [on_hook("on_test_end", lambda: kernel(model).assign(kept[0]), 1)]
        train(model, ring, hooks if ring.rank == 0 else [], **VALIDATED)

    ring_of_threads(2, work)


@pytest.mark.parametrize("options", [SHARDED, in_full(ALONE)])
@on_ranks(2)
def test_what_is_loaded_on_one_rank_between_trainings_is_told(options):
    model, steps = made(None, **options), []
    model.compile(model.optimizer, "mse")  # Before eager steps all get rank 0's.
    train(model, None, epochs=1)
    if rr.rank() == 0:
        model.set_weights([2 * value for value in model.get_weights()])
    counts = on_hook("on_train_batch_end", lambda: steps.append(0), 1)
    with pytest.raises(MismatchError, match=KERNEL):
        train(model, None, [counts])
    assert not steps


def test_weights_thawed_since_are_compared_from_their_second_training_on():
    def work(ring):
        model = made(ring, **SHARDED)
        model.get_layer("first").trainable = False
        kernel(model).assign(tf.ones((2, 40)) * (1 + ring.rank))
        model.compile(model.optimizer, "mse", run_eagerly=True)
        train(model, ring)
        model.get_layer("first").trainable = True
        model.compile(rr.DistributedOptimizer(SGD(0.0), ring, **SHARDED), "mse", run_eagerly=True)
        train(model, ring)
        return kernel(model).numpy().tolist()

    assert ring_of_threads(2, work) == [[[1.0] * 40] * 2] * 2


@on_ranks(2)
def test_a_change_of_one_rank_between_meetings_is_warned_of():
    ring, texts = rr.init(), {}
    for name, ranks in (("one", [1]), ("all", [0, 1])):
        model = made(None, **ALONE)
        act = functools.partial(set_kernel, model) if ring.rank in ranks else bool
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, None, [on_hook("on_train_batch_end", act, at=1)])
        found = [str(w.message) for w in caught if "between two meetings" in str(w.message)]
        texts[name] = [re.search("on rank.* only", text).group() for text in found]
    assert texts == {"one": ["on rank 1 only"] if ring.rank == 0 else [], "all": []}


@on_ranks(2)
def test_in_a_graph_an_addition_counts_once_on_each_rank():
    """Though the ranks of a host have their weights in the same memory."""
    model = made(None, **SHARDED)
    model.compile(model.optimizer, "mse")
    set_kernel(model)

    def add():
        kernel(model).assign_add(tf.ones((2, 40)))

    for number, hook in enumerate(["on_epoch_begin", "on_train_batch_end"]):
        train(model, None, [on_hook(hook, add, 2)])
        assert (kernel(model).numpy() == 8 + number).all()


def test_callbacks_of_kerass_fit_within_together_are_compared():
    def work(ring):
        model = made(ring, **SHARDED)
        sets = on_hook("on_epoch_end", lambda: set_nan(model), 1)
        together = rr.callbacks.Together([sets] if ring.rank else [], ring)
        x = rr.shard(X, ring)
        with pytest.raises(MismatchError, match=KERNEL):
            model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[together])

    ring_of_threads(2, work)


def test_ranks_ask_once_an_epoch_unless_own_hooks_see_that_batches_begin():
    def in_two_epochs(ring, hook, options):
        counts = []
        for epochs in (1, 3):
            model, before = made(ring, **options), ring.statistics().collectives
            train(model, ring, [on_hook(hook, bool, 1)], epochs=epochs)
            counts.append(ring.statistics().collectives - before)
        return counts[1] - counts[0]

    def work(ring):
        asked = {"on_epoch_end": 2, "on_train_batch_end": 2, "on_train_batch_begin": 4}
        for hook, asks in asked.items():
            sharded, plain = (in_two_epochs(ring, hook, options) for options in (SHARDED, {}))
            # Each of four sharded steps has two exchanges, where another has one.
            assert sharded - plain == 4 + asks

    ring_of_threads(2, work)
