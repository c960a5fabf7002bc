"""What a strategy gets in each step, and what it may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.weighting import Kind, Weight, of_mean, weighted
from ringreduce.tensorflow import GradientBridge, path_of
from ringreduce.tensorflow.collectives import all_reduce
from ringreduce.vocabulary.types import ReduceOp


@dataclass(frozen=True)
class Step:
    """One call of `DistributedOptimizer.apply`, or `DistributedGradientTape.gradient`.

    Attributes:
        gradients: this rank's: tensors, `tf.IndexedSlices` or None.
        variables, kinds: theirs, equal on all ranks; for a tape also other sources.
        weight: this rank's weight in the mean; None: all ranks are equal.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    kinds: Sequence[Kind]
    weight: Weight | None

    def weighted(self) -> Sequence[Any]:
        """The gradients, so that their plain mean over all ranks is the weighted one."""
        if self.weight is None:
            return self.gradients
        counts = {Kind.MEAN: self.weight.factor, Kind.LOCAL: tf.math.sign(self.weight.own)}
        return [
            weighted(gradient, kind, counts.get(kind, self.weight.own))
            for gradient, kind in zip(self.gradients, self.kinds, strict=True)
        ]


class Strategy(Protocol):
    """Decides what is communicated when, and calls the wrapped optimizer's `apply`."""

    def step(self, step: Step, inner: Any, reducer: Reducer) -> None:
        """Make a step with `inner`, which is built; all ranks make the same calls of `reducer`."""


class Reducer:
    """Combines all ranks' gradients, by kind; `op`, MEAN or SUM, is for those of kind MEAN."""

    def __init__(self, bridge: GradientBridge, communicator: Communicator, op: ReduceOp) -> None:
        self._bridge, self._communicator, self._op = bridge, communicator, op

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], kinds: Sequence[Kind]
    ) -> list[Any]:
        """Average (or add) MEAN, take the maximum of MAXIMUM, keep LOCAL gradients.

        Raises:
            As `GradientBridge.mean`.
        """
        # The others are not compared: ranks may have other local variables, with other names.
        shared = [number for number, kind in enumerate(kinds) if kind is Kind.MEAN]
        means: dict[int, Any] = {}
        if shared:
            paths = [_name(variables[number], number) for number in shared]
            own = [gradients[number] for number in shared]
            found = self._bridge.mean(self._communicator, own, paths)
            means = dict(zip(shared, found, strict=True))
        final = []
        for number, (gradient, kind) in enumerate(zip(gradients, kinds, strict=True)):
            if kind is Kind.MEAN:
                final.append(of_mean(means[number], self._op, self._communicator))
            elif kind is Kind.LOCAL or gradient is None:
                final.append(self._bridge.own(gradient))
            else:
                final.append(all_reduce(gradient, self._communicator, ReduceOp.MAX))
        return final


def _name(variable: Any, number: int) -> str:
    """A variable's path; of another source of a tape its number: names differ between ranks."""
    is_variable = isinstance(variable, (tf.Variable, keras.Variable))
    return path_of(variable) if is_variable else f"source {number}"
