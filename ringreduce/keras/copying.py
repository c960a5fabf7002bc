"""Copies a Keras optimizer with its state, without the model.

An optimizer's state belongs to the variables it was built for. A copy is for other variables, of a
copied model or another process, known only when it is built. Until then it has its state for
stand-ins; Keras's own copies (`KerasSaveable.__reduce__`) lose it, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.vocabulary.errors import ConfigError

__all__ = ["Description", "built_like"]


@dataclass(frozen=True)
class _VariableSpec:
    """What an optimizer may read of a variable that it is built for."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    overwrites: bool

    @classmethod
    def of(cls, variable: Any) -> _VariableSpec:
        return cls(
            str(getattr(variable, "path", variable.name)),
            tuple(variable.shape),
            keras.backend.standardize_dtype(variable.dtype),
            bool(getattr(variable, "overwrite_with_gradient", False)),
        )

    def stand_in(self) -> Any:
        """A variable like it with the same path, by which some optimizers treat variables."""
        *scopes, name = self.path.split("/")
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(keras.name_scope(scope))
            variable = keras.Variable(
                np.zeros(self.shape), dtype=self.dtype, name=name.replace(":", "_")
            )
        if self.overwrites:
            variable.overwrite_with_gradient = True
        return variable


@dataclass(frozen=True)
class Description:
    """An optimizer as plain values; `built_for` is None if it is not built."""

    optimizer_class: type
    config: dict[str, Any]
    built_for: tuple[_VariableSpec, ...] | None
    values: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, optimizer: Any) -> Description:
        """Describe `optimizer` with its variables' present values."""
        built_for = None
        if optimizer.built:
            built_for = tuple(map(_VariableSpec.of, optimizer._trainable_variables))
        values = tuple(np.array(v.numpy()) for v in optimizer.variables)
        return cls(type(optimizer), optimizer.get_config(), built_for, values)

    def remake(self) -> Any:
        """An optimizer like it, built for stand-ins if it was built."""
        optimizer = _from_config(self.optimizer_class, self.config)
        if self.built_for is not None:
            optimizer.build([spec.stand_in() for spec in self.built_for])
        for variable, value in zip(optimizer.variables, self.values, strict=True):
            variable.assign(value)
        return optimizer


def built_like(optimizer: Any, variables: Sequence[Any]) -> Any:
    """An optimizer with the configuration and the state of `optimizer`, built for `variables`.

    Raises:
        ConfigError: `variables` are not like those that `optimizer` is built for.
    """
    # Outside of the function being traced, at whose end alone new variables would get values.
    with tf.init_scope():
        made = _from_config(type(optimizer), optimizer.get_config())
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


def _from_config(optimizer_class: Any, config: dict[str, Any]) -> Any:
    # `from_config` may keep or change its argument.
    return optimizer_class.from_config(_copied(config))


def _copied(config: Any) -> Any:
    """A copy of containers, not of what they hold: functions, say, need not be copied."""
    if isinstance(config, dict):
        return {key: _copied(value) for key, value in config.items()}
    if isinstance(config, list):
        return [_copied(value) for value in config]
    return config
