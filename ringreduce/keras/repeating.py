"""Repeats exchanges of a training's callbacks that a lost rank has broken."""

from collections.abc import Callable
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow.kept import kept


class Repeating:
    """Holds the function that makes a training's meetings; None: it is not elastic."""

    by: Callable[[Callable[[], Any]], Any] | None = None


def repeated(ring: Communicator, meeting: Callable[[], Any]) -> Any:
    """The result of `meeting`, which makes collective calls of `ring`; made again after a loss.

    Where training is not elastic that is ``meeting()``. It must not change what a repetition would
    change again. A rank that has missed its end gets the result of another, in plain types.
    """
    repeat = kept(ring, Repeating).by
    return meeting() if repeat is None else repeat(meeting)


def told_by_ranks(ring: Communicator, value: Any) -> dict[int, Any]:
    """What each rank of `ring` passes as `value`, of plain types, by rank, in order. Collective.

    Of the ranks that there were then: `ring` may have lost some when this returns.
    """
    told = repeated(ring, lambda: [*zip(ring.members, ring.all_gather_object(value), strict=True)])
    return dict(told)


def is_repeating(ring: Communicator) -> bool:
    """Whether training on `ring` goes on when ranks are lost."""
    return kept(ring, Repeating).by is not None
