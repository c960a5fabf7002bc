"""What a strategy gets in each step, and what it may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.weighting import Kind, Weight, of_mean
from ringreduce.tensorflow import GradientBridge, path_of
from ringreduce.tensorflow.collectives import all_reduce
from ringreduce.vocabulary.types import ReduceOp

__all__ = ["Reducer", "Step", "Strategy"]


@dataclass(frozen=True)
class Step:
    """One call of `DistributedOptimizer.apply`.

    Attributes:
        gradients: this rank's: tensors, `tf.IndexedSlices` or None.
        variables, kinds: theirs, equal on all ranks.
        weight: this rank's weight in the mean; None: all ranks are equal.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    kinds: Sequence[Kind]
    weight: Weight | None


class Strategy(Protocol):
    """Decides what is communicated when, and calls the wrapped optimizer's `apply`."""

    def take(self, step: Step, inner: Any, reducer: Reducer) -> None:
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
        means = [
            gradient if kind is Kind.MEAN else None
            for gradient, kind in zip(gradients, kinds, strict=True)
        ]
        if Kind.MEAN in kinds:
            means = self._bridge.mean(self._communicator, means, list(map(path_of, variables)))
        final = []
        for gradient, kind, mean in zip(gradients, kinds, means, strict=True):
            if kind is Kind.MAXIMUM and gradient is not None:
                final.append(all_reduce(gradient, self._communicator, ReduceOp.MAX))
            elif kind is Kind.LOCAL:
                final.append(self._bridge.own(gradient))
            else:
                final.append(of_mean(mean, self._op, self._communicator))
        return final
