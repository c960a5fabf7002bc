"""What a strategy is given in each step, and what it may use."""

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
        gradients: tensors, `tf.IndexedSlices` or None; this rank's.
        variables: theirs, equal on all ranks.
        kinds: how the ranks' gradients of each become one.
        weight: what this rank's count in the mean; None: all ranks count alike.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    kinds: Sequence[Kind]
    weight: Weight | None


class Strategy(Protocol):
    """Decides what is communicated when, and calls the wrapped optimizer's `apply`."""

    def take(self, step: Step, inner: Any, reducer: Reducer) -> None:
        """Make a step: all ranks make the same calls of `reducer`, in the same order.

        Args:
            step: its gradients.
            inner: the wrapped optimizer, built.
            reducer: how gradients get from all ranks to all ranks.
        """


class Reducer:
    """Makes one gradient of all ranks', by kind.

    Args:
        bridge: averages.
        communicator: whose ranks.
        op: MEAN or SUM, for what is averaged.
    """

    def __init__(self, bridge: GradientBridge, communicator: Communicator, op: ReduceOp) -> None:
        self._bridge, self._communicator, self._op = bridge, communicator, op

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], kinds: Sequence[Kind]
    ) -> list[Any]:
        """Those of kind MEAN averaged or added, of kind MAXIMUM the largest, of kind LOCAL own.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None.
            variables, kinds: theirs, equal on all ranks.

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
