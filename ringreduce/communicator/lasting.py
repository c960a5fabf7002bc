"""The parts of a communicator that outlive its sessions, as when its ring is formed anew."""

import weakref
from typing import Protocol

from ringreduce.effects.events import Events
from ringreduce.engine.engine import Engine
from ringreduce.vocabulary.errors import MismatchError, RingReduceError


class Explainer(Protocol):
    """Explains calls that differ, by an integration's knowledge of their signatures."""

    def explain(self, error: MismatchError) -> RingReduceError | None:
        """Return a better error for all ranks than `error`, of ranks in different calls, or None.

        Called in the thread of the failed call, before the other ranks are notified.
        """


class Lasting:
    """The parts that one communicator's sessions use, one after the other."""

    def __init__(self) -> None:
        self.events = Events()  # what its calls were
        # The background thread, with the plans of traced steps; None until it is needed.
        self.engine: Engine | None = None
        self.explainers: weakref.WeakSet[Explainer] = weakref.WeakSet()
