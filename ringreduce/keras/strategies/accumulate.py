"""Adds up gradients of several steps on each rank, then reduces and applies them together.

    step       1        2        3        4        5 ...
               add      add      add      add
               -        -        -        reduce, apply, clear        (steps = 4)

The sums are variables of the wrapper, not of the optimizer, and are not saved. All ranks count the
same steps, so all take the same branch of the condition.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringreduce.keras.strategies.step import Reducer, Step
from ringreduce.keras.weighting import Kind, Weight, weighted
from ringreduce.tensorflow.control_flow import vouch_for_branch


class Accumulate:
    """Reduces the mean of `steps` steps; in a graph in a branch that all ranks take together."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        # One optimizer may be applied to several sets of variables, each with its own steps.
        self._cycles: dict[tuple[int, ...], _Cycle] = {}

    def step(self, step: Step, inner: Any, reducer: Reducer) -> None:
        """Add a step's gradients; every `steps` times reduce their mean and apply it."""
        cycle = self._cycle_of(step)
        one = tf.constant(1.0)
        weight = step.weight or Weight(one, one)
        for gradient, variable, kind in zip(
            step.gradients, step.variables, step.kinds, strict=True
        ):
            if gradient is not None:
                _add(cycle.sums[id(variable)], gradient, kind, weight.own)
        cycle.own.assign_add(weight.own)
        cycle.mean.assign_add(weight.mean)
        is_due = tf.equal(cycle.count.assign_add(1) % self.steps, 0)
        # A variable that had a gradient only in an earlier step is part of the mean too.
        sums = [cycle.sums.get(id(variable)) for variable in step.variables]

        def apply() -> None:
            vouch_for_branch()
            # Divided so that the plain mean over the ranks is the weighted mean over all steps and
            # ranks; for local variables over this rank's steps.
            divisors = {Kind.MEAN: cycle.mean, Kind.LOCAL: cycle.own}
            means = [
                None if total is None else _divided(total, variable, divisors.get(kind))
                for total, variable, kind in zip(sums, step.variables, step.kinds, strict=True)
            ]
            inner.apply(reducer.reduce(means, step.variables, step.kinds), step.variables)
            for total, kind in zip(sums, step.kinds, strict=True):
                if total is not None:
                    total.assign(_empty(total.shape, total.dtype, kind))
            cycle.own.assign(0.0)
            cycle.mean.assign(0.0)

        tf.cond(is_due, apply, lambda: None)

    def _cycle_of(self, step: Step) -> _Cycle:
        # Outside of the function that is being traced, since they outlive it.
        with tf.init_scope():
            key = tuple(map(id, step.variables))
            if key not in self._cycles:
                self._cycles[key] = _Cycle()
            cycle = self._cycles[key]
            for gradient, variable, kind in zip(
                step.gradients, step.variables, step.kinds, strict=True
            ):
                if gradient is not None and id(variable) not in cycle.sums:
                    # 16-bit gradients are added up in float32.
                    dtype = tf.float64 if tf.as_dtype(variable.dtype) == tf.float64 else tf.float32
                    start = _empty(variable.shape, dtype, kind)
                    cycle.sums[id(variable)] = tf.Variable(start, trainable=False)
        return cycle


class _Cycle:
    """Sums since the last reduction: of this rank's weights, the ranks' means, and gradients."""

    def __init__(self) -> None:
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.own, self.mean = (tf.Variable(0.0, trainable=False) for _ in range(2))
        self.sums: dict[int, Any] = {}


def _add(total: Any, gradient: Any, kind: Kind, own: Any) -> None:
    if isinstance(gradient, tf.IndexedSlices) and kind is not Kind.MAXIMUM:
        values = weighted(tf.cast(gradient.values, total.dtype), kind, own)
        total.scatter_add(tf.IndexedSlices(values, gradient.indices))
        return
    value = weighted(tf.cast(gradient, total.dtype), kind, own)
    if kind is Kind.MAXIMUM:
        total.assign(tf.maximum(total, value))
    else:
        total.assign_add(value)


def _divided(total: Any, variable: Any, divisor: Any) -> Any:
    value = tf.convert_to_tensor(total)
    if divisor is not None:
        value = tf.math.divide_no_nan(value, tf.cast(divisor, value.dtype))
    return tf.cast(value, variable.dtype)


def _empty(shape: Any, dtype: Any, kind: Kind) -> Any:
    return tf.fill(shape, tf.constant(dtype.min if kind is Kind.MAXIMUM else 0, dtype))
