"""`DistributedOptimizer(shard_state=True)`: each rank updates its share of the weights.

    whole weights --slices--> stand-ins   gradients --reduce-scatter--> means of the slices
         ^                                                                  |
         +-------- all-gather <-- stand-ins <-- the inner optimizer's update

The inner optimizer is built for stand-ins, flat variables of this rank's ranges, so it keeps and
moves one part in `size` of its state (ZeRO stage 1: Rajbhandari et al., "ZeRO: memory optimizations
toward training trillion parameter models", SC 2020; Xu et al., "Automatic cross-replica sharding of
weight update in data-parallel training", 2020). The whole variable is the authority: a step takes
its slices from there, so what callbacks and `set_weights` have changed counts.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.layers.part import FlatPart, mark, part_of, pieces_in
from ringreduce.keras.optimizer.accepted import require_elementwise
from ringreduce.keras.optimizer.pieces import joint
from ringreduce.keras.optimizers_in import all_within, state_for
from ringreduce.keras.strategies.base import Accumulate, EveryStep, Strategy
from ringreduce.pure.buckets import GradientSpec
from ringreduce.tensorflow.sharding import ShardedBuckets, piece_of
from ringreduce.tensorflow.variables import path_of, plain_variable
from ringreduce.vocabulary.config import elastic_minimum
from ringreduce.vocabulary.errors import ConfigError

_Apply = Callable[[Sequence[Any], Sequence[Any]], None]


def refuse_divided(inner: Any) -> None:
    """ConfigError if another wrapper has divided the state of `inner`."""
    if any(isinstance(part, FlatPart) for _, part in pieces_in(inner.variables)):
        raise ConfigError(
            f"got an optimizer ({inner.name}) of which another DistributedOptimizer has divided "
            "the state among the ranks",
            remedy="Keep that one, model.compile(model.optimizer, ...), or make a new optimizer.",
        )


def refuse_unshardable(inner: Any, strategy: Strategy, compression: Any, update_rows: str) -> None:
    """ConfigError for what needs whole variables in the update, or whole state on each rank."""
    require_elementwise(inner, "has shard_state=True, and {}")
    is_elastic = elastic_minimum() is not None
    reasons = {
        f"strategy={strategy!r}": not isinstance(strategy, (EveryStep, Accumulate)),
        f"compression={compression!r}": compression != "none",
        f"update_rows={update_rows!r}": update_rows != "all",
        "use_ema": any(getattr(one, "use_ema", False) for one in all_within(inner)),
        "elastic training, in which a lost rank takes its share with it": is_elastic,
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        text = f"got shard_state=True with {'; '.join(found)}"
        raise ConfigError(text, remedy="Leave one of them out.")


def weights_to_divide(wrapper: Any) -> int:
    """How many weights each rank updates whole, and would sooner update in shares.

    With less than two numbers of state for a weight, dividing costs what it saves.
    """
    options = wrapper.options
    if options["shard_state"] or not wrapper.built:
        return 0
    how = options["strategy"], options["compression"], options["update_rows"]
    try:
        refuse_unshardable(wrapper._inner, *how)
    except ConfigError:
        return 0
    wholes = [each for each in wrapper.trained if part_of(each) is None]
    return sum(math.prod(v.shape) for v in wholes if len(state_for(wrapper._inner, v)) > 1)


def _update_out_of_place(stand_in: Any) -> None:
    """Have what is added to a stand-in make a new value: it shares the whole's, which stays.

    In place TensorFlow would first copy that.
    """
    here: Any = weakref.ref(stand_in)
    stand_in.assign_add = lambda delta: here().assign(here() + delta)
    stand_in.assign_sub = lambda delta: here().assign(here() - delta)


class Sharding:
    """The shares of what one optimizer updates; `originals` are all variables that it trains.

    Builds `inner`, anew if it is built. Of these variables `divided` are sharded, others stay as
    they are. `options` are the optimizer's. Nothing travels.
    """

    def __init__(
        self,
        inner: Any,
        originals: Sequence[Any],
        divided: Sequence[Any],
        ring: Communicator,
        options: Mapping[str, Any],
    ) -> None:
        self.originals, self._sharded, self._ring = list(originals), divided, ring
        self._sparse_as_dense = options["sparse_as_dense"]
        for variable in self._sharded:
            dtype = tf.as_dtype(variable.dtype).name
            has_constraint = getattr(variable, "constraint", None) is not None
            if has_constraint or dtype not in ("float32", "float64"):
                what = "a constraint, which looks at all of it" if has_constraint else dtype
                raise ConfigError(
                    f"has shard_state=True, and {path_of(variable)} with {what}",
                    **ring.config.who,
                    remedy="Leave that out, or shard_state=True.",
                )
        specs = [
            GradientSpec(path_of(v), tuple(v.shape), tf.as_dtype(v.dtype).name)
            for v in self._sharded
        ]
        how = options["bucket_bytes"], options["check_numerics"]
        self._buckets = ShardedBuckets(ring, specs, *how)
        every = [self._buckets.pieces_of(rank) for rank in range(ring.size)]
        # By the identity of the whole, its number and its stand-in.
        self._stand_ins: dict[int, tuple[int, Any]] = {}
        for number, variable in enumerate(self._sharded):
            ranges = tuple((p.first, p.first + p.length) for p in (one[number] for one in every))
            part = FlatPart(ring, tuple(variable.shape), ranges=ranges)
            stand_in = keras.Variable("zeros", part.own_shape, variable.dtype, name=variable.name)
            private.set_path(stand_in, variable.path)
            _update_out_of_place(plain_variable(stand_in))
            self._stand_ins[id(plain_variable(variable))] = number, mark(stand_in, part)
        # The state that was there before it was divided.
        self._wholes = list(map(np.array, inner.variables)) if inner.built else None
        for one in all_within(inner) if inner.built else ():
            private.unbuild(one)
        inner.build([self.stand_in(variable) for variable in originals])
        for one in all_within(inner):
            private.decay_alike(one, [(v, self.stand_in(v)) for v in self._sharded])

    def stand_in(self, variable: Any) -> Any:
        """Return what the inner optimizer has for `variable`: its stand-in, or itself."""
        return self._stand_ins.get(id(plain_variable(variable)), (0, variable))[1]

    def mean(
        self, ring: Communicator, gradients: Sequence[Any], paths: Any, variables: Sequence[Any]
    ) -> list[Any]:
        """Like `GradientBridge.mean`, but of sharded variables only this rank's pieces, flat."""
        given: list[Any] = [None] * len(self._sharded)
        places = [self._number(v) for v in variables]
        for place, gradient, variable in zip(places, gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices) and self._sparse_as_dense:
                gradient = tf.convert_to_tensor(gradient)
            elif isinstance(gradient, tf.IndexedSlices):
                raise ConfigError(
                    f"has shard_state=True, and a gradient of {path_of(variable)} in rows",
                    **ring.config.who,
                    remedy="Pass sparse_as_dense=True too; for large tables leave shard_state out.",
                )
            given[place] = gradient
        found = self._buckets.scatter(given)
        return [found[place] for place in places]

    def _slice(self, variable: Any, number: int) -> Any:
        return piece_of(variable, self._buckets.pieces[number])

    def update(
        self, inner: Any, apply: _Apply, means: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Have `apply` update stand-ins by `means` of their pieces; give all ranks the wholes."""
        stand_ins = [self.stand_in(variable) for variable in variables]
        for variable, stand_in in zip(variables, stand_ins, strict=True):
            if stand_in is not variable:
                stand_in.assign(self._slice(variable, self._number(variable)))
        joint(inner, means, stand_ins, apply)
        if not self._sharded:
            return
        given = {self._number(v): m for v, m in zip(variables, means, strict=True) if self.has(v)}
        present = [given.get(number) is not None for number in range(len(self._sharded))]
        own = [
            tf.convert_to_tensor(self.stand_in(v)) if moved else self._slice(v, number)
            for number, (v, moved) in enumerate(zip(self._sharded, present, strict=True))
        ]

        def assign(wholes: Sequence[Any]) -> None:
            for variable, whole, moved in zip(self._sharded, wholes, present, strict=True):
                if moved:
                    variable.assign(whole)

        self._buckets.gather(own, present, assign)

    def has(self, variable: Any) -> bool:
        """Whether the update of `variable` is divided."""
        return id(plain_variable(variable)) in self._stand_ins

    def _number(self, variable: Any) -> int:
        return self._stand_ins[id(plain_variable(variable))][0]

    def describe(self, inner: Any) -> str:
        """Say in a sentence how much of the optimizer's state each rank keeps."""
        own, whole = 0, 0
        for state in inner.variables:
            itemsize, part = tf.as_dtype(state.dtype).size, part_of(state)
            own += math.prod(state.shape) * itemsize
            whole += math.prod(state.shape if part is None else part.shape) * itemsize
        count = sum(math.prod(variable.shape) for variable in self._sharded)
        return (
            f"each of {self._ring.size} ranks updates its share of {count:,} weights, and keeps "
            f"{own / 1e6:.3g} of {whole / 1e6:.3g} MB of {inner.name}'s state"
        )

    def take_wholes(self, inner: Any) -> None:
        """Give `inner` its pieces of the state that rank 0's had undivided, if any. Collective."""
        wholes, self._wholes = self._wholes, None
        if not self._ring.broadcast_object(wholes is not None):
            return
        for number, variable in enumerate(inner.variables):
            part = part_of(variable)
            shape = tuple(variable.shape) if part is None else part.shape
            dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
            whole = np.zeros(shape, dtype) if wholes is None else np.array(wholes[number], dtype)
            self._ring.broadcast(whole.reshape(-1))
            variable.assign(whole if part is None else part.piece(whole))
