"""What of a communicator outlives its sessions, as when its ring is formed anew."""

from __future__ import annotations

import weakref
from typing import Protocol

from ringreduce.vocabulary.errors import MismatchError, RingReduceError


class Explainer(Protocol):
    """Explains a mismatch better than two signatures do; see `Communicator.explain_with`."""

    def explain(self, error: MismatchError) -> RingReduceError | None:
        """A better error, or None."""


class Lasting:
    """What the sessions of one communicator have in common, one after the other.

    Attributes:
        explainers: know what signatures stand for.
        former_failures: what has broken the sessions before the present one.
    """

    def __init__(self) -> None:
        self.explainers: weakref.WeakSet[Explainer] = weakref.WeakSet()
        self.former_failures: tuple[RingReduceError, ...] = ()

    def explained(self, error: RingReduceError) -> RingReduceError | None:
        """A better error for `error` from an integration, or None."""
        if isinstance(error, MismatchError) and error.origin is None:
            for explainer in list(self.explainers):
                if (better := explainer.explain(error)) is not None:
                    return better
        return None
