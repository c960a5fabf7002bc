"""Compares what must be equal on all ranks; a difference raises an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ringreduce.communicator.communicator import Communicator
from ringreduce.vocabulary.errors import MismatchError


class Difference(NamedTuple):
    """The rank of the job that a MismatchError names, its text, and what to do."""

    peer: int
    text: str
    remedy: str


def agree(
    communicator: Communicator,
    own: Any,
    differ: Callable[[int, Any, int, Any], Difference | None],
    operation: str,
    signature: int = 0,
) -> list[Any]:
    """Gather a description from every rank; return all of them, in rank order, if they agree.

    Args:
        own: this rank's description, as `Communicator.all_gather_object` takes it.
        differ: how the descriptions of two ranks differ: gets the first rank of the job in
            `communicator`, its description, a rank, and that one's.
        operation: for the error.
        signature: 64 bits that say what is described.

    Raises:
        MismatchError: some differ; on all ranks.
    """
    gathered = communicator.all_gather_object(own, signature=signature)
    named = list(zip(communicator.members, gathered, strict=True))
    found = (differ(*named[0], *each) for each in named)
    refuse(communicator, next(filter(None, found), None), operation)
    return gathered


def refuse(communicator: Communicator, found: Difference | None, operation: str) -> None:
    """Raise the MismatchError of a difference that all ranks have found; None: return."""
    if found is None:
        return
    raise communicator.fail(
        MismatchError(
            found.text,
            **communicator.config.who,
            peer=found.peer,
            operation=operation,
            remedy=found.remedy,
        )
    )
