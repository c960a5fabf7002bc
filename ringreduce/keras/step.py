"""Wraps a model's training step, in a fixed order."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

Step = Callable[[Any], Any]


class WrapOrder(enum.IntEnum):
    """The order of the wrappers from the inside out; they may be added in any order."""

    COMPILED = 0
    # Around COMPILED, which applies gradients at its end: they must be weighted then.
    WEIGHTED = 1


def put_around(model: Any, place: WrapOrder, wrap: Callable[[Step], Step]) -> None:
    """Wrap `model`'s training step, once; `wrap` should refer to the model weakly."""
    step = model.train_step
    inner, wraps = (step.inner, step.wraps) if isinstance(step, _Wrapped) else (step, {})
    if place in wraps:
        return
    model.train_step = _Wrapped(inner, {**wraps, place: wrap})
    # Functions traced before do not have it.
    model.train_function = None


class _Wrapped:
    def __init__(self, inner: Step, wraps: Mapping[WrapOrder, Callable[[Step], Step]]) -> None:
        self.inner = inner
        self.wraps = wraps
        self._whole = inner
        for place in sorted(wraps):
            self._whole = wraps[place](self._whole)

    def __call__(self, data: Any) -> Any:
        return self._whole(data)
