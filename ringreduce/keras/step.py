"""Wraps a model's training step, in a fixed order; with XLA, where that cannot call the ring."""

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ringreduce.keras.optimizer import DistributedOptimizer, Given
from ringreduce.keras.wrappable import require_compiled
from ringreduce.vocabulary.errors import ConfigError

Step = Callable[[Any], Any]
# Attribute of a wrapped step: the one inside, and its wrappers by their places.
_WRAPS = "_ringreduce_wraps"
# Places of wrappers, from the inside out. COMPILED applies gradients at its end, weighted ones.
PLAIN, COMPILED, WEIGHTED = 0, 1, 2


def put_around(model: Any, place: int, around: Callable[[Any, Step, Any], Any]) -> None:
    """Have `around` called for `model`'s training step, with the model, the step and data; once."""
    step = model.train_step
    inner, wraps = getattr(step, _WRAPS, (step, {}))
    if place in wraps:
        return
    wraps, whole = {**wraps, place: around}, inner
    for each in sorted(wraps):
        whole = _around(whole, wraps[each], weakref.ref(model))
    setattr(whole, _WRAPS, (inner, wraps))
    model.train_step = whole
    # Functions traced before do not have it.
    model.train_function = None


def step_without(model: Any, place: int) -> Step:
    """`model`'s training step without the wrapper at `place`."""
    whole, wraps = getattr(model.train_step, _WRAPS, (model.train_step, {}))
    for each in sorted(wraps.keys() - {place}):
        whole = _around(whole, wraps[each], weakref.ref(model))
    return whole  # type: ignore[no-any-return]


def own_step(model: Any) -> Step | None:
    """The innermost training step of `model`, if it is not Keras's."""
    step = getattr(model.train_step, _WRAPS, (model.train_step, {}))[0]
    return None if getattr(step, "__func__", None) is keras.Model.train_step else step


def _around(step: Step, around: Callable[[Any, Step, Any], Any], owner: weakref.ref[Any]) -> Step:
    def train_step(data: Any) -> Any:
        return around(owner(), step, data)

    return train_step


def compile_gradients(model: Any) -> None:
    """Compile forward and backward pass of `model`'s training with XLA, and no more.

    For where ``compile(jit_compile=True)``, which compiles the reduction too, is refused: without
    the native library, or with a TensorFlow whose XLA has another interface. Slower than that,
    since nothing is reduced before the whole backward pass is done. Call it between
    ``model.compile(..., jit_compile=False)`` and `fit`.

    The model's `train_step`, its own or a user's, is compiled as it is, but its gradients are
    applied after it has ended. So its code after that call sees the old weights, and it must apply
    gradients exactly once. Where XLA cannot call the ring, the forward pass must not either, as
    `SyncBatchNormalization` does.

    Raises:
        ConfigError: `model` is not compiled, has no `DistributedOptimizer`, or is compiled with
            ``jit_compile=True``; in training, its step applies no gradients, or several times.
    """
    require_compiled(model)
    _require_wrapped(model)
    if model.jit_compile:
        text = "got a model with jit_compile=True, which compiles all of the step"
        raise ConfigError(text, remedy="Call model.compile(..., jit_compile=False) first.")
    put_around(model, COMPILED, _divided)


def _require_wrapped(model: Any) -> None:
    if not isinstance(model.optimizer, DistributedOptimizer):
        text = f"got a model whose optimizer ({model.optimizer.name}) is no DistributedOptimizer"
        raise ConfigError(text, remedy="Wrap it, or call model.compile(..., jit_compile=True).")


def _divided(model: Any, step: Step, data: Any) -> Any:
    if tf.executing_eagerly():
        return step(data)  # With run_eagerly=True nothing is compiled.
    _require_wrapped(model)  # It may have been compiled again.
    applied: list[Given] = []

    # A new one in each trace of the function around it, which is traced again for any change.
    @tf.function(jit_compile=True, autograph=False)
    def compiled(data: Any) -> Any:
        with model.optimizer.deferred() as calls:
            logs = step(data)
        applied[:] = calls
        return logs, [gradients for gradients, *_ in calls]

    logs, gradients = compiled(data)
    if len(applied) != 1:
        raise ConfigError(
            f"got a model whose training step applies gradients {len(applied)} times",
            remedy="rr.compile_gradients is for one that does so once: compile a function of "
            "your own that computes gradients, and apply them outside of it.",
        )
    model.optimizer.take(gradients[0], *applied[0][1:])
    return logs
