"""Compares what must be equal on all ranks; a difference raises an error on every rank."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import fail
from ringreduce.vocabulary.errors import MismatchError


class Difference(NamedTuple):
    """The rank of the job that a MismatchError names, its text, and what to do."""

    peer: int
    text: str
    remedy: str


def agree(
    ring: Communicator,
    value: Any,
    differ: Callable[[int, Any, int, Any], Difference | None],
    operation: str,
    signature: int = 0,
) -> list[Any]:
    """Gather each rank's description `value`; return all, in rank order, if they agree.

    `differ` says how the descriptions of two ranks differ, which are named by their ranks in the
    job; `signature`, 64 bits, what is described. MismatchError, on all ranks, if some differ.
    """
    gathered = ring.all_gather_object(value, signature=signature)
    named = list(zip(ring.members, gathered, strict=True))
    differences = (differ(*named[0], *row) for row in named)
    refuse(ring, next(filter(None, differences), None), operation)
    return gathered


def count_true(ring: Communicator, flag: bool) -> int:
    """On how many ranks `flag` is true. Collective: one short exchange."""
    return int(ring.all_reduce(np.array([flag], np.int64))[0])


def refuse(ring: Communicator, first: Difference | None, operation: str) -> None:
    """Raise the MismatchError of a difference that all ranks have found; None: return."""
    if first is None:
        return
    error = MismatchError(
        first.text, **ring.config.who, peer=first.peer, operation=operation, remedy=first.remedy
    )
    raise fail(ring, error)
