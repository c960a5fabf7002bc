"""An optimizer that forwards to another in all that Keras and TensorFlow use of it.

It has no variables. What is read, set, saved, restored and checkpointed is the inner optimizer's,
so files are those of the plain one. A subclass defines what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import Any

import keras
import tensorflow as tf

from ringreduce import tensorflow as bridge
from ringreduce.keras.copying import CopiedState

__all__ = ["Wrapper"]


class Wrapper(keras.optimizers.Optimizer):
    """Forwards everything to the optimizer it stands for; see `_stand_for` and `_forwarding`."""

    # The state of a copy until it is built.
    _copied: CopiedState | None
    # Variables of a built copy that still need their values, each with the one that holds it.
    _to_give: list[tuple[Any, Any]]

    def _stand_for(self, inner: Any) -> None:
        """Drop what the base's `__init__` has set; Keras and checkpoints then see `inner`'s."""
        self.__dict__.clear()
        self._inner = inner
        self._copied, self._to_give = None, []

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer that updates weights; Keras's name for it, in callbacks and in files."""
        return getattr(self._inner, "inner_optimizer", self._inner)

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's variables; for a copy that is not built, those it will have."""
        if self._copied is not None:
            return list(self._copied.variables)
        return list(self._inner.variables)

    @property
    def built(self) -> bool:
        """Whether the inner optimizer has its variables."""
        return "_inner" in self.__dict__ and bool(self._inner.built)

    @built.setter
    def built(self, value: bool) -> None:
        pass

    @property
    def iterations(self) -> Any:
        """The inner optimizer's step counter."""
        return self._inner.iterations

    @property
    def _iterations(self) -> Any:
        return self._inner._iterations

    @_iterations.setter
    def _iterations(self, value: Any) -> None:
        pass

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate; setting it sets that."""
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._inner.learning_rate = value

    @property
    def _learning_rate(self) -> Any:
        return self._inner._learning_rate

    @_learning_rate.setter
    def _learning_rate(self, value: Any) -> None:
        if "_inner" in self.__dict__:
            self._inner._learning_rate = value

    def scale_loss(self, loss: Any) -> Any:
        """As the inner optimizer scales it."""
        scaling = self._inner if self._copied is None else self._copied.holder
        return scaling.scale_loss(loss)

    def save_own_variables(self, store: Any) -> None:
        """Save the inner optimizer's variables."""
        if self._copied is not None:
            super().save_own_variables(store)
        else:
            self._inner.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the inner optimizer's variables."""
        if self._copied is not None:
            super().load_own_variables(store)
        else:
            self._inner.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """The inner optimizer's configuration, from which its own class is made again."""
        config: dict[str, Any] = self._inner.get_config()
        return config

    def build_inner(self, variables: Sequence[Any]) -> None:
        """Create the inner optimizer's variables; nothing travels."""
        if self._copied is None:
            self._inner.build(list(variables))
        else:
            self._to_give = self._copied.build(self._inner, variables)
            self._copied = None
        self._give()

    def _give(self) -> None:
        """Give a copy's variables their values, as soon as they are initialized."""
        with tf.init_scope():
            if all(bridge.is_initialized(variable) for variable, _ in self._to_give):
                for variable, holding in self._to_give:
                    variable.assign(holding.numpy())
                self._to_give = []

    # TensorFlow's checkpoints see the inner optimizer's dependencies as this one's.

    def _maybe_initialize_trackable(self) -> None:
        self._inner._maybe_initialize_trackable()

    def _trackable_children(self, *arguments: Any, **options: Any) -> Any:
        return self._inner._trackable_children(*arguments, **options)

    def _lookup_dependency(self, *arguments: Any, **options: Any) -> Any:
        return self._inner._lookup_dependency(*arguments, **options)

    def __dir__(self) -> list[str]:
        # Keras saves what it finds by these names beside the variables. With our own attributes,
        # above all `inner_optimizer`, the file would hold everything twice.
        names = {*dir(type(self))} - {"inner_optimizer"}
        return sorted(names | {*dir(self._inner)})

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("_inner")
        ours = name in vars(self) or hasattr(type(self), name)
        if inner is None or ours or not hasattr(inner, name):
            # Bypasses Keras and TensorFlow, which would save it.
            object.__setattr__(self, name, value)
        else:
            setattr(inner, name, value)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for what the class lacks: momentum, beta_1, the slots.
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["_inner"], name)


def _forwarding(method: str, base: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Wrapper, *arguments: Any, **options: Any) -> Any:
        if "_inner" not in vars(self):  # Within the base's `__init__`.
            return base(self, *arguments, **options)
        return getattr(self._inner, method)(*arguments, **options)

    forward.__name__ = method
    forward.__doc__ = f"As `{method}` of the inner optimizer; nothing is averaged."
    return forward


# Forward every method that this class does not define: an inner optimizer may have its own
# `_apply_weight_decay`, say, which reads its own attributes.
for _base in keras.optimizers.Optimizer.__mro__:
    if "optimizer" in _base.__module__:
        for _name, _value in vars(_base).items():
            if isfunction(_value) and not _name.startswith("__") and _name not in vars(Wrapper):
                setattr(Wrapper, _name, _forwarding(_name, _value))
