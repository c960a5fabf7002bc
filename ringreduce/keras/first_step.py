"""Prepares a `DistributedOptimizer`'s first step: ranks check, compare, begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ringreduce.keras import settings
from ringreduce.keras.elastic_refusals import facts_of, refuse
from ringreduce.keras.initial import InitialValues, give_values
from ringreduce.keras.mistakes import (
    model_in_fit,
    save_whole_files,
    warn_of_different_weights,
    warn_of_whole_data,
)
from ringreduce.keras.parts.replicas import model_group
from ringreduce.keras.parts.training import check_parts
from ringreduce.keras.repeating import is_repeating
from ringreduce.keras.seeds import states_in
from ringreduce.keras.weighting import Averaging
from ringreduce.keras.wrappable import refuse_scales
from ringreduce.vocabulary.config import elastic_minimum

if TYPE_CHECKING:
    from ringreduce.communicator.communicator import Communicator
    from ringreduce.keras.optimizer import DistributedOptimizer


def prepare(
    optimizer: DistributedOptimizer,
    initial: InitialValues,
    variables: Sequence[Any],
    gradients: list[Any],
    kinds: Sequence[Averaging],
) -> list[Any]:
    """Give all ranks rank 0's values, and return the gradients to use. Collective.

    Raises ConfigError for what cannot be trained so, MismatchError where ranks differ in settings.
    """
    ring, inner = optimizer._ring(), optimizer._inner
    optimizer._local.check(inner)
    # All variables that it may ever train, those frozen now included.
    every = [*optimizer.trained, *variables]
    if elastic_minimum() is not None and ring.size > 1:
        by_others = {"steps of another loop": not is_repeating(ring)}
        refuse(ring, optimizer.options, facts_of(None, every), by_others)
    refuse_scales(every, ring)
    check_parts(inner, every, ring)
    state = [*optimizer.shared(inner.variables), *states_in(inner)]
    shared = optimizer.shared(every)
    gradients = initial.give(shared, gradients, kinds, ring, state, optimizer.settings)
    if initial.are_given:
        with tf.init_scope():
            optimizer.broadcast_state()
            optimizer.take_wholes()
        _look_at_fit(every, ring)
    return gradients


def _look_at_fit(trained: Sequence[Any], ring: Communicator) -> None:
    """Prepare the model, and warn of likely mistakes, in the first step of its `fit`."""
    model = model_in_fit()
    if model is None:
        return
    save_whole_files(model, ring)
    warn_of_whole_data(model, ring)
    if not tf.executing_eagerly():
        # Eagerly this step has already changed moving averages.
        with tf.init_scope():
            warn_of_different_weights(model, trained, ring)


def make_equal(optimizer: DistributedOptimizer, variables: Sequence[Any]) -> None:
    """Give all ranks rank 0's values when `optimizer` is built, eagerly. Collective."""
    ring, inner = optimizer._ring(), optimizer._inner
    check_parts(inner, variables, ring)
    shared = optimizer.shared(inner.variables), optimizer.shared(variables)
    give_values(*shared, ring, model_group(variables))
    settings.require_same_settings(optimizer.settings(), ring)
    optimizer.take_wholes()
