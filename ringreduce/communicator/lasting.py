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


class Residuals(Protocol):
    """What a compression keeps for the next step."""

    def squared_norm(self) -> float:
        """The sum of all squares; in any thread."""


class Lasting:
    """What the sessions of one communicator have in common, one after the other."""

    def __init__(self) -> None:
        self.events = Events()  # what its calls were
        # The background thread, with the plans of traced steps; None until it is needed.
        self.engine: Engine | None = None
        # Explainers know what signatures stand for; residuals are counted in statistics.
        self.explainers: weakref.WeakSet[Explainer] = weakref.WeakSet()
        self.residuals: weakref.WeakSet[Residuals] = weakref.WeakSet()
