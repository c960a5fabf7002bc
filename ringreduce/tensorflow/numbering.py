"""Numbers each tensor collective, so that its gradient can name the forward call.

The numbers count calls as they run, not as they are traced: the n-th call is the n-th on every
rank. A gradient's number follows from that of its collective alone, since TensorFlow may run
several gradients in any order.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.wire import signature_of
from ringreduce.vocabulary.errors import MismatchError

# In place of a forward call's number: there is no such call, or its number is not known.
NONE, UNKNOWN = 0, -1
# Numbers of the n-th forward call, its gradient, that one's: n, n + _DEGREE, n + 2 * _DEGREE.
_DEGREE = 1 << 48


class Numbers:
    """The numbers of a communicator's calls. Several threads may compute gradients at a time."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._calling = threading.local()

    def next(self, origin: int) -> tuple[int, Callable[..., int]]:
        """The number of the call that begins, and a function that makes its signature from parts.

        `origin` is the number of the call whose gradient this is, or NONE, or UNKNOWN.
        """

        def sign(*parts: object) -> int:
            signature = signature_of(*parts, origin)
            self._calling.signature, self._calling.origin = signature, origin
            return signature

        if origin == NONE:
            return next(self._next), sign
        return (UNKNOWN if origin == UNKNOWN else origin + _DEGREE), sign

    def explain(self, error: MismatchError) -> MismatchError | None:
        """The error for ranks that compute gradients of different collectives; None: they do not.

        Called in the thread of the call that failed with `error`.
        """
        origin = getattr(self._calling, "origin", NONE)
        if origin in (NONE, UNKNOWN) or error.signatures[0] != self._calling.signature:
            return None
        return MismatchError(
            f"takes the gradient of its tensor collective number {origin % _DEGREE} while rank "
            f"{error.peer} is in another call of that length",
            rank=error.rank,
            size=error.size,
            peer=error.peer,
            operation=error.operation,
            remedy="Ask the tape for the gradients of one loss, the sum of several if need be, "
            "within the function that computes it, and let every rank record the same on it.",
        )


_numbers: weakref.WeakKeyDictionary[Communicator, Numbers] = weakref.WeakKeyDictionary()


def of(communicator: Communicator) -> Numbers:
    """The numbers of a communicator's calls."""
    found = _numbers.get(communicator)
    if found is None:
        found = _numbers.setdefault(communicator, Numbers())
        communicator.explain_with(found)
    return found
