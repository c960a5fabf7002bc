"""What strategies and compressions keep that is equal on all ranks, saved beside the optimizer.

In Keras's files it is in a group of its own, which plain Keras does not look at; so files load
there as before, and those of plain Keras here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ringreduce.keras import private


class StrategyState(private.KerasSaveable):
    """Arrays by name: `get` returns them, and `put` sets what was saved."""

    def __init__(
        self,
        get: Callable[[], Mapping[str, np.ndarray]],
        put: Callable[[dict[str, np.ndarray]], None],
    ) -> None:
        self._get, self._put = get, put

    def _obj_type(self) -> str:
        # By which Keras knows attributes that it need not look at.
        return "Loss"

    def save_own_variables(self, store: Any) -> None:
        """Write them."""
        for name, value in self._get().items():
            store[name] = value

    def load_own_variables(self, store: Any) -> None:
        """Read them, if there are some."""
        if found := {name: np.array(store[name]) for name in store.keys()}:  # noqa: SIM118
            self._put(found)
