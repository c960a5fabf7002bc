"""Compares what must be equal on all ranks; a difference raises an error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    compare: Callable[[list[Any], Sequence[int]], Difference | None],
    operation: str,
    signature: int = 0,
) -> list[Any]:
    """Gather a description from every rank; return all of them, in rank order, if they agree.

    Args:
        own: this rank's description, as `Communicator.all_gather_object` takes it.
        compare: finds a difference in the gathered descriptions, on every rank or on none; gets
            them and `Communicator.members`, by which it names ranks.
        operation: for the error.
        signature: 64 bits that say what is described.

    Raises:
        MismatchError: `compare` found a difference; on all ranks.
    """
    gathered = communicator.all_gather_object(own, signature=signature)
    if (found := compare(gathered, communicator.members)) is not None:
        raise communicator.fail(
            MismatchError(
                found.text,
                **communicator.config.who,
                peer=found.peer,
                operation=operation,
                remedy=found.remedy,
            )
        )
    return gathered
