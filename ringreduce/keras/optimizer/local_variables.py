"""Variables that each rank does not share, and the optimizer's state for them."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ringreduce.keras import private
from ringreduce.keras.layers.part import is_own_piece
from ringreduce.keras.optimizer.accepted import own_step_in
from ringreduce.keras.optimizers_in import all_within, state_for
from ringreduce.tensorflow.variables import path_of, plain_variable
from ringreduce.vocabulary.errors import ConfigError


def joint_in(optimizer: keras.Optimizer) -> str | None:
    """Name what uses all gradients together, such as ``sgd with a loss scale``; None: nothing."""
    for member in all_within(optimizer):
        if isinstance(member, keras.optimizers.LossScaleOptimizer):
            return f"{member.name} with a loss scale"
        if getattr(member, "global_clipnorm", None):
            return f"{member.name} with global_clipnorm"
        if method := own_step_in(member):
            return f"{member.name} with its own {method}"
    return None


class LocalVariables:
    """Variables whose values and gradients are not shared."""

    def __init__(self, variables: Sequence[Any]) -> None:
        # By identity, since variables compare by value.
        self._variables: dict[int, Any] = {}
        for variable in variables:
            self.add(variable)

    def __contains__(self, variable: Any) -> bool:
        return id(plain_variable(variable)) in self._variables

    def __len__(self) -> int:
        return len(self._variables)

    def add(self, variable: Any) -> None:
        """ConfigError if it is no variable of Keras or TensorFlow."""
        if not isinstance(variable, (keras.Variable, tf.Variable)):
            remedy = "Pass variables, such as those in layer.trainable_variables, one by one."
            raise ConfigError(f"got {type(variable).__name__} as a local variable", remedy=remedy)
        self._variables[id(plain_variable(variable))] = variable

    def check(self, inner: keras.Optimizer) -> None:
        """ConfigError if `inner`, a built optimizer, uses all gradients together, or lacks one."""
        if not self._variables:
            return
        if joint := joint_in(inner):
            raise ConfigError(
                f"has local variables, and {joint}: what it makes of all gradients together would "
                "differ between ranks, and shared weights with it",
                remedy="Use clipnorm or clipvalue, mixed_bfloat16, or a second optimizer for what "
                "is local.",
            )
        trained = {id(plain_variable(variable)) for variable in private.trained_variables(inner)}
        for key, variable in self._variables.items():
            if key not in trained:
                text = f"got {path_of(variable)} as a local variable, which is not trained"
                remedy = "Register variables of the model that this optimizer is applied to."
                raise ConfigError(text, remedy=remedy)

    def others_of(self, variables: Sequence[Any], inner: keras.Optimizer) -> list[Any]:
        """`variables` (the model's or those of `inner`) without these, own pieces, their state."""
        states = {id(state) for v in self._variables.values() for state in state_for(inner, v)}
        return [v for v in variables if not (v in self or id(v) in states or is_own_piece(v))]
