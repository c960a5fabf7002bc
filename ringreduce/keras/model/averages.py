"""What a step changes beside what is trained: moving averages, of each rank's own rows alone.

A normalization layer has some, and so have a layer of spectral normalization, a momentum encoder
and its queue, a layer or model of one's own: they are known by what steps change, wherever they
hang. Rank 0's are those of all when an epoch ends, since rank 0 would save them.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.checks.seeds import is_seed_state
from ringreduce.keras.checks.warnings import warn_of_own_numbers
from ringreduce.keras.layers.part import part_of
from ringreduce.keras.optimizers_in import held_by, wrappers_in
from ringreduce.keras.repeating import repeated
from ringreduce.tensorflow.held import Held
from ringreduce.tensorflow.variables import (
    broadcast_packed,
    differing,
    path_of,
    plain_variable,
    require_alike,
    value_of,
)
from ringreduce.vocabulary.types import ReduceOp

_PLAIN = {type(None), bool, int, float, str, bytes, tuple, list, dict, set}


def untrained(model: Any) -> list[Any]:
    """The numbers in `model` that no distributed optimizer trains, each once, in one order.

    Without states of random generators and of recurrent layers, parts, and what a layer with local
    variables keeps.
    """
    wrappers, held = wrappers_in(model), _held_in(model)
    layers = [layer for layer, _ in held]
    own = [v for wrapper in wrappers for v in wrapper.trained]
    for layer in layers:
        if any(w.is_local(v) for w in wrappers for v in private.made_to_be_trained(layer)):
            own += private.made_not_to_be_trained(layer)
        if isinstance(layer, keras.layers.RNN):  # What a stateful one has read is its rows'.
            own += keras.tree.flatten(layer.states or [])
    left_out = {id(plain_variable(variable)) for variable in own}
    found: dict[int, Any] = {}
    for layer, values in held:
        # Keras lists none of TensorFlow's variables.
        plain = (value for value in values if isinstance(value, tf.Variable))
        found |= {id(plain_variable(v)): v for v in (*layer.non_trainable_weights, *plain)}
    return [
        variable
        for key, variable in found.items()
        if key not in left_out
        and part_of(variable) is None
        and not is_seed_state(variable)
        and (is_average(variable) or _dtype(variable).is_integer or _dtype(variable).is_bool)
    ]


def _held_in(model: Any) -> list[tuple[Any, list[Any]]]:
    """`model` and all layers in it, with what each holds; those too that Keras does not list.

    A subclass of `Sequential` or of a functional model lists those of its constructor alone.
    """
    found: dict[int, tuple[Any, list[Any]]] = {}
    waiting = [model]
    while waiting:
        layer = waiting.pop(0)
        if id(layer) not in found:
            # Few values of a layer are objects of TensorFlow's or Keras's.
            values = [value for value in held_by(layer) if type(value) not in _PLAIN]
            found[id(layer)] = layer, values
            within = (value for value in values if isinstance(value, keras.Layer))
            waiting += [*private.layers_within(layer), *within]
    return list(found.values())


def is_average(variable: Any) -> bool:
    """Whether it can hold an average: a counter, a flag or a generator's state cannot."""
    return bool(_dtype(variable).is_floating or _dtype(variable).is_complex)


def _dtype(variable: Any) -> tf.DType:
    return tf.as_dtype(variable.dtype)


class Averages:
    """Those of `model` in a training, in which the ranks of `ring` divide rows."""

    def __init__(self, model: Any, ring: Communicator) -> None:
        self._model, self._ring = model, ring
        self._before = Held([])
        self._compared: Sequence[Any] = ()  # variables that are alike on all ranks
        # Those of the epoch before: to look through the model takes as long as small steps.
        self._latest: Sequence[Any] | None = None
        # Places of those that have changed in epochs before, where that is all that is asked of an
        # epoch; else None.
        self._moving: list[int] | None = None
        self._has_warned = False

    def begin(self) -> None:
        """Steps begin: what they change is that from now on; and what is new when they end."""
        if self._ring.size > 1:
            latest = self._latest
            self._before = Held(untrained(self._model) if latest is None else latest)

    @property
    def state(self) -> list[Any]:
        """What ranks know of each other's, in plain types, for `join`."""
        return [self._latest is not None, self._moving]

    def join(self, are_compared: bool, moving: list[int] | None) -> None:
        """Go on, as a newcomer that has all values now, where the others have this `state`."""
        if are_compared:
            self._latest = self._compared = untrained(self._model)
        self._moving = moving

    def take_those_of_rank_0(self) -> None:
        """Give all ranks rank 0's of what has changed since on any rank. Collective.

        One exchange, of all that has changed in epochs before; three in the first epoch, and where
        something else has changed on any rank. Whole numbers stay, and rank 0 warns, once, if such
        as have changed differ: where some do, ranks compare them in each epoch until then.
        """
        if self._ring.size == 1:
            return
        variables, before, self._before = untrained(self._model), self._before, Held([])
        self._latest = variables
        if not variables:
            return
        changed = [before.is_changed(variable) for variable in variables]
        result = repeated(self._ring, lambda: self._exchanged(variables, changed))
        [places, packed, apart, self._moving], offset = result, 0
        for variable in (variables[place] for place in places):
            value = value_of(variable)
            there = np.frombuffer(packed, value.dtype, value.size, offset).reshape(value.shape)
            offset += value.nbytes
            if there.tobytes() != value.tobytes():
                variable.assign(there)
        if apart and not self._has_warned:
            self._has_warned = True
            warn_of_own_numbers([variables[place] for place in apart], self._ring)

    def _exchanged(self, variables: Sequence[Any], changed: Sequence[bool]) -> list[Any]:
        """Places of averages, rank 0's bytes of them, places of unequal numbers; then `_moving`.

        In plain types, since a rank that has missed the end gets them from another. Collective.
        """
        ring, moving = self._ring, self._moving
        is_new = list(map(id, variables)) != list(map(id, self._compared))
        if moving is not None:
            averages = [place for place in moving if is_average(self._compared[place])]
            others = set(np.flatnonzero(changed).tolist()) - set(moving)
            known = [self._compared[place] for place in averages]
            needs_more, packed = self._of_rank_0(known, is_new or bool(others))
            if not needs_more:
                return [averages, packed, [], moving]
        bits = np.packbits(np.array(changed, np.uint8)).tobytes()
        gathered = ring.all_gather_object([is_new, bits])
        if any(is_new_there for is_new_there, _ in gathered):
            layout = [(path_of(v), tuple(v.shape), _dtype(v).name) for v in variables]
            require_alike(layout, ring)
            self._compared, moving = variables, None
        masks = [np.frombuffer(bits_there, np.uint8) for _, bits_there in gathered]
        moved = np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(masks))).tolist()
        averages = [place for place in moved if is_average(variables[place])]
        numbers = [place for place in moved if not is_average(variables[place])]
        values = broadcast_packed([value_of(variables[place]) for place in averages], ring)
        unequal = differing([variables[place] for place in numbers], ring) if numbers else []
        apart = [place for place in numbers if any(variables[place] is each for each in unequal)]
        # Whole numbers are compared until some differ.
        is_done = not numbers or self._has_warned or bool(apart)
        moving = sorted({*moved, *(moving or [])}) if is_done else None
        return [averages, b"".join(value.tobytes() for value in values), apart, moving]

    def _of_rank_0(self, variables: Sequence[Any], needs_more: bool) -> tuple[bool, bytes]:
        """Rank 0's bytes of `variables`, and whether any rank `needs_more` than these. Collective.

        All add theirs up, in 8-byte words: rank 0 its values, and the others zeros.
        """
        ring = self._ring
        values = b"".join(value_of(variable).tobytes() for variable in variables)
        words = np.zeros(1 + -(-len(values) // 8), np.int64)
        words[0] = needs_more
        if ring.rank == 0:
            words[1:].view(np.uint8)[: len(values)] = np.frombuffer(values, np.uint8)
        total = ring.all_reduce(words, ReduceOp.SUM)
        return bool(total[0]), total[1:].tobytes()
