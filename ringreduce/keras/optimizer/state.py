"""Saves more than an inner optimizer's state, in groups of files that plain Keras ignores."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.strategies.base import EveryStep, Running


class StrategyState(private.KerasSaveable):
    """State of strategies and compressions, equal on all ranks, saved beside the optimizer.

    In Keras's files it is in a group of its own, which plain Keras does not look at. `get` returns
    arrays by name, and `put` sets what was saved.
    """

    def __init__(
        self,
        get: Callable[[], Mapping[str, np.ndarray]],
        put: Callable[[dict[str, np.ndarray]], None],
    ) -> None:
        self._get, self._put = get, put

    def _obj_type(self) -> str:
        # Keras does not look at attributes of this kind.
        return "Loss"

    def save_own_variables(self, store: Any) -> None:
        """Write them."""
        for name, value in self._get().items():
            store[name] = value

    def load_own_variables(self, store: Any) -> None:
        """Read them, if there are some."""
        if arrays := {name: np.array(store[name]) for name in store.keys()}:  # noqa: SIM118
            self._put(arrays)

    def broadcast(self, ring: Communicator, root: int) -> None:
        """Give all ranks what rank `root` has. Collective."""
        if ring.size == 1:
            return
        state = self._get() if ring.rank == root else {}
        layout = {name: (value.dtype.name, value.shape) for name, value in state.items()}
        received = {}
        for name, (dtype, shape) in ring.broadcast_object(layout, root).items():
            received[name] = np.array(state[name]) if name in state else np.empty(shape, dtype)
            ring.broadcast(received[name].reshape(-1), root)
        if ring.rank != root and received:
            self._put(received)


def state_of(running: Running, low_rank: Any, inner: Any) -> StrategyState | None:
    """State of a strategy and `PowerSGD` for the next step of `inner`; None: there is none."""

    def now() -> dict[str, np.ndarray]:
        if low_rank is None:
            return dict(running.state())
        return {**running.state(), **low_rank.state(private.trained_variables(inner))}

    def load(state: dict[str, np.ndarray]) -> None:
        running.load(state)
        if low_rank is not None:
            low_rank.load(state, private.trained_variables(inner))

    has_state = type(running).state is not Running.state or low_rank is not None
    return StrategyState(now, load) if has_state else None


def saved_options(
    options: Mapping[str, Any], maker: Callable[..., Any], local: Sequence[int]
) -> StrategyState | None:
    """`options` that are not `maker`'s defaults, as JSON; `local` variables by their numbers."""
    parameters = inspect.signature(maker).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    usual = {**defaults, "strategy": EveryStep()}
    saved = {name: value for name, value in options.items() if value != usual[name]}
    if local:
        saved["local_variables"] = list(local)
    if "op" in saved:
        saved["op"] = saved["op"].name
    text = json.dumps(saved, skipkeys=True, default=_described).encode()
    state = {"text": np.frombuffer(text, np.uint8)}
    return StrategyState(lambda: state, lambda _: None) if saved else None


def _described(value: Any) -> dict[str, Any]:
    """In a file, what is neither number nor text: ``{"LocalSGD": {"every": 50, "overlap": 0}}``."""
    return {type(value).__name__: vars(value) if is_dataclass(value) else str(value)}
