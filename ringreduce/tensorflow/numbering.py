"""Numbers of the collectives on tensors, by which those of a backward pass name what they are of.

They count calls as they are made, not as they are traced: the n-th is the n-th on every rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.wire import signature_of
from ringreduce.vocabulary.errors import MismatchError

__all__ = ["Numbers", "of"]


class Numbers:
    """Those of a communicator's calls; used by one call at a time, as the communicator is."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._current = (0, 0)

    def next(self, origin: int) -> tuple[int, Callable[..., int]]:
        """The number of the call that begins, and what makes its signature of its parts.

        Args:
            origin: number of the call whose gradient it is; 0: of none.
        """

        def sign(*parts: object) -> int:
            signature = signature_of(*parts, origin)
            self._current = (signature, origin)
            return signature

        return next(self._next), sign

    def explain(self, error: MismatchError) -> MismatchError | None:
        """What `error` means where ranks are at the gradients of different collectives."""
        signature, origin = self._current
        if origin == 0 or error.signatures[0] != signature:
            return None
        return MismatchError(
            f"takes the gradient of its tensor collective number {origin} while rank {error.peer} "
            "is in another call of that length",
            rank=error.rank,
            size=error.size,
            peer=error.peer,
            operation=error.operation,
            remedy="Ask the tape for the gradients of one loss, the sum of several if need be, and "
            "let every rank record the same on it.",
        )


_numbers: weakref.WeakKeyDictionary[Communicator, Numbers] = weakref.WeakKeyDictionary()


def of(communicator: Communicator) -> Numbers:
    """The numbers of a communicator's calls."""
    found = _numbers.get(communicator)
    if found is None:
        found = _numbers.setdefault(communicator, Numbers())
        communicator.explain_with(found)
    return found
