"""Parts: variables of which each rank of a group holds a piece of one whole.

    rows dealt out (tables)           equal ranges (experts, split layers)
    rank 0   rows 0, 2, 4, ...        rank 0   the first half of an axis
    rank 1   rows 1, 3, 5, ...        rank 1   the second half

The state of a divided update is flat: each rank has a range of the flattened whole (`FlatPart`).
Its pieces are never made equal, compared or averaged over the group. A model is saved with wholes.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.rank_zero import assistants, assisted_call, waiting_ranks
from ringreduce.tensorflow.variables import path_of
from ringreduce.vocabulary.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Part:
    """How a variable is this rank's piece."""

    communicator: Communicator  # the group that holds the pieces, in the order of its ranks
    shape: tuple[int, ...]  # of the whole
    axis: int = 0  # along which it is divided
    is_dealt: bool = False  # index i is on rank i mod size, instead of equal ranges
    # All ranks of the group compute with the same rows of the batch, as those of a split layer;
    # else each has rows of its own.
    of_same_rows: bool = False

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape in which the whole is cut."""
        return self.shape

    def place(self, rank: int) -> tuple[slice, ...]:
        """Where the piece of a rank of the group is in the whole, of `cut_shape`."""
        size, count = self.communicator.size, self.cut_shape[self.axis]
        rows = slice(rank * (count // size), (rank + 1) * (count // size))
        if self.is_dealt:
            rows = slice(rank, None, size)
        return (*(slice(None) for _ in range(self.axis)), rows)

    @property
    def lengths(self) -> list[int]:
        """The length of each rank's piece along the axis."""
        every = range(self.cut_shape[self.axis])
        return [len(every[self.place(rank)[-1]]) for rank in range(self.communicator.size)]

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        count = self.lengths[self.communicator.rank]
        return (*self.cut_shape[: self.axis], count, *self.cut_shape[self.axis + 1 :])

    def piece(self, whole: Any, rank: int | None = None) -> np.ndarray:
        """A rank's piece, by default this one's, of an array or what is indexed like one."""
        at = self.place(self.communicator.rank if rank is None else rank)
        return np.ascontiguousarray(self.laid_out(whole)[at])

    def laid_out(self, whole: Any) -> Any:
        """`whole`, an array or what is indexed like one, in the `cut_shape`."""
        return whole

    def joined(self, rows: np.ndarray) -> np.ndarray:
        """The whole, of all ranks' pieces joined along their first dimension."""
        joined = np.empty(self.cut_shape, rows.dtype)
        for rank, piece in enumerate(np.split(rows, np.cumsum(self.lengths)[:-1])):
            joined[self.place(rank)] = np.moveaxis(piece, 0, self.axis)
        return joined.reshape(self.shape)

    def require_divisible(self, what: str) -> None:
        """ConfigError unless each rank gets as much; `what` names the axis and whose it is."""
        count = self.shape[self.axis]
        require_multiple(count, f"{what}, {count},", self.communicator)


@dataclass(frozen=True, eq=False)
class FlatPart(Part):
    """How a flat variable is this rank's range of the flattened whole."""

    ranges: Sequence[tuple[int, int]] = ()  # begin and end of each rank's, of any length

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """See `Part`."""
        return (math.prod(self.shape),)

    def place(self, rank: int) -> tuple[slice, ...]:
        """See `Part`."""
        return (slice(*self.ranges[rank]),)

    def laid_out(self, whole: Any) -> Any:
        """See `Part`."""
        return np.reshape(whole, -1)


def require_multiple(count: int, what: str, ring: Communicator) -> None:
    """ConfigError unless the ranks can have equally many of `count`."""
    if count % ring.size:
        text = f"cannot divide {what} among {ring.size} ranks"
        remedy = f"Make it a multiple of {ring.size}, or pass a group whose size divides it."
        raise ConfigError(text, **ring.config.who, remedy=remedy)


_NAME = "_ringreduce_part"
# In the order in which they are marked, which is the same on all ranks.
_numbers = itertools.count()
_marked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def mark(variable: Any, part: Part) -> Any:
    """Make a Keras variable a part, and return it; a plain one, where a rank has the whole."""
    if part.communicator.size > 1:
        number = next(_numbers)
        setattr(variable, _NAME, (part, number))
        _marked[number] = variable
    return variable


def part_of(variable: Any) -> Part | None:
    """How `variable` is divided; None: it is no part."""
    marks = getattr(variable, _NAME, None)
    return None if marks is None else marks[0]


def pieces_in(variables: Iterable[Any]) -> list[tuple[Any, Part]]:
    """Find the parts among `variables`, each with how it is divided."""
    return [(v, part) for v in variables if (part := part_of(v)) is not None]


def parts_in(variables: Iterable[Any]) -> list[Any]:
    """Find the parts among `variables`."""
    return [variable for variable, _ in pieces_in(variables)]


def has_parts(model: Any) -> bool:
    """Whether a model, or its optimizer, has parts: all ranks must take part when it is saved."""
    optimizer = getattr(model, "optimizer", None)
    return bool(parts_in([*model.weights, *getattr(optimizer, "variables", ())]))


def is_own_piece(variable: Any) -> bool:
    """Whether its gradients are of all ranks' rows, and are not averaged."""
    part = part_of(variable)
    return part is not None and not part.of_same_rows


def whole_of(variable: Any) -> np.ndarray:
    """The whole value of a variable, for a file, on rank 0; ConfigError if no others wait."""
    part = part_of(variable)
    if part is None:
        return np.asarray(variable)
    if waiting_ranks() is None:
        raise ConfigError(
            f"cannot save, pickle or copy {path_of(variable)} on one rank alone: each of "
            f"{part.communicator.size} ranks has a piece of it",
            **part.communicator.config.who,
            remedy="Let all ranks take part: rr.on_rank_zero(lambda: model.save(path)) on each of "
            "them; around a callback of your own that saves, rr.callbacks.OnRankZero(callback). "
            "ModelCheckpoint and BackupAndRestore need nothing in rr.fit or rr.callbacks.Together.",
        )
    return _gathered(variable, part, _assisted("gather a part", variable, part))


def give_whole(variable: Any, value: Any) -> None:
    """Give a variable its piece of `value`, which a file has; others that wait get theirs."""
    part = part_of(variable)
    if part is None:
        variable.assign(np.asarray(value))
        return
    if tuple(value.shape) != part.shape:
        raise ConfigError(
            f"got {tuple(value.shape)} for {path_of(variable)}, which has the shape {part.shape} "
            "over all ranks",
            **part.communicator.config.who,
            remedy="Load a file of a model with the same sizes.",
        )
    if waiting_ranks() is not None:
        _scattered(variable, part, _assisted("scatter a part", variable, part), value)
    else:
        variable.assign(part.piece(value))


def save_wholes(variables: Iterable[Any], store: Any) -> None:
    """Put the wholes of `variables` into a file, as Keras's layers and optimizers save theirs."""
    for number, variable in enumerate(variables):
        store[str(number)] = whole_of(variable)


def load_wholes(variables: Iterable[Any], store: Any) -> None:
    """Give `variables` their pieces of what `save_wholes`, or Keras, has put there."""
    for number, variable in enumerate(variables):
        give_whole(variable, store[str(number)])


def _assisted(what: str, variable: Any, part: Part) -> int:
    """Have the ranks that wait take part in a call of which this one is the root; return it."""
    _, number = getattr(variable, _NAME)
    # The others may be in other groups with parts of the same number.
    group, root = list(part.communicator.members), part.communicator.rank
    assisted_call(what, [number, group, root])
    return root


def _assist(run: Callable[[Any, Part, int], object], request: Sequence[Any]) -> None:
    number, group, root = request
    variable = _marked.get(number)
    part = None if variable is None else part_of(variable)
    if part is not None and list(part.communicator.members) == group:
        run(variable, part, root)


def _gathered(variable: Any, part: Part, root: int) -> np.ndarray:
    """The whole on `root`; elsewhere nothing of use. Collective in the part's group."""
    piece = np.ascontiguousarray(np.moveaxis(np.asarray(variable), part.axis, 0))
    rows: np.ndarray = part.communicator.gather(piece, root)
    return part.joined(rows) if part.communicator.rank == root else rows


def _scattered(variable: Any, part: Part, root: int, whole: Any = None) -> None:
    """Assign its piece of `root`'s `whole`. Collective in the part's group."""
    ring, rows = part.communicator, None
    if ring.rank == root:
        pieces = [np.moveaxis(part.piece(whole, r), part.axis, 0) for r in range(ring.size)]
        rows = np.ascontiguousarray(np.concatenate(pieces), np.asarray(variable).dtype)
    piece = ring.scatter(rows, root, part.lengths)
    variable.assign(np.moveaxis(piece, 0, part.axis))


assistants["gather a part"] = partial(_assist, _gathered)
assistants["scatter a part"] = partial(_assist, _scattered)
