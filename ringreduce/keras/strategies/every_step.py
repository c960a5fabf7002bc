"""Gradients are reduced and applied in every step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringreduce.keras.strategies.step import Reducer, Step
from ringreduce.keras.weighting import Kind, weighted

__all__ = ["EveryStep"]


class EveryStep:
    """The default strategy."""

    def take(self, step: Step, inner: Any, reducer: Reducer) -> None:
        """Reduce the gradients and apply them."""
        gradients, weight = step.gradients, step.weight
        if weight is not None:
            counts = {Kind.MEAN: weight.factor, Kind.LOCAL: tf.math.sign(weight.own)}
            gradients = [
                weighted(gradient, kind, counts.get(kind, weight.own))
                for gradient, kind in zip(gradients, step.kinds, strict=True)
            ]
        inner.apply(reducer.reduce(gradients, step.variables, step.kinds), step.variables)
