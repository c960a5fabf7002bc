"""The gradients of a step: how those of all ranks combine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.weighting import Averaging, Weight, weighted
from ringreduce.tensorflow import GradientBridge
from ringreduce.tensorflow.variables import path_of
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
    # Divides the update among ranks: MEAN gradients of its variables become pieces, flat.
    sharding: Any = None
    # Whether gradients are sums over rows, which are added up and not weighted.
    adds_up: bool = False

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        kinds: Sequence[Averaging],
        weight: Weight | None = None,
    ) -> list[Any]:
        """Average (or add) MEAN, keep LOCAL and PART gradients."""
        size = float(self.communicator.size)
        factors: dict[Averaging, Any] = {}
        if weight is not None:
            factor = weight.factor / size if self.scale_local else tf.math.sign(weight.own)
            factors = {Averaging.MEAN: weight.factor, Averaging.LOCAL: factor}
        elif self.scale_local and size > 1:
            factors = {Averaging.LOCAL: 1 / size}
        if self.adds_up and weight is not None:
            # A rank without rows has the gradients of zeros.
            factors[Averaging.MEAN] = tf.math.sign(weight.own)
        pairs = zip(gradients, kinds, strict=True)
        gradients = [weighted(g, factors[k]) if k in factors else g for g, k in pairs]
        # The others are not compared: ranks may have other local variables, with other names.
        shared = [number for number, kind in enumerate(kinds) if kind is Averaging.MEAN]
        divided = [n for n in shared if self.sharding and self.sharding.has(variables[n])]
        undivided = [number for number in shared if number not in divided]
        means: dict[int, Any] = {}
        for bridge, numbers in ((self.sharding, divided), (self.bridge, undivided)):
            if not numbers:
                continue
            paths = [_name(variables[number], number) for number in numbers]
            sent, owners = ([values[n] for n in numbers] for values in (gradients, variables))
            reduced = bridge.mean(self.communicator, sent, paths, owners)
            means |= dict(zip(numbers, reduced, strict=True))
        take = self.bridge.own
        final = [means[n] if n in means else take(value) for n, value in enumerate(gradients)]
        if (self.op is ReduceOp.MEAN and not self.adds_up) or size == 1:
            return final
        pairs = zip(final, kinds, strict=True)
        return [mean if kind is Averaging.LOCAL else weighted(mean, size) for mean, kind in pairs]


def _name(variable: Any, number: int) -> str:
    """A variable's path; of another source of a tape its number: names differ between ranks."""
    is_variable = isinstance(variable, (tf.Variable, keras.Variable))
    return path_of(variable) if is_variable else f"source {number}"
