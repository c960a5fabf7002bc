"""Makes the states of random generators (Dropout, noise, augmentation) differ between ranks.

A program seeds all ranks alike, for equal weights and shuffling. Then all draw the same masks, too.
So a generator in the same state on several ranks gets another seed on all but the first. States are
compared, not their origin: repeating it repairs what a checkpoint has made equal again.

An optimizer's noise must be equal on all ranks instead, or their weights would differ.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.parts.replicas import make_alike, model_group
from ringreduce.keras.wrappable import all_within
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow.private import graphs_being_traced
from ringreduce.tensorflow.variables import path_of


def fold_seeds(source: Any, communicator: Communicator | None = None) -> None:
    """Make the random numbers of `source` differ between ranks, where they do not.

    Collective. `DistributedOptimizer` and `DistributedGradientTape` do it for all generators of a
    traced training step, `rr.fit` and `rr.callbacks.Together` for those of the model. Use it for
    the rest: augmentation layers in a `tf.data` pipeline, and models trained eagerly. `source` is a
    layer, a model, a `keras.random.SeedGenerator`, or a list of these; built, and in the same order
    on all ranks. Those of a model with split layers become equal on the ranks of its model group.
    """
    variables: list[Any] = []
    for part in keras.tree.flatten(source):
        is_generator = isinstance(part, keras.random.SeedGenerator)
        variables += [part.state] if is_generator else part.variables
    states = list(filter(is_seed_state, variables))
    make_alike(states, model_group(variables))
    make_different(states, communicator or default_communicator())


def is_seed_state(variable: Any) -> bool:
    """Whether a variable is the state of a Keras `SeedGenerator`."""
    name = str(variable.name).partition(":")[0].rpartition("/")[2]
    return name.startswith("seed_generator_state") and tuple(variable.shape) == (2,)


def make_different(states: Sequence[Any], communicator: Communicator) -> None:
    """Change those of `states` that a lower rank has too. Collective; order does not matter."""
    if communicator.size == 1:
        return
    numbers = [[int(number) for number in np.asarray(state.numpy())] for state in states]
    gathered = communicator.all_gather_object(numbers, signature=signature_of("seeds"))
    lower = [value for others in gathered[: communicator.rank] for value in others]
    for state, value in zip(states, numbers, strict=True):
        if value in lower:
            state.assign(np.array([folded(*value, communicator.rank), value[1]], np.int64))


def folded(*numbers: int) -> int:
    """A seed made of `numbers`, from 0 to 2^31 - 1."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


def seed_states_in_use() -> list[Any]:
    """States that the function being traced has used, in the same order on all ranks; or none."""
    watched = [v for graph in graphs_being_traced() for v in graph._watched_variables]
    by_id = {id(variable): variable for variable in watched if is_seed_state(variable)}
    return sorted(by_id.values(), key=path_of)


def states_in(optimizer: Any) -> list[Any]:
    """The states of random generators that an optimizer, or one in it, has as attributes."""
    kinds = keras.random.SeedGenerator, tf.random.Generator
    held = [value for member in all_within(optimizer) for value in vars(member).values()]
    return [value.state for value in held if isinstance(value, kinds)]
