"""All strategies promise equal weights once settled, local variables, and the user's own update.

Their arithmetic is in test_steps and test_meetings, saving them in test_saving.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.keras.strategies.base import Accumulate, EveryStep
from tests.programs.shared import digest
from tests.ranks import on_ranks
from tests.ways import WAYS, wrapped

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SGD = keras.optimizers.SGD
LocalSGD, DiLoCo = rr.LocalSGD, rr.DiLoCo
ALONE = [LocalSGD(3), LocalSGD(3, overlap=1), DiLoCo(3), DiLoCo(3, overlap=2)]
each_strategy = pytest.mark.parametrize("strategy", [EveryStep(), Accumulate(2), *ALONE], ids=str)
# Whole rounds of all of them; on whole numbers, so that nothing but DiLoCo's factors is rounded.
STEPS = 12


def variables(count):
    """They begin otherwise on each rank."""
    return [keras.Variable(np.full(3, rr.rank(), "float32")) for _ in range(count)]


def gradient(number):
    return tf.fill((3,), (rr.rank() + 1.0) * (number % 3 + 1))


def settle(*optimizers):
    for optimizer in optimizers:
        optimizer.settle()


@pytest.mark.parametrize("how", WAYS)
@each_strategy
@on_ranks(2)
def test_local_variables_train_as_those_of_one_process(strategy, how):
    """Their values, their gradients and the optimizer's state of them are this rank's own."""
    shared, local, alone = variables(3)
    inner, plain = (SGD(0.5, momentum=0.5) for _ in range(2))
    optimizer = rr.DistributedOptimizer(inner, strategy=strategy, local_variables=[local])
    optimizer.build([shared, local])

    def step(value):
        optimizer.apply([value, value], [shared, local])

    step = wrapped(how, step)
    for number in range(STEPS):
        step(gradient(number))
    settle(optimizer)
    count = strategy.steps if isinstance(strategy, Accumulate) else 1
    for first in range(0, STEPS, count):
        mean = sum(gradient(number) for number in range(first, first + count)) / count
        plain.apply([mean], [alone])
    assert local.numpy().tolist() == alone.numpy().tolist()
    return digest([shared])


@each_strategy
@on_ranks(2)
def test_variables_that_are_applied_in_parts_move_as_those_applied_together(strategy):
    """They begin with rank 0's values, and have steps of their own."""
    first, second, *others = variables(4)
    inner = SGD(1.0)
    inner.build([first, second])
    parts = rr.DistributedOptimizer(inner, strategy=strategy)
    together = rr.DistributedOptimizer(SGD(1.0), strategy=strategy)
    # Nothing in the first rounds, since gradients of ranks that began otherwise are left out.
    for some in [tf.zeros(3)] * 6 + [gradient(number) for number in range(6)]:
        parts.apply([some], [first])
        parts.apply([2 * some], [second])
        together.apply([some, 2 * some], others)
    settle(parts, together)
    assert digest([first, second]) == digest(others)
    assert (first.numpy() < -1).all()
    return digest([first, second])


class Scaled(SGD):
    """A user's own class, which overrides what Keras's training step calls."""

    def apply_gradients(self, grads_and_vars, factor=1.0):
        super().apply_gradients([(gradient * factor, v) for gradient, v in grads_and_vars])
        return "applied"


@each_strategy
@on_ranks(2)
def test_apply_gradients_of_ones_own_gets_means_and_options(strategy):
    variable, expected = variables(2)
    scaled, plain = (
        rr.DistributedOptimizer(inner, strategy=strategy) for inner in (Scaled(0.25), SGD(0.5))
    )
    scaled.build([variable])
    plain.build([expected])
    for number in range(STEPS):
        returned = scaled.apply_gradients([(gradient(number), variable)], factor=2.0)
        # In steps that do not update, it is the step counter.
        is_due = not isinstance(strategy, Accumulate) or number % strategy.steps
        assert isinstance(returned, str) == bool(is_due)
        plain.apply([gradient(number)], [expected])
    settle(scaled, plain)
    assert digest([variable]) == digest([expected])
    return digest([variable])


@each_strategy
@on_ranks(2, RINGREDUCE_TRANSPORT="zmq")  # As between hosts.
def test_compressed_ranks_are_equal_after_each_meeting_and_near_those_that_are_not(strategy):
    """Of 11 steps the last ones are met for by settling."""
    ends, digests = {}, []
    # With overlap a rank keeps what it learned while the meeting was under way.
    met = 0 if getattr(strategy, "overlap", 0) else 11 // getattr(strategy, "every", 1)
    for name in ("none", "bf16", "int8"):
        weights = [tf.Variable(tf.zeros(count)) for count in (5003, 7)]
        optimizer = rr.DistributedOptimizer(SGD(0.25), strategy=strategy, compression=name)
        for number in range(11):
            generator = np.random.default_rng([rr.rank(), number])
            noise = [generator.standard_normal(weight.shape, "float32") for weight in weights]
            optimizer.apply([tf.constant(part) for part in noise], weights)
            if optimizer.has_met and met:
                digests.append(digest(weights))
        optimizer.settle()
        digests.append(digest(weights))
        ends[name] = np.concatenate([weight.numpy() for weight in weights])
        # Changes of three steps are up to 2; momentum between meetings adds up what is rounded.
        off = np.abs(ends[name] - ends["none"]).max()
        assert off == 0 if name == "none" else 0 < off < 0.1
    assert len(digests) == 3 * (met + 1)
    return digests
