"""Wraps a model's training step, in a fixed order."""

import weakref
from collections.abc import Callable
from typing import Any

import keras

Step = Callable[[Any], Any]
# Attribute of a wrapped step: the one inside, and its wrappers by their places.
_WRAPS = "_ringreduce_wraps"
# Places of wrappers, from the inside out.
WEIGHTED, APART, RECORDED = 0, 1, 2


def put_around(model: keras.Model, place: int, around: Callable[[Any, Step, Any], Any]) -> None:
    """Have `around` called for `model`'s training step, with the model, the step and data; once."""
    step = model.train_step
    inner, wraps = getattr(step, _WRAPS, (step, {}))
    if place in wraps:
        return
    wraps, whole = {**wraps, place: around}, inner
    for position in sorted(wraps):
        whole = _around(whole, wraps[position], weakref.ref(model))
    setattr(whole, _WRAPS, (inner, wraps))
    model.train_step = whole
    # Functions traced before do not have it.
    model.train_function = None


def step_without(model: keras.Model, place: int) -> Step:
    """`model`'s training step without the wrapper at `place`."""
    step, wraps = getattr(model.train_step, _WRAPS, (model.train_step, {}))
    for position in sorted(wraps.keys() - {place}):
        step = _around(step, wraps[position], weakref.ref(model))
    return step  # type: ignore[no-any-return]


def innermost_step(model: keras.Model) -> Step:
    """`model`'s training step as it was before anything was put around it."""
    return getattr(model.train_step, _WRAPS, (model.train_step, {}))[0]  # type: ignore[no-any-return]


def own_step(model: keras.Model) -> Step | None:
    """The innermost training step of `model`, if it is not Keras's."""
    step = innermost_step(model)
    return None if getattr(step, "__func__", None) is keras.Model.train_step else step


def _around(step: Step, around: Callable[[Any, Step, Any], Any], owner: weakref.ref[Any]) -> Step:
    def train_step(data: Any) -> Any:
        return around(owner(), step, data)

    return train_step
