"""An optimizer that forwards to another in all that Keras and TensorFlow use of it.

It has no variables: what is read, saved and checkpointed is the inner optimizer's. Saving records
the class of `model.optimizer`, so the wrapper's class has the name and module of the inner one. A
saved model therefore loads without ringreduce, with the plain optimizer. A subclass defines what
differs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import isfunction
from operator import attrgetter
from typing import Any, ClassVar

import keras
from keras.optimizers import LossScaleOptimizer

from ringreduce.keras import private
from ringreduce.vocabulary.errors import ConfigError


class Wrapper(keras.optimizers.Optimizer):
    """Forwards everything to the optimizer that it wraps, but for what a subclass defines."""

    around: Callable[[Any], Wrapper]  # which a subclass has
    # Set on classes that are made for one of optimizers: that.
    _inner_class: Any = None
    # All that there are.
    made: ClassVar[weakref.WeakSet[Wrapper]] = weakref.WeakSet()

    def __new__(cls, inner: Any, *arguments: Any, **options: Any) -> Any:
        """An instance of a class that is saved under the inner optimizer's name."""
        if cls._inner_class is None and isinstance(inner, keras.optimizers.Optimizer):
            cls = _named_after(type(inner), cls)  # type: ignore[arg-type]
        return super().__new__(cls)

    def __init__(self, inner: keras.Optimizer) -> None:
        # Not the base's: variables and options are those of `inner`.
        self._inner = inner
        Wrapper.made.add(self)

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer that updates weights; Keras's name for it, in callbacks and in files."""
        return getattr(self._inner, "inner_optimizer", self._inner)

    variables = property(attrgetter("_inner.variables"))
    built = property(attrgetter("_inner.built"))
    iterations = property(attrgetter("_inner.iterations"))
    learning_rate = property(
        attrgetter("_inner.learning_rate"),
        lambda self, value: setattr(self._inner, "learning_rate", value),
        doc="The inner optimizer's learning rate; setting it sets that.",
    )

    def build_inner(self, variables: Sequence[Any]) -> None:
        """Create the inner optimizer's variables; nothing travels."""
        self._inner.build(list(variables))

    def __dir__(self) -> list[str]:
        # Keras saves what it finds by these names beside the variables. With our own attributes,
        # above all `inner_optimizer`, the file would hold everything twice.
        return sorted({*dir(type(self))} - {"inner_optimizer"} | {*dir(self._inner)})

    def _go_around(self, outer: Any) -> None:
        """Turn `outer`, a LossScaleOptimizer made around this wrapper, into a wrapper around one.

        ``compile`` wraps the optimizer of a mixed_float16 model in one, which skips a step whose
        gradients are not finite. Outside, a rank with an infinity would skip the reduction, and the
        others wait forever (tensorflow#46863); inside it sees means, and all ranks skip alike.
        """
        if type(outer) is not LossScaleOptimizer:
            kind = type(outer).__name__
            text = f"got a {kind} around a DistributedOptimizer, whose steps some ranks would skip"
            raise ConfigError(text, remedy=f"Write DistributedOptimizer({kind}(...)).")
        wrapper = self
        if not isinstance(self._inner, LossScaleOptimizer):
            options = (outer.initial_scale, outer.dynamic_growth_steps, outer.name)
            wrapper = self.around(LossScaleOptimizer(self._inner, *options))
        # `outer` is what its maker gets, so it becomes the wrapper.
        object.__setattr__(outer, "__class__", type(wrapper))
        object.__setattr__(outer, "__dict__", vars(wrapper))
        Wrapper.made.add(outer)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor":
            # The last that the constructor of a LossScaleOptimizer does. It calls nothing of ours.
            maker = sys._getframe(1).f_locals.get("self")
            if isinstance(maker, LossScaleOptimizer):
                self._go_around(maker)
                return
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
        return getattr(self._inner, name)


@lru_cache
def _named_after(inner: type, wrapper: type[Wrapper]) -> type[Wrapper]:
    """A subclass of `wrapper` that Keras records under the class `inner` when it saves a model."""
    members = {"__doc__": wrapper.__doc__, "_inner_class": inner}
    named = type(inner.__name__, (wrapper,), members)
    private.save_as(named, inner)
    return named


def _forwarding(method: str) -> Callable[..., Any]:
    def forward(self: Wrapper, *arguments: Any, **options: Any) -> Any:
        return getattr(self._inner, method)(*arguments, **options)

    forward.__name__ = method
    forward.__doc__ = f"As `{method}` of the inner optimizer; nothing is averaged."
    return forward


# Forward every method that this class does not define: an inner optimizer may have its own
# `_apply_weight_decay`, say, which reads its own attributes. The first three make TensorFlow's
# checkpoints see the inner optimizer's dependencies.
_methods = ["_maybe_initialize_trackable", "_trackable_children", "_lookup_dependency"]
for _base in keras.optimizers.Optimizer.__mro__:
    if "optimizer" in _base.__module__:
        _methods += [name for name, value in vars(_base).items() if isfunction(value)]
for _name in _methods:
    if not _name.startswith("__") and _name not in vars(Wrapper):
        setattr(Wrapper, _name, _forwarding(_name))
