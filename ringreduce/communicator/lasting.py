"""What of a communicator outlives its sessions, as when its ring is formed anew."""

import weakref
from typing import Protocol

from ringreduce.effects.events import Events
from ringreduce.engine.engine import Engine
from ringreduce.vocabulary.errors import MismatchError, RingReduceError


class Explainer(Protocol):
    """What an integration knows signatures to stand for."""

    def explain(self, error: MismatchError) -> RingReduceError | None:
        """What `error`, of ranks in different calls, means: a better error for all ranks, or None.

        Called in the thread of the failed call, before the other ranks are notified.
        """


class Lasting:
    """What the sessions of one communicator have in common, one after the other."""

    def __init__(self) -> None:
        self.events = Events()  # what its calls were
        # The background thread, with the plans of traced steps; None until it is needed.
        self.engine: Engine | None = None
        self.explainers: weakref.WeakSet[Explainer] = weakref.WeakSet()
