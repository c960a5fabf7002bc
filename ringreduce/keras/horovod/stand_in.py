"""Gives `ringreduce.keras.horovod` to code that imports Horovod, such as an installed library."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ringreduce.vocabulary.errors import ConfigError

_PACKAGES = ("horovod.keras", "horovod.tensorflow", "horovod.tensorflow.keras")
_PARTS = ("callbacks", "elastic")
_MODULES = ("horovod", *_PACKAGES, *(f"{name}.{part}" for name in _PACKAGES for part in _PARTS))


def install_as_horovod() -> None:
    """Let imports of Horovod in this process, from now on, find `ringreduce.keras.horovod`.

    For code that cannot be changed. Call it on every rank, before anything imports Horovod, whether
    that is installed or not. Horovod for TensorFlow and Keras is there; an import of other parts,
    such as `horovod.torch`, fails as that of a module that does not exist.

    Raises:
        ConfigError: Horovod itself has been imported.
    """
    found = sys.modules.get("horovod")
    if isinstance(found, _StandIn):
        return
    if found is not None:
        text = f"cannot stand in for Horovod, which has been imported from {found.__path__}"
        raise ConfigError(text, remedy="Call install_as_horovod() before anything imports it.")
    own = sys.modules[__package__]
    for name in _MODULES:  # Parents come first.
        parent, _, last = name.rpartition(".")
        sys.modules[name] = _StandIn(name, getattr(own, last) if last in _PARTS else own)
        if parent:
            # Without this `horovod.tensorflow.keras` would be Keras, which the module has too.
            setattr(sys.modules[parent], last, sys.modules[name])


class _StandIn(ModuleType):
    """A package of Horovod's by `name` that has what the module `shown` has."""

    def __init__(self, name: str, shown: ModuleType) -> None:
        super().__init__(name, shown.__doc__)
        # Libraries ask `importlib.util.find_spec("horovod")` whether it is there.
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)
