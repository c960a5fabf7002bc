"""What of a communicator outlives its sessions, as when its ring is formed anew."""

import weakref
from typing import Protocol

from ringreduce.effects.events import Events
from ringreduce.engine.engine import Engine
from ringreduce.vocabulary.errors import MismatchError, RingReduceError


class Explainer(Protocol):
    """Explains a mismatch better than two signatures do; see `Communicator.explain_with`."""

    def explain(self, error: MismatchError) -> RingReduceError | None:
        """A better error, or None."""


class Lasting:
    """What the sessions of one communicator have in common, one after the other."""

    def __init__(self) -> None:
        self.events = Events()  # what its calls were
        # The background thread, with the plans of traced steps; None until it is needed.
        self.engine: Engine | None = None
        # They know what signatures stand for.
        self.explainers: weakref.WeakSet[Explainer] = weakref.WeakSet()
