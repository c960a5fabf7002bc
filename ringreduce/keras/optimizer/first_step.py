"""Prepares the first step: ranks check, compare, and begin with rank 0's values of what is trained.

In a graph this happens while tracing. Eagerly gradients were computed with the old values: a rank
whose values differed is left out of the mean of that step. Ranks agree on when, since each decides
by the variables alone: those that it has not seen before.
"""

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.checks.elastic_refusals import facts_of, refuse
from ringreduce.keras.checks.model_in_fit import model_in_fit
from ringreduce.keras.checks.models import refuse_scales, refuse_strategy
from ringreduce.keras.checks.seeds import (
    is_seed_state,
    make_unlike,
    seed_states_in_use,
    seeds_of,
    states_in,
)
from ringreduce.keras.checks.settings import (
    Settings,
    digest_of,
    refuse_unlike,
    require_same_settings,
)
from ringreduce.keras.checks.warnings import (
    Untrained,
    compare_rows,
    warn_of_equal_draws,
    warn_of_whole_data,
)
from ringreduce.keras.checks.whole_files import save_whole_files
from ringreduce.keras.layers.groups import make_alike, model_group
from ringreduce.keras.layers.part import is_own_piece
from ringreduce.keras.optimizer.pieces import check_parts
from ringreduce.keras.recording.loops import recorder_of
from ringreduce.keras.repeating import is_repeating
from ringreduce.keras.weighting import Averaging, weighted
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow import draws
from ringreduce.tensorflow import variables as tf_variables
from ringreduce.tensorflow.agreement import count_true
from ringreduce.tensorflow.python_calls import call
from ringreduce.tensorflow.variables import plain_variable
from ringreduce.vocabulary.config import elastic_minimum
from ringreduce.vocabulary.errors import ConfigError

_log = logging.getLogger(__name__)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, communicator: Communicator | None = None
) -> None:
    """Give `variables` on every rank the values they have on rank `root_rank`.

    Inside a `tf.function` they get them whenever it runs, where this stands in it.

    `DistributedOptimizer` does this itself for what it trains. Use it for the rest, such as moving
    averages of normalization layers after loading them on one rank. `variables` are
    `keras.Variable` or `tf.Variable`, the same on all ranks, such as ``model.variables``. States of
    Keras's random generators stay as they are, or ranks would draw the same numbers; and so do
    parts, of which each rank has its own piece.

    Raises:
        ConfigError: inside a branch of `tf.cond`.
        MismatchError: the ranks' variables differ in number, shape or dtype.
    """
    ring = communicator or default_communicator()
    shared = [each for each in variables if not (is_seed_state(each) or is_own_piece(each))]
    if tf.executing_eagerly():
        tf_variables.broadcast_variables(shared, ring, root_rank)
    elif shared and ring.size > 1:
        paths, values = map(tf_variables.path_of, shared), [tf.convert_to_tensor(v) for v in shared]
        give = partial(tf_variables.broadcast_values, list(paths), ring, root_rank)
        shapes = [(value.shape, value.dtype) for value in values]
        received = call(ring, "copy variables", lambda *arrays: give(arrays), values, shapes)
        for variable, value in zip(shared, received, strict=True):
            variable.assign(value)


def prepare(
    optimizer: Any, variables: Sequence[Any], gradients: list[Any], kinds: Sequence[Averaging]
) -> list[Any]:
    """Give all ranks rank 0's values in a first step; return the gradients to use. Collective.

    `optimizer` is a `DistributedOptimizer`. Raises ConfigError for what it cannot train,
    MismatchError where ranks differ in settings.
    """
    refuse_strategy()
    ring, inner, initial = optimizer._ring(), optimizer._inner, optimizer._initial
    optimizer.recorder = optimizer.recorder or recorder_of(optimizer, ring)
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
    model = model_in_fit()
    # Eagerly this step has changed moving averages.
    tells_others = model is not None and not tf.executing_eagerly()
    others = partial(Untrained, model, every) if tells_others else None
    gradients = initial.give(shared, gradients, kinds, ring, state, optimizer.settings, others)
    if initial.are_given:
        with tf.init_scope():
            optimizer.broadcast_state()
            optimizer.take_wholes()
        if model is not None:
            save_whole_files(model, ring)
            warn_of_whole_data(model, ring)
        elif not any(map(is_own_piece, every)) and model_group(every) is None:
            compare_rows(optimizer._bridge, ring)
    return gradients


def make_equal(optimizer: Any, variables: Sequence[Any]) -> None:
    """Give all ranks rank 0's values when `optimizer` is built, eagerly. Collective."""
    ring, inner = optimizer._ring(), optimizer._inner
    check_parts(inner, variables, ring)
    shared = optimizer.shared(inner.variables), optimizer.shared(variables)
    give_values(*shared, ring, model_group(variables))
    require_same_settings(optimizer.settings(), ring)
    optimizer.take_wholes()


class InitialValues:
    """Records which variables have received rank 0's values. Keeps none of them alive."""

    def __init__(self) -> None:
        # By identity, since variables compare by value.
        self._given: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def are_given(self) -> bool:
        """Whether some variables have received them."""
        return bool(self._given)

    def give(
        self,
        variables: Sequence[Any],
        gradients: list[Any],
        kinds: Sequence[Averaging],
        ring: Communicator,
        state: Sequence[Any] = (),
        settings: Callable[[], Sequence[Settings]] | None = None,
        others: Callable[[], Untrained] | None = None,
    ) -> list[Any]:
        """Give all ranks rank 0's values of those of `variables` that have not received them yet.

        Collective where there are any; then random generators that the function being traced has
        used get different states. `state` are further variables, on which gradients do not depend;
        `settings` returns what must be equal; rank 0 warns where what `others` returns is not.
        Returns the gradients to use: `gradients`, of `kinds`, unless this is an eager step and some
        rank had other values.
        """
        new, new_state = self._unknown(variables), self._unknown(state)
        if not new and not new_state:
            return gradients
        own = {id(plain_variable(variable)) for variable in state}
        states = [v for v in seed_states_in_use() if id(plain_variable(v)) not in own]
        drawn, group = draws.drawn() if ring.size > 1 else [], model_group(variables)
        with tf.init_scope():
            if not all(map(tf_variables.is_initialized, (*new_state, *new))):
                # A tf.function that creates variables is traced twice, and they have values only
                # the second time. This trace does not run.
                return gradients
            differed = give_values(new_state, new, ring, group)
            make_alike(states, group)
            if ring.size > 1:
                listed = [] if settings is None else settings()
                untrained = None if others is None else others()
                of_others = None if untrained is None else untrained.digest()
                here = digest_of(listed), of_others, seeds_of(states, drawn)
                told = ring.all_gather_object(here, signature=signature_of("seeds"))
                digests, all_others, seeds = zip(*told, strict=True)
                refuse_unlike(listed, digests, ring)
                are_alike = make_unlike(states, seeds, ring.rank)
                warn_of_equal_draws(itertools.compress(drawn, are_alike), ring)
                if untrained is not None:
                    untrained.warn_if_unlike(all_others, ring)
        plain_ones = map(plain_variable, (*new_state, *new))
        self._given.update((id(plain), plain) for plain in plain_ones)
        if not tf.executing_eagerly() or (ring.size == 1 and group is None):
            return gradients
        return _without_others(gradients, kinds, not differed, ring)

    def known(self, variables: Iterable[Any]) -> list[Any]:
        """Select those of `variables` that have received them."""
        return [v for v in variables if self._has(v)]

    def _unknown(self, variables: Iterable[Any]) -> list[Any]:
        by_id = {id(plain_variable(v)): v for v in variables}
        return [v for v in by_id.values() if not self._has(v)]

    def _has(self, variable: Any) -> bool:
        plain = plain_variable(variable)
        return self._given.get(id(plain)) is plain


def give_values(
    state: Sequence[Any], variables: Sequence[Any], ring: Communicator, group: Communicator | None
) -> bool:
    """Give all ranks rank 0's values; return whether `variables` differed on one of its `group`."""
    changed = tf_variables.broadcast_variables(variables, ring, state=state)
    of_state = {id(variable) for variable in state}
    differed = any(id(variable) not in of_state for variable in changed)
    make_alike(state, group)
    if make_alike(variables, group):
        return True
    return differed if group is None else count_true(group, differed) > 0


def _without_others(
    gradients: list[Any], kinds: Sequence[Averaging], usable: bool, ring: Communicator
) -> list[Any]:
    """Gradients whose mean over all ranks is the mean over the ranks where they are usable."""
    useful = count_true(ring, usable)
    if useful == ring.size:
        return gradients
    if not useful:
        raise ConfigError(
            "computed its first gradients with other weights than the ranks that have the other "
            "pieces of split layers",
            **ring.config.who,
            remedy="Call optimizer.build(model.trainable_variables) before an eager loop.",
        )
    _log.warning(
        "[%d/%d] %d of the ranks began with other weights than rank 0; their gradients of the "
        "first step were left out. Build the optimizer before an eager loop, or call "
        "broadcast_variables.",
        *(*ring.config.who.values(), ring.size - useful),
    )
    factor = ring.size / useful if usable else 0.0
    pairs, unshared = zip(gradients, kinds, strict=True), (Averaging.LOCAL, Averaging.PART)
    return [g if kind in unshared else weighted(g, factor) for g, kind in pairs]
