"""Engines of no ring, for tests of what runs in the background."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import ringreduce as rr
from ringreduce.effects.events import Events
from ringreduce.engine.engine import Engine, Owner

# Far above what anything here takes, and below the rings' own time limit.
DEADLINE_S = 15.0
TIMEOUT_S = 60.0


def engine_threads() -> set[str]:
    names = {each.name for each in threading.enumerate()} - {"ringreduce flight recorder"}
    return {name for name in names if name.startswith("ringreduce ")}


class Gate:
    """A piece of work that says when it has begun, and waits to be let through."""

    def __init__(self, result: Any = None) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self._result = result

    def __call__(self) -> Any:
        self.begun.set()
        assert self.open.wait(DEADLINE_S)
        return self._result

    def wait_begun(self) -> None:
        assert self.begun.wait(DEADLINE_S)


def new_engine() -> tuple[Engine, list[rr.RingReduceError]]:
    errors: list[rr.RingReduceError] = []
    return new_engine_of(errors.append), errors


def new_engine_of(fail: Callable[[rr.RingReduceError], object]) -> Engine:
    """An engine whose communicator does no more than that."""
    return Engine("ringreduce test", cast(Owner, SimpleNamespace(fail=fail)), Events())


def failing(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run
