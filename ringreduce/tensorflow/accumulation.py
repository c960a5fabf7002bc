"""Gradients of several steps added up on each rank, to be reduced together.

    step       1        2        3        4        5 ...
               add      add      add      add
               -        -        -        reduce, apply, clear        (steps = 4)

The sums lie in variables that nobody saves: they are the wrapper's, not the optimizer's. All ranks
count the same steps, so that all reach the condition's same side.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringreduce.tensorflow.places import vouch_for_branch

__all__ = ["Accumulator", "Kind", "weighted"]


class Kind(enum.Enum):
    """How a variable's gradients of several steps, and of all ranks, become one."""

    MEAN = enum.auto()
    # Of this rank alone.
    LOCAL = enum.auto()
    # For what is no gradient but a new value, such as the largest number seen.
    MAXIMUM = enum.auto()


class _Cycle:
    """What was added up since the last reduction, for one set of variables.

    Attributes:
        count: how many steps there were, in all.
        own, mean: the sums of this rank's weights, and of the ranks' average weights.
        sums: of gradients, by variable.
    """

    def __init__(self) -> None:
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.own, self.mean = (tf.Variable(0.0, trainable=False) for _ in range(2))
        self.sums: dict[int, Any] = {}


class Accumulator:
    """Sums of gradients by variable.

    Args:
        steps: how many steps are added up.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        # An optimizer may be applied to several sets of variables in turn, each with its own steps.
        self._cycles: dict[tuple[int, ...], _Cycle] = {}

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        kinds: Sequence[Kind],
        weight: tuple[Any, Any],
        flush: Callable[[list[Any]], None],
    ) -> None:
        """Add a step's gradients; every `steps` times call `flush` with what they come to.

        In a graph `flush` is traced once, inside a branch of `tf.cond` whose condition is the same
        on all ranks.

        Args:
            gradients: tensors, `tf.IndexedSlices`, or None; in the order of `variables`.
            variables: theirs; sums are kept by variable.
            kinds: what is to be made of each.
            weight: what this rank's gradients of the step count, and what those of all ranks
                count on average; scalar float32 tensors.
            flush: gets a tensor, or None, for each variable: the sum of weighted gradients,
                divided so that the plain mean over the ranks is the mean over all steps and
                ranks by their weights; for local ones that over this rank's.
        """
        cycle = self._cycle_of(gradients, variables, kinds)
        own, mean = weight
        for gradient, variable, kind in zip(gradients, variables, kinds, strict=True):
            if gradient is not None:
                _add(cycle.sums[id(variable)], gradient, kind, own)
        cycle.own.assign_add(own)
        cycle.mean.assign_add(mean)
        is_due = tf.equal(cycle.count.assign_add(1) % self.steps, 0)
        # A variable that had a gradient in an earlier step only is part of the mean too.
        sums = [cycle.sums.get(id(variable)) for variable in variables]

        def reduce() -> Any:
            vouch_for_branch()
            divisors = {Kind.MEAN: cycle.mean, Kind.LOCAL: cycle.own}
            flush(
                [
                    None if total is None else _result(total, variable, divisors.get(kind))
                    for total, variable, kind in zip(sums, variables, kinds, strict=True)
                ]
            )
            for total, kind in zip(sums, kinds, strict=True):
                if total is not None:
                    total.assign(_empty(total.shape, total.dtype, kind))
            cycle.own.assign(0.0)
            cycle.mean.assign(0.0)

        tf.cond(is_due, reduce, lambda: None)

    def _cycle_of(
        self, gradients: Sequence[Any], variables: Sequence[Any], kinds: Sequence[Kind]
    ) -> _Cycle:
        # Out of the function that is being traced: they outlive it.
        with tf.init_scope():
            key = tuple(map(id, variables))
            if key not in self._cycles:
                self._cycles[key] = _Cycle()
            cycle = self._cycles[key]
            for gradient, variable, kind in zip(gradients, variables, kinds, strict=True):
                if gradient is not None and id(variable) not in cycle.sums:
                    # 16-bit gradients are added up in float32.
                    wide = tf.as_dtype(variable.dtype)
                    wide = wide if wide == tf.float64 else tf.float32
                    start = _empty(variable.shape, wide, kind)
                    cycle.sums[id(variable)] = tf.Variable(start, trainable=False)
        return cycle


def _empty(shape: Any, dtype: Any, kind: Kind) -> Any:
    return tf.fill(shape, tf.constant(dtype.min if kind is Kind.MAXIMUM else 0, dtype))


def _result(total: Any, variable: Any, divisor: Any) -> Any:
    value = tf.convert_to_tensor(total)
    if divisor is not None:
        value = tf.math.divide_no_nan(value, tf.cast(divisor, value.dtype))
    return tf.cast(value, variable.dtype)


def _add(total: Any, gradient: Any, kind: Kind, own: Any) -> None:
    if kind is Kind.MAXIMUM:
        value = weighted(tf.cast(gradient, total.dtype), kind, own)
        total.assign(tf.maximum(total, value))
    elif isinstance(gradient, tf.IndexedSlices):
        values = weighted(tf.cast(gradient.values, total.dtype), kind, own)
        total.scatter_add(tf.IndexedSlices(values, gradient.indices))
    else:
        total.assign_add(weighted(tf.cast(gradient, total.dtype), kind, own))


def weighted(gradient: Any, kind: Kind, own: Any) -> Any:
    """`gradient` times `own`; what counts 0 is left out, even if it is NaN."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = weighted(gradient.values, kind, own)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if kind is Kind.MAXIMUM:
        return tf.where(own > 0, gradient, tf.constant(gradient.dtype.min, gradient.dtype))
    return tf.math.multiply_no_nan(gradient, tf.cast(own, gradient.dtype))
