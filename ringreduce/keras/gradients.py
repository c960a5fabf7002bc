"""The gradients of a step: how those of all ranks combine, and those of several steps.

    step       1        2        3        4        5 ...
               add      add      add      add
               -        -        -        reduce, apply, clear        (accumulate_steps = 4)

The sums are variables of the wrapper, not of the optimizer, and are not saved. All ranks count the
same steps, so all take the same branch of the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.weighting import Kind, Weight, weighted
from ringreduce.tensorflow import GradientBridge, path_of
from ringreduce.tensorflow.collectives import all_reduce
from ringreduce.tensorflow.control_flow import vouch_for_branch
from ringreduce.vocabulary.types import ReduceOp


class Reducer:
    """Combines all ranks' gradients, by kind.

    `op`, MEAN or SUM, is for those of kinds MEAN and PART. `scale_local` makes LOCAL ones those of
    the mean loss of all ranks, as MEAN's are, instead of this rank's loss.
    """

    def __init__(
        self,
        bridge: GradientBridge,
        communicator: Communicator,
        op: ReduceOp,
        scale_local: bool = False,
    ) -> None:
        self._bridge, self._communicator, self._op = bridge, communicator, op
        self.scale_local = scale_local

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        kinds: Sequence[Kind],
        weight: Weight | None = None,
    ) -> list[Any]:
        """Average (or add) MEAN, take the maximum of MAXIMUM, keep LOCAL and PART gradients.

        `gradients` are this rank's: tensors, `tf.IndexedSlices` or None; `variables`, for a tape
        also other sources, and `kinds` are equal on all ranks. `weight` is this rank's in the mean;
        None: all are equal. Raises as `GradientBridge.mean`.
        """
        size = float(self._communicator.size)
        factors: dict[Kind, Any] = {}
        if weight is not None:
            own = weight.factor / size if self.scale_local else tf.math.sign(weight.own)
            factors = {Kind.MEAN: weight.factor, Kind.LOCAL: own, Kind.MAXIMUM: weight.own}
        elif self.scale_local and size > 1:
            factors = {Kind.LOCAL: 1 / size}
        gradients = [
            weighted(gradient, kind, factors[kind]) if kind in factors else gradient
            for gradient, kind in zip(gradients, kinds, strict=True)
        ]
        # The others are not compared: ranks may have other local variables, with other names.
        shared = [number for number, kind in enumerate(kinds) if kind is Kind.MEAN]
        means: dict[int, Any] = {}
        if shared:
            paths = [_name(variables[number], number) for number in shared]
            sent = [gradients[number] for number in shared]
            found = self._bridge.mean(self._communicator, sent, paths)
            means = dict(zip(shared, found, strict=True))
        final = []
        for number, (gradient, kind) in enumerate(zip(gradients, kinds, strict=True)):
            if kind is Kind.MAXIMUM and gradient is not None:
                final.append(all_reduce(gradient, self._communicator, ReduceOp.MAX))
                continue
            found = means[number] if kind is Kind.MEAN else self._bridge.own(gradient)
            is_sum = self._op is ReduceOp.SUM and size > 1 and kind is not Kind.LOCAL
            final.append(weighted(found, kind, size) if is_sum else found)
        return final


def _name(variable: Any, number: int) -> str:
    """A variable's path; of another source of a tape its number: names differ between ranks."""
    is_variable = isinstance(variable, (tf.Variable, keras.Variable))
    return path_of(variable) if is_variable else f"source {number}"


class Accumulate:
    """Reduces the mean of `steps` steps; in a graph in a branch that all ranks take together.

    With `keeps_rows` the mean of a sparse gradient is sparse as well: the rows of any of the steps.
    """

    def __init__(self, steps: int, keeps_rows: bool = False) -> None:
        self.steps, self._keeps_rows = steps, keeps_rows
        # One optimizer may be applied to several sets of variables, each with its own steps.
        self._cycles: dict[tuple[int, ...], _Cycle] = {}

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        kinds: Sequence[Kind],
        weight: Weight | None,
        reducer: Reducer,
        apply: Callable[[Sequence[Any], Sequence[Any]], None],
    ) -> None:
        """Add a step's gradients; every `steps` times reduce their mean and `apply` it."""
        cycle = self._cycle_of(gradients, variables, kinds)
        one = tf.constant(1.0)
        weight = weight or Weight(one, one)
        for gradient, variable, kind in zip(gradients, variables, kinds, strict=True):
            if gradient is not None:
                own = weight.mean if kind is Kind.PART else weight.own
                _add(cycle.sums[id(variable)], gradient, kind, own)
                _note_rows(cycle.rows.get(id(variable)), gradient)
        cycle.own.assign_add(weight.own)
        cycle.mean.assign_add(weight.mean)
        is_due = tf.equal(cycle.count.assign_add(1) % self.steps, 0)
        # A variable that had a gradient only in an earlier step is part of the mean too.
        sums = [cycle.sums.get(id(variable)) for variable in variables]
        rows = [cycle.rows.get(id(variable)) for variable in variables]

        def apply_mean() -> None:
            vouch_for_branch()
            # Divided so that the plain mean over the ranks is the weighted mean over all steps and
            # ranks; for local variables over this rank's steps.
            of_local = cycle.mean if reducer.scale_local else cycle.own
            divisors = {Kind.MEAN: cycle.mean, Kind.PART: cycle.mean, Kind.LOCAL: of_local}
            means = [
                None if total is None else _divided(total, seen, variable, divisors.get(kind))
                for total, seen, variable, kind in zip(sums, rows, variables, kinds, strict=True)
            ]
            apply(reducer.reduce(means, variables, kinds), variables)
            for total, seen, kind in zip(sums, rows, kinds, strict=True):
                if total is not None:
                    _clear(total, seen, kind)
            cycle.own.assign(0.0)
            cycle.mean.assign(0.0)

        tf.cond(is_due, apply_mean, lambda: None)

    def _cycle_of(
        self, gradients: Sequence[Any], variables: Sequence[Any], kinds: Sequence[Kind]
    ) -> _Cycle:
        # Outside of the function that is being traced, since they outlive it.
        with tf.init_scope():
            key = tuple(map(id, variables))
            if key not in self._cycles:
                self._cycles[key] = _Cycle()
            cycle = self._cycles[key]
            for gradient, variable, kind in zip(gradients, variables, kinds, strict=True):
                if gradient is not None and id(variable) not in cycle.sums:
                    # 16-bit gradients are added up in float32.
                    dtype = tf.float64 if tf.as_dtype(variable.dtype) == tf.float64 else tf.float32
                    start = _empty(variable.shape, dtype, kind)
                    cycle.sums[id(variable)] = tf.Variable(start, trainable=False)
                    if self._keeps_rows and isinstance(gradient, tf.IndexedSlices):
                        none = tf.zeros(variable.shape[0], tf.bool)
                        cycle.rows[id(variable)] = tf.Variable(none, trainable=False)
        return cycle


class _Cycle:
    """Sums since the last reduction: of this rank's weights, the ranks' means, and gradients."""

    def __init__(self) -> None:
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.own, self.mean = (tf.Variable(0.0, trainable=False) for _ in range(2))
        self.sums: dict[int, Any] = {}
        # Of tables, which rows had a gradient; the sums are 0 in all others.
        self.rows: dict[int, Any] = {}


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


def _note_rows(seen: Any, gradient: Any) -> None:
    if seen is None:
        return
    if isinstance(gradient, tf.IndexedSlices):
        is_seen = tf.ones_like(gradient.indices, tf.bool)
        seen.scatter_update(tf.IndexedSlices(is_seen, gradient.indices))
    else:
        seen.assign(tf.ones_like(seen))


def _clear(total: Any, seen: Any, kind: Kind) -> None:
    if seen is None:
        total.assign(_empty(total.shape, total.dtype, kind))
        return
    rows = tf.where(seen)[:, 0]
    total.scatter_update(tf.IndexedSlices(tf.zeros_like(tf.gather(total, rows)), rows))
    seen.assign(tf.zeros_like(seen))


def _divided(total: Any, seen: Any, variable: Any, divisor: Any) -> Any:
    if seen is not None:
        rows = tf.where(seen)[:, 0]
        values = _divided(tf.gather(total, rows), None, variable, divisor)
        return tf.IndexedSlices(values, rows, tf.constant(tuple(variable.shape), tf.int64))
    value = tf.convert_to_tensor(total)
    if divisor is not None:
        value = tf.math.divide_no_nan(value, tf.cast(divisor, value.dtype))
    return tf.cast(value, variable.dtype)


def _empty(shape: Any, dtype: Any, kind: Kind) -> Any:
    return tf.fill(shape, tf.constant(dtype.min if kind is Kind.MAXIMUM else 0, dtype))
