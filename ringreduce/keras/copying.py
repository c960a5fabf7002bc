"""Copies a Keras optimizer with its state, without the model.

An optimizer's state belongs to the variables it was built for. A copy is for other variables, of a
copied model or another process, known only when it is built. Until then it keeps the values;
Keras's own copies (`KerasSaveable.__reduce__`) lose them, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ringreduce.vocabulary.errors import ConfigError

__all__ = ["CopiedState", "Description"]


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
    """An optimizer as plain values; `built_for` is empty if it is not built."""

    optimizer_class: type
    config: dict[str, Any]
    built_for: tuple[_VariableSpec, ...]
    values: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, optimizer: Any, copied: CopiedState | None = None) -> Description:
        """Describe `optimizer` with its variables' present values, or those in `copied`."""
        if copied is None:
            known = optimizer._trainable_variables if optimizer.built else ()
            built_for, variables = tuple(map(_VariableSpec.of, known)), optimizer.variables
        else:
            built_for, variables = copied.built_for, copied.variables
        values = tuple(np.array(v.numpy()) for v in variables)
        return cls(type(optimizer), optimizer.get_config(), built_for, values)

    def remake(self) -> tuple[Any, CopiedState | None]:
        """An optimizer that is not built, and the state to give it when it is, or None."""
        optimizer = _from_config(self.optimizer_class, self.config)
        variables, state = list(optimizer.variables), None
        if self.built_for:
            holder = _from_config(self.optimizer_class, self.config)
            early = set(map(id, holder.variables))
            holder.build([spec.stand_in() for spec in self.built_for])
            _assign(holder.variables, self.values)
            # In the order of `values`; the new optimizer's own variables where it has them already.
            own = iter(variables)
            variables = [next(own) if id(v) in early else v for v in holder.variables]
            state = CopiedState(variables, self.built_for, holder)
        _assign(variables, self.values)
        return optimizer, state


class CopiedState:
    """The state of a copy that is not built yet.

    `variables` are the copy's own that exist already, and others that only hold values. `built_for`
    is the original's. `holder` is a built optimizer that has the values.
    """

    def __init__(
        self, variables: Sequence[Any], built_for: tuple[_VariableSpec, ...], holder: Any
    ) -> None:
        self.variables, self.built_for, self.holder = list(variables), built_for, holder

    def build(self, optimizer: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Build `optimizer`, the copy; return each new variable with the one that holds its value.

        Raises:
            ConfigError: `variables` are not like those the original was built for.
        """
        early = set(map(id, optimizer.variables))
        optimizer.build(list(variables))
        created = [v for v in optimizer.variables if id(v) not in early]
        holding = [v for v in self.variables if id(v) not in early]
        ours, theirs = ([tuple(v.shape) for v in some] for some in (created, holding))
        if ours != theirs:
            raise ConfigError(
                f"the copy of an optimizer ({optimizer.name}) is built for other variables "
                f"than its original: it gets state of shapes {ours}, and has {theirs}",
                remedy="Use it with a model like the original's, or make a new optimizer.",
            )
        return list(zip(created, holding, strict=True))


def _assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


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
