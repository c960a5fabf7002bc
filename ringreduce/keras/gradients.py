"""The gradients of a step: how those of all ranks combine, and those of several steps.

    step       1        2        3        4        5 ...
               add      add      add      add
               -        -        -        reduce, apply, clear        (accumulate_steps = 4)

The sums are variables of the wrapper, not of the optimizer, and are not saved. All ranks count the
same steps, so all take the same branch of the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.weighting import Kind, Weight, weighted
from ringreduce.tensorflow import GradientBridge, path_of
from ringreduce.tensorflow.collectives import all_reduce
from ringreduce.tensorflow.control_flow import vouch_for_branch
from ringreduce.tensorflow.variables import lasting
from ringreduce.vocabulary.types import ReduceOp


@dataclass(frozen=True)
class Reducer:
    """Combines all ranks' gradients, by kind.

    `op`, MEAN or SUM, is for those of kinds MEAN and PART. `scale_local` makes LOCAL ones those of
    the mean loss of all ranks, as MEAN's are, instead of this rank's loss.
    """

    bridge: GradientBridge
    communicator: Communicator
    op: ReduceOp
    scale_local: bool = False

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
        size = float(self.communicator.size)
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
            owners = [variables[number] for number in shared]
            found = self.bridge.mean(self.communicator, sent, paths, owners)
            means = dict(zip(shared, found, strict=True))
        final = []
        for number, (gradient, kind) in enumerate(zip(gradients, kinds, strict=True)):
            if kind is Kind.MAXIMUM and gradient is not None:
                final.append(all_reduce(gradient, self.communicator, ReduceOp.MAX))
                continue
            found = means[number] if kind is Kind.MEAN else self.bridge.own(gradient)
            is_sum = self.op is ReduceOp.SUM and size > 1 and kind is not Kind.LOCAL
            final.append(weighted(found, kind, size) if is_sum else found)
        return final


def _name(variable: Any, number: int) -> str:
    """A variable's path; of another source of a tape its number: names differ between ranks."""
    is_variable = isinstance(variable, (tf.Variable, keras.Variable))
    return path_of(variable) if is_variable else f"source {number}"


class Accumulating:
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
        for gradient, total, kind in zip(gradients, cycle.sums, kinds, strict=True):
            if gradient is not None:
                total.add(gradient, weight.mean if kind is Kind.PART else weight.own)
        cycle.own.assign_add(weight.own)
        cycle.mean.assign_add(weight.mean)
        is_due = tf.equal(cycle.count.assign_add(1) % self.steps, 0)

        def apply_mean() -> None:
            vouch_for_branch()
            # Divided so that the plain mean over the ranks is the weighted mean over all steps and
            # ranks; for local variables over this rank's steps.
            of_local = cycle.mean if reducer.scale_local else cycle.own
            divisors = {Kind.MEAN: cycle.mean, Kind.PART: cycle.mean, Kind.LOCAL: of_local}
            means = [
                None if total is None else total.divided(divisors.get(kind))
                for total, kind in zip(cycle.sums, kinds, strict=True)
            ]
            apply(reducer.reduce(means, variables, kinds), variables)
            for total in filter(None, cycle.sums):
                total.clear()
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
                self._cycles[key] = _Cycle(len(variables))
            cycle = self._cycles[key]
            for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if gradient is not None and cycle.sums[number] is None:
                    has_rows = self._keeps_rows and isinstance(gradient, tf.IndexedSlices)
                    cycle.sums[number] = _Sum(variable, kinds[number], has_rows)
        return cycle


class _Cycle:
    """Sums since the last reduction: of this rank's weights, the ranks' means, and gradients."""

    def __init__(self, variables: int) -> None:
        self.count = lasting(np.int64(0))
        self.own, self.mean = lasting(0.0), lasting(0.0)
        # None before a variable's first gradient, which may be in a later step of a cycle.
        self.sums: list[Any] = [None] * variables


class _Sum:
    """The sum of one variable's gradients; for Kind.MAXIMUM the largest."""

    def __init__(self, variable: Any, kind: Kind, has_rows: bool) -> None:
        self._kind, self._dtype = kind, variable.dtype
        # 16-bit gradients are added up in float32.
        dtype = tf.float64 if tf.as_dtype(variable.dtype) == tf.float64 else tf.float32
        self._start = dtype.min if kind is Kind.MAXIMUM else 0
        start = tf.fill(variable.shape, tf.constant(self._start, dtype))
        self._total = lasting(start)
        # Of a table, which rows had a gradient; the sum is 0 in all others.
        none = tf.zeros(variable.shape[0], tf.bool) if has_rows else None
        self._rows = None if none is None else lasting(none)

    def add(self, gradient: Any, weight: Any) -> None:
        total = self._total
        if isinstance(gradient, tf.IndexedSlices):
            values = weighted(tf.cast(gradient.values, total.dtype), self._kind, weight)
            total.scatter_add(tf.IndexedSlices(values, gradient.indices))
            if self._rows is not None:
                is_seen = tf.ones_like(gradient.indices, tf.bool)
                self._rows.scatter_update(tf.IndexedSlices(is_seen, gradient.indices))
            return
        value = weighted(tf.cast(gradient, total.dtype), self._kind, weight)
        if self._kind is Kind.MAXIMUM:
            total.assign(tf.maximum(total, value))
        else:
            total.assign_add(value)
        if self._rows is not None:
            self._rows.assign(tf.ones_like(self._rows))

    def divided(self, divisor: Any) -> Any:
        """The sum divided by `divisor`, if that is not None, in the variable's dtype."""
        rows = None if self._rows is None else tf.where(self._rows)[:, 0]
        value = tf.convert_to_tensor(self._total) if rows is None else tf.gather(self._total, rows)
        if divisor is not None:
            value = tf.math.divide_no_nan(value, tf.cast(divisor, value.dtype))
        value = tf.cast(value, self._dtype)
        if rows is None:
            return value
        return tf.IndexedSlices(value, rows, tf.constant(tuple(self._total.shape), tf.int64))

    def clear(self) -> None:
        total = self._total
        if self._rows is None:
            total.assign(tf.fill(total.shape, tf.constant(self._start, total.dtype)))
            return
        rows = tf.where(self._rows)[:, 0]
        total.scatter_update(tf.IndexedSlices(tf.zeros_like(tf.gather(total, rows)), rows))
        self._rows.assign(tf.zeros_like(self._rows))
