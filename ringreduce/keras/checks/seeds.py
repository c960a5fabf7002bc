"""Makes random numbers differ between ranks (Dropout, noise, augmentation), where they did not.

A program seeds all ranks alike, for equal weights and shuffling. Then all draw the same masks, too.
So a generator in the same state on several ranks gets another seed on all but the first. States are
compared, not their origin: repeating it repairs what a checkpoint has made equal again. What has no
state that can be set, such as ``tf.random.normal``, differs in steps that are traced for `rr.fit`.

An optimizer's noise must be equal on all ranks instead, or their weights would differ.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private
from ringreduce.keras.layers.groups import make_alike, model_group
from ringreduce.keras.optimizers_in import all_within
from ringreduce.keras.step import APART, Step, put_around
from ringreduce.pure.seeds import folded
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow import draws
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.private import graphs_being_traced
from ringreduce.tensorflow.variables import path_of

_GENERATORS = keras.random.SeedGenerator, tf.random.Generator


def fold_seeds(source: Any, communicator: Communicator | None = None) -> None:
    """Make the random numbers of `source` differ between ranks, where they do not.

    Collective. `DistributedOptimizer` and `DistributedGradientTape` do it for all generators of a
    traced training step, `rr.fit` and `rr.callbacks.Together` for those of the model. Use it for
    the rest: augmentation layers in a `tf.data` pipeline, and models trained eagerly. `source` is a
    layer, a model, a `keras.random.SeedGenerator`, a `tf.random.Generator`, or a list of these;
    built, and in the same order on all ranks. Generators of a layer are those that are its
    attributes. Those of a model with split layers become equal on the ranks of its model group.
    """
    variables = _variables_of(source)
    states = list(filter(is_seed_state, variables))
    make_alike(states, model_group(variables))
    make_different(states, communicator or default_communicator())


def states_of(source: Any) -> list[Any]:
    """The states that `fold_seeds` changes."""
    return list(filter(is_seed_state, _variables_of(source)))


def _variables_of(source: Any) -> list[Any]:
    variables: list[Any] = []
    for part in keras.tree.flatten(source):
        is_generator = isinstance(part, _GENERATORS)
        variables += [part.state] if is_generator else part.variables
        variables += [] if is_generator else states_of_tensorflow(part)
    return variables


def is_seed_state(variable: Any) -> bool:
    """Whether a variable is the state of a Keras `SeedGenerator`, or of a `tf.random.Generator`."""
    is_of_keras = _named(variable, "seed_generator_state") and tuple(variable.shape) == (2,)
    return is_of_keras or _is_of_tensorflow(variable)


def _is_of_tensorflow(variable: Any) -> bool:
    # Those of Philox and ThreeFry.
    is_state = variable.dtype == tf.int64 and tuple(variable.shape) in ((3,), (2,))
    return is_state and _named(variable, "StateVar")


def _named(variable: Any, name: str) -> bool:
    return str(variable.name).partition(":")[0].rpartition("/")[2].startswith(name)


def states_of_tensorflow(layer: Any) -> list[Any]:
    """The states of each `tf.random.Generator` that is an attribute of a layer, or of one in it.

    Keras does not list them among a layer's variables.
    """
    layers = [layer, *private.layers_of(layer)]
    held = [value for part in layers for value in vars(part).values()]
    return [value.state for value in held if isinstance(value, tf.random.Generator)]


def make_different(states: Sequence[Any], communicator: Communicator) -> None:
    """Change those of `states` that a lower rank has too. Collective; order does not matter."""
    if communicator.size > 1:
        own = seeds_of(states)
        told = communicator.all_gather_object(own, signature=signature_of("seeds"))
        make_unlike(states, told, communicator.rank)


def seeds_of(states: Sequence[Any], drawn: Sequence[draws.Draw] = ()) -> list[Any]:
    """What a rank tells others of `states`, and of the seeds of what it has `drawn` without any."""
    return [numbers_of(states), [draw.seeds for draw in drawn]]


def make_unlike(states: Sequence[Any], told: Sequence[Any], rank: int) -> list[bool]:
    """`make_different`, on the rank-th of those whose `seeds_of` are `told`, in rank order.

    Returns whether another one has the seeds of each of what this one has drawn.
    """
    lower = [value for numbers, _ in told[:rank] for value in numbers]
    for state, value in zip(states, numbers_of(states), strict=True):
        if value in lower:
            # TensorFlow's begins with how often it has been used.
            place = -1 if _is_of_tensorflow(state) else 0
            value[place] = folded(*value, rank)
            state.assign(np.array(value, np.int64))
    others = [seeds for place, (_, seeds) in enumerate(told) if place != rank]
    return [any(seed in theirs for theirs in others) for seed in told[rank][1]]


def draw_anew(states: Sequence[Any], *numbers: int) -> None:
    """Have a newcomer draw other numbers than the process before it; `numbers` are its own."""
    for state, value in zip(states, numbers_of(states), strict=True):
        place = -1 if _is_of_tensorflow(state) else 0
        value[place] = folded(*value, *numbers)
        state.assign(np.array(value, np.int64))


def numbers_of(states: Sequence[Any]) -> list[list[int]]:
    """The values of `states`, in plain types."""
    return [[int(number) for number in np.asarray(state.numpy())] for state in states]


def draw_apart(model: keras.Model, ring: Communicator) -> None:
    """Have steps of `model` that are traced from now on draw other numbers on each rank of `ring`.

    That is for what has no state, such as ``tf.random.normal``; not in an optimizer.
    """
    kept(model, _Rank).number = ring.rank
    put_around(model, APART, _apart)


class _Rank:
    """A model's rank among those that divide its data."""

    number = 0
    has_begun = False  # eagerly


def _apart(model: keras.Model, step: Step, data: Any) -> Any:
    rank = kept(model, _Rank)
    if not tf.executing_eagerly():
        with draws.apart(rank.number):
            return step(data)
    with contextlib.nullcontext() if rank.has_begun else draws.watched():
        rank.has_begun = True
        return step(data)


def seed_states_in_use() -> list[Any]:
    """States that the function being traced has used, in the same order on all ranks; or none."""
    watched = [v for graph in graphs_being_traced() for v in graph._watched_variables]
    by_id = {id(variable): variable for variable in watched if is_seed_state(variable)}
    return sorted(by_id.values(), key=path_of)


def states_in(optimizer: Any) -> list[Any]:
    """The states of random generators that an optimizer, or one in it, has as attributes."""
    held = [value for member in all_within(optimizer) for value in vars(member).values()]
    return [value.state for value in held if isinstance(value, _GENERATORS)]
