"""Gradients are reduced and applied in every step."""

from __future__ import annotations

from typing import Any

from ringreduce.keras.strategies.step import Reducer, Step


class EveryStep:
    """The default strategy."""

    def step(self, step: Step, inner: Any, reducer: Reducer) -> None:
        """Reduce the gradients and apply them."""
        inner.apply(reducer.reduce(step.weighted(), step.variables, step.kinds), step.variables)
