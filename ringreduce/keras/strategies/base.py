"""When ranks combine what they learn: `DistributedOptimizer(strategy=)`.

A `Strategy` is settings, equal on all ranks. For each optimizer it begins a `Running`, which
applies that optimizer's steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.strategies.reducer import Reducer
from ringreduce.keras.weighting import Averaging, Weight, weighted
from ringreduce.tensorflow.control_flow import vouch_for_branch
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.tensorflow.variables import lasting
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief


class Step(NamedTuple):
    """A call of `DistributedOptimizer.apply`."""

    gradients: Sequence[Any]  # this rank's, with variables and kinds as for `Reducer.reduce`
    variables: Sequence[Any]
    kinds: Sequence[Averaging]
    weight: Weight | None  # this rank's in a mean over all ranks; None: all are equal
    reducer: Reducer
    # Updates variables with gradients, by the wrapped optimizer.
    apply: Callable[[Sequence[Any], Sequence[Any]], None]


class Use(NamedTuple):
    """Facts of its optimizer that a strategy needs."""

    communicator: Callable[[], Communicator]  # returns that of the steps
    keeps_rows: bool  # whether means of sparse gradients are to be sparse
    compression: str | PowerSGD  # how what it sends travels; the former: of a `Compression`


class Running:
    """A strategy at work for one optimizer, which owns it."""

    is_settled = True  # whether the ranks' weights are equal now
    # Whether ranks have met in the latest step, and no meeting is under way: the time for others.
    has_met = True
    keeps_state_equal = True  # whether the wrapped optimizer's state is then equal too
    holds_gradients = False  # whether some of steps before wait for those of later ones
    is_alone = False  # whether steps use this rank's gradients alone, so that no rank need wait

    def take(self, step: Step) -> None:
        """Use a step's gradients. Called on all ranks; often while a graph is traced."""
        raise NotImplementedError

    def settle(self) -> None:
        """Make the ranks' weights equal. Eager; collective."""

    def state(self) -> Mapping[str, np.ndarray]:
        """The state to be saved with the optimizer, equal on all ranks when settled."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from what `state` returned, on any number of ranks."""


class Strategy:
    """Settings; a subclass that is a frozen dataclass has `get_config` by its fields."""

    def get_config(self) -> dict[str, Any]:
        """The settings, by name; compared between ranks."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def check(self, inner: Any) -> None:
        """Raise ConfigError if it cannot be used with the optimizer `inner`."""

    def begin(self, use: Use) -> Running:
        """Return the object that takes an optimizer's steps."""
        raise NotImplementedError


def chosen_strategy(strategy: Strategy | None, accumulated: int) -> Strategy:
    """What an optimizer's `strategy` and its gradient_accumulation_steps, here `accumulated`, ask.

    ConfigError if both ask for something.
    """
    if strategy is None:
        return EveryStep() if accumulated == 1 else Accumulate(accumulated)
    if accumulated != 1 or not isinstance(strategy, Strategy):
        raise ConfigError(
            f"got strategy={brief(strategy)} and gradient_accumulation_steps={accumulated}",
            remedy="Pass an object, such as rr.LocalSGD(50), or gradient_accumulation_steps=k, not "
            "both.",
        )
    return strategy


@dataclass(frozen=True)
class EveryStep(Strategy):
    """Average gradients in every step: N ranks of batch B train as one process with N B."""

    def begin(self, use: Use) -> Running:
        """See `Strategy`."""
        return _EveryStep()


class _EveryStep(Running):
    def take(self, step: Step) -> None:
        gradients, variables, kinds, weight, reducer, apply = step
        apply(reducer.reduce(gradients, variables, kinds, weight), variables)


@dataclass(frozen=True)
class Accumulate(Strategy):
    """Average and apply only every `steps` steps, with the mean of all their gradients.

    As one step with so many times the batch, if all are of one length: each step counts alike, as
    where Keras accumulates. The step counter counts what is applied. What is left at the end of an
    epoch counts for the next.
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"gradient_accumulation_steps is {self.steps}; accepted: 1 and more")

    def begin(self, use: Use) -> Running:
        """See `Strategy`."""
        return _Accumulating(self.steps, use.keeps_rows)


class _Accumulating(Running):
    """Reduces the mean of several steps; in a graph in a branch that all ranks take together.

        step       1        2        3        4        5 ...
                   add      add      add      add
                   -        -        -        reduce, apply, clear        (steps = 4)

    The sums are variables of the wrapper, not of the optimizer, and are not saved. With
    `keeps_rows` the mean of a sparse gradient is sparse as well: the rows of any of the steps.
    """

    def __init__(self, steps: int, keeps_rows: bool) -> None:
        self._steps, self._keeps_rows = steps, keeps_rows
        # One optimizer may be applied to several sets of variables, each with its own steps.
        self._cycles: dict[tuple[int, ...], _Cycle] = {}

    def take(self, step: Step) -> None:
        gradients, variables, kinds, weight, reducer, apply = step
        cycle = self._cycle_of(gradients, variables)
        weight = weight or Weight(tf.constant(1.0), tf.constant(1.0))
        has_rows = tf.math.sign(weight.own)
        # Each step counts alike, whatever its length; within it each rank by its rows.
        share = has_rows if reducer.adds_up else weight.factor
        of_local = share if reducer.scale_local else has_rows
        factors = {Averaging.MEAN: share, Averaging.LOCAL: of_local, Averaging.PART: 1.0}
        for gradient, total, kind in zip(gradients, cycle.sums, kinds, strict=True):
            if gradient is not None:
                total.add(gradient, factors[kind])
        cycle.with_rows.assign_add(has_rows)
        is_due = tf.equal(cycle.count.assign_add(1) % self._steps, 0)

        def apply_mean() -> None:
            vouch_for_branch()
            divisors = dict.fromkeys(Averaging, self._steps)
            if not reducer.scale_local:
                divisors[Averaging.LOCAL] = cycle.with_rows
            sums = zip(cycle.sums, kinds, strict=True)
            means = [total and total.divided(divisors[kind]) for total, kind in sums]
            apply(reducer.reduce(means, variables, kinds), variables)
            for total in filter(None, cycle.sums):
                total.clear()
            cycle.with_rows.assign(0.0)

        tf.cond(is_due, apply_mean, lambda: None)

    @property
    def holds_gradients(self) -> bool:  # type: ignore[override]
        return any(int(cycle.count.numpy()) % self._steps for cycle in self._cycles.values())

    def _cycle_of(self, gradients: Sequence[Any], variables: Sequence[Any]) -> _Cycle:
        # Outside of the function that is being traced, since they outlive it.
        with tf.init_scope():
            key = tuple(map(id, variables))
            if key not in self._cycles:
                self._cycles[key] = _Cycle(len(variables))
            cycle = self._cycles[key]
            for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if gradient is not None and cycle.sums[number] is None:
                    has_rows = self._keeps_rows and isinstance(gradient, tf.IndexedSlices)
                    cycle.sums[number] = _Sum(variable, has_rows)
        return cycle


class _Cycle:
    """Sums since the last reduction: of gradients, and of steps in which this rank had rows."""

    def __init__(self, variables: int) -> None:
        self.count = lasting(np.int64(0))
        self.with_rows = lasting(0.0)
        # None before a variable's first gradient, which may be in a later step of a cycle.
        self.sums: list[Any] = [None] * variables


def wide(variable: Any) -> Any:
    """The dtype in which its gradients, or changes, are added up: at least float32."""
    return tf.float64 if tf.as_dtype(variable.dtype) == tf.float64 else tf.float32


class _Sum:
    """The sum of one variable's gradients."""

    def __init__(self, variable: Any, has_rows: bool) -> None:
        self._dtype = variable.dtype
        self._total = lasting(tf.zeros(variable.shape, wide(variable)))
        # Rows of a table that had a gradient; the sum is 0 in all others.
        self._rows = lasting(tf.zeros(variable.shape[0], tf.bool)) if has_rows else None

    def add(self, gradient: Any, weight: Any) -> None:
        total = self._total
        if isinstance(gradient, tf.IndexedSlices):
            values = weighted(tf.cast(gradient.values, total.dtype), weight)
            total.scatter_add(tf.IndexedSlices(values, gradient.indices))
            if self._rows is not None:
                is_seen = tf.ones_like(gradient.indices, tf.bool)
                self._rows.scatter_update(tf.IndexedSlices(is_seen, gradient.indices))
            return
        total.assign_add(weighted(tf.cast(gradient, total.dtype), weight))
        if self._rows is not None:
            self._rows.assign(tf.ones_like(self._rows))

    def divided(self, divisor: Any) -> Any:
        """The sum divided by `divisor`, in the variable's dtype."""
        rows = None if self._rows is None else tf.where(self._rows)[:, 0]
        value = tf.convert_to_tensor(self._total) if rows is None else tf.gather(self._total, rows)
        value = tf.math.divide_no_nan(value, tf.cast(divisor, value.dtype))
        value = tf.cast(value, self._dtype)
        if rows is None:
            return value
        return tf.IndexedSlices(value, rows, tf.constant(tuple(self._total.shape), tf.int64))

    def clear(self) -> None:
        total = self._total
        if self._rows is None:
            total.assign(tf.zeros_like(total))
            return
        rows = tf.where(self._rows)[:, 0]
        total.scatter_update(tf.IndexedSlices(tf.zeros_like(tf.gather(total, rows)), rows))
        self._rows.assign(tf.zeros_like(self._rows))
