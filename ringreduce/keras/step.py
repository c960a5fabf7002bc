"""What is put around a model's training step, in the one order that is right."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Place", "put_around"]

Step = Callable[[Any], Any]


class Place(enum.IntEnum):
    """From the inside out, in whatever order they come."""

    COMPILED = 0
    # Around the former, which applies gradients when what it compiled has ended: they have to be
    # weighted then.
    WEIGHTED = 1


def put_around(model: Any, place: Place, wrap: Callable[[Step], Step]) -> None:
    """Put ``wrap(step)`` in the place of `model`'s training step, its own or a user's, once.

    It keeps the step alive, which is most often a method of the model's: `wrap` should know the
    model by a weak reference.
    """
    step = model.train_step
    inner, wraps = (step.inner, step.wraps) if isinstance(step, _Wrapped) else (step, {})
    if place in wraps:
        return
    model.train_step = _Wrapped(inner, {**wraps, place: wrap})
    # What was traced before did not know of it.
    model.train_function = None


class _Wrapped:
    def __init__(self, inner: Step, wraps: Mapping[Place, Callable[[Step], Step]]) -> None:
        self.inner = inner
        self.wraps = wraps
        self._whole = inner
        for place in sorted(wraps):
            self._whole = wraps[place](self._whole)

    def __call__(self, data: Any) -> Any:
        return self._whole(data)
