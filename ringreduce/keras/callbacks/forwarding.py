"""Callbacks that hold others and forward every hook of Keras to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.vocabulary.errors import ConfigError

__all__ = ["Forwarding", "OnRankZero", "checked"]


class Forwarding(keras.callbacks.Callback):
    """Interface: a callback whose hooks call those of its members, in order."""

    def members(self) -> Sequence[Any]:
        """The callbacks that act on this rank."""
        raise NotImplementedError

    def set_model(self, model: Any) -> None:
        """Also sets the members' model."""
        super().set_model(model)
        for member in self.members():
            member.set_model(model)

    def set_params(self, params: Any) -> None:
        """Also sets the members' params."""
        super().set_params(params)
        for member in self.members():
            member.set_params(params)


def _forwarding(hook: str) -> Callable[..., None]:
    def forward(self: Forwarding, *arguments: Any, **options: Any) -> None:
        for member in self.members():
            getattr(member, hook)(*arguments, **options)

    forward.__name__ = hook
    forward.__doc__ = f"As `{hook}` of each member."
    return forward


# Not written out, so that a hook which a later Keras adds is forwarded too.
for _hook in dir(keras.callbacks.Callback):
    if _hook.startswith("on_"):
        setattr(Forwarding, _hook, _forwarding(_hook))


class OnRankZero(Forwarding):
    """Lets a callback act on rank 0 only, such as one that writes files.

    On other ranks none of its hooks is called, so it must not make collective calls itself. Within
    `Together`, what it changes in ``on_train_begin`` (weights, optimizer, initial epoch) goes to
    all ranks.

    Raises:
        ConfigError: `callback` is no Keras callback.
    """

    def __init__(self, callback: Any, communicator: Communicator | None = None) -> None:
        super().__init__()
        self.callback = checked(callback)
        self._communicator = communicator

    def members(self) -> Sequence[Any]:
        """The callback on rank 0, nothing elsewhere."""
        ring = self._communicator or default_communicator()
        return [self.callback] if ring.rank == 0 else []


def checked(callback: Any) -> Any:
    """Return `callback` if it is a Keras callback, else raise ConfigError."""
    if not isinstance(callback, keras.callbacks.Callback):
        raise ConfigError(f"got {callback!r}, which is no keras.callbacks.Callback")
    return callback
