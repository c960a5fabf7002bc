"""Puts a LossScaleOptimizer inside the DistributedOptimizer that it was put around.

``compile`` wraps the optimizer of a mixed_float16 model in a `LossScaleOptimizer`, which skips a
step whose gradients are not finite. If it were outside, a rank with an infinity would skip the
reduction and the others would wait forever (tensorflow#46863). Inside, it sees means: one rank's
infinity is in all of them, so all ranks skip the same steps and keep equal scales.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from keras.optimizers import LossScaleOptimizer

from ringreduce.keras.wrapper import Wrapper

__all__ = ["turn_inside_out"]


@cache
def turn_inside_out() -> None:
    """From now on ``LossScaleOptimizer(distributed)`` returns a DistributedOptimizer around it."""
    plain_new = LossScaleOptimizer.__new__

    def make(cls: type, inner_optimizer: Any = None, *arguments: Any, **options: Any) -> Any:
        if not isinstance(inner_optimizer, Wrapper):
            if plain_new is object.__new__:
                return plain_new(cls)
            return plain_new(cls, inner_optimizer, *arguments, **options)
        inner = inner_optimizer._inner
        if isinstance(inner, LossScaleOptimizer):
            return inner_optimizer
        # The result is no instance of `cls`, so Python does not call `__init__` on it.
        return inner_optimizer.around(cls(inner, *arguments, **options))

    LossScaleOptimizer.__new__ = make
