"""Settings that must be equal on all ranks, and the first of them that are not.

Weights that differ because of another momentum or seed look like any others: nothing else says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isfunction
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.tensorflow.agreement import Difference, agree

# Of Keras's configurations: names are numbered anew in each process, the rest is of no effect.
_OF_NO_EFFECT = {"name", "module", "registered_name", "build_config", "compile_config"}
_SHOWN = 3


def require_same_settings(what: str, own: Mapping[str, str], ring: Communicator) -> None:
    """Raise unless `own` is equal on all ranks. Collective.

    Args:
        what: names them in the error, such as ``arguments of rr.fit``.
        own: settings as text, by name.

    Raises:
        MismatchError: some differ; on all ranks.
    """
    if ring.size == 1:
        return

    def compare(gathered: list[Any], members: Sequence[int]) -> Difference | None:
        first = gathered[0]
        for rank, theirs in zip(members, gathered, strict=True):
            names = [
                name
                for name in dict.fromkeys([*first, *theirs])
                if first.get(name) != theirs.get(name)
            ]
            if names:
                differ = "; ".join(
                    f"{name} is {first.get(name, 'absent')} on rank {members[0]} and "
                    f"{theirs.get(name, 'absent')} on rank {rank}"
                    for name in names[:_SHOWN]
                )
                return Difference(
                    rank, f"found different {what}: {differ}", "Pass the same on every rank."
                )
        return None

    agree(ring, dict(own), compare, "comparison of settings")


def settings_in(value: Any, name: str = "") -> dict[str, str]:
    """The numbers and texts in `value`, as text, by where they are: ``{"momentum": "0.9"}``.

    `value` may be nested, and have objects with a `get_config`, as Keras's have. Of others only the
    name, or the type, is in the result.
    """
    if value is None or isinstance(value, (bool, int, float, str, np.generic)):
        plain = value.item() if isinstance(value, np.generic) else value
        return {name: repr(plain)}
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":
            return {name: "a lambda"}  # Its code has the path of its file.
        parts = {str(key): part for key, part in value.items() if key not in _OF_NO_EFFECT}
    elif isinstance(value, (list, tuple)):
        parts = {str(index): part for index, part in enumerate(value)}
    elif hasattr(value, "get_config"):
        found = {name: type(value).__name__}
        try:
            return {**settings_in(value.get_config(), name), **found}
        except Exception:  # The user's own class may have none that works.
            return found
    else:
        return {name: getattr(value, "__name__", type(value).__name__)}
    return {
        place: text
        for key, part in parts.items()
        for place, text in settings_in(part, f"{name}.{key}" if name else key).items()
    }


def settings_of_optimizer(optimizer: Any) -> dict[str, str]:
    """Those of a Keras optimizer; not a constant learning rate, a variable that ranks copy."""
    if isfunction(private.learning_rate_of(optimizer)):
        return {"optimizer": type(optimizer).__name__}  # Keras warns where a lambda is described.
    found = settings_in(optimizer, "optimizer")
    return {
        name.removeprefix("optimizer."): text
        for name, text in found.items()
        if name.rpartition(".")[2] != "learning_rate"
    }
