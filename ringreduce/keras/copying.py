"""Copies a Keras optimizer with its state, without the model.

An optimizer's state belongs to the variables it was built for. A copy is for other variables, of a
copied model or another process, known only when it is built. Until then it has its state for
stand-ins; Keras's own copies (`KerasSaveable.__reduce__`) lose it, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.keras import private
from ringreduce.vocabulary.errors import ConfigError


def describe(optimizer: Any) -> tuple[Any, ...]:
    """`optimizer` as plain values, its variables' present ones included: arguments of `remake`."""
    built_for = None
    if optimizer.built:
        # All that an optimizer may read of a variable that it is built for.
        built_for = [
            (
                str(getattr(variable, "path", variable.name)),
                tuple(variable.shape),
                keras.backend.standardize_dtype(variable.dtype),
                bool(getattr(variable, "overwrite_with_gradient", False)),
            )
            for variable in private.trained_variables(optimizer)
        ]
    values = [np.array(variable.numpy()) for variable in optimizer.variables]
    return type(optimizer), optimizer.get_config(), built_for, values


def remake(
    optimizer_class: Any,
    config: dict[str, Any],
    built_for: Sequence[tuple[str, tuple[int, ...], str, bool]] | None,
    values: Sequence[np.ndarray],
) -> Any:
    """An optimizer like the one that was described, built for stand-ins if that was built."""
    optimizer = optimizer_class.from_config(config)
    if built_for is not None:
        optimizer.build([_stand_in(*each) for each in built_for])
    for variable, value in zip(optimizer.variables, values, strict=True):
        variable.assign(value)
    return optimizer


def _stand_in(path: str, shape: tuple[int, ...], dtype: str, overwrites: bool) -> Any:
    """A variable with the path of another, by which some optimizers treat variables."""
    *scopes, name = path.split("/")
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        variable = keras.Variable(np.zeros(shape), dtype=dtype, name=name.replace(":", "_"))
    if overwrites:
        variable.overwrite_with_gradient = True
    return variable


def built_like(optimizer: Any, variables: Sequence[Any]) -> Any:
    """An optimizer with the configuration and the state of `optimizer`, built for `variables`.

    ConfigError unless these are like those that `optimizer` is built for.
    """
    # Outside of the function being traced, at whose end alone new variables would get values.
    with tf.init_scope():
        made = type(optimizer).from_config(optimizer.get_config())
        made.build(list(variables))
        ours, theirs = ([tuple(v.shape) for v in one.variables] for one in (made, optimizer))
        if ours != theirs:
            raise ConfigError(
                f"the copy of an optimizer ({optimizer.name}) is built for other variables "
                f"than its original: it gets state of shapes {ours}, and has {theirs}",
                remedy="Use it with a model like the original's, or make a new optimizer.",
            )
        for variable, like in zip(made.variables, optimizer.variables, strict=True):
            variable.assign(like.numpy())
    return made
