"""Horovod's process sets: groups of ranks, by the numbers that ranks have in the job."""

import itertools
from collections.abc import Iterable, Sequence

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.checks.settings import Settings, require_same_settings
from ringreduce.vocabulary.errors import ConfigError


class ProcessSet:
    """Some ranks of the job, which make collective calls of their own once it is added.

    `Communicator.split` does what `add_process_set` does, for several groups at once.

    Attributes:
        ranks: in ascending order.
        process_set_id: a number, equal on all ranks; None before it is added, and once it is
            removed.

    Raises:
        ConfigError: `ranks` are no different whole numbers from 0 on.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        listed = list(ranks)
        self.ranks = sorted(listed)
        is_clean = all(isinstance(rank, int) and rank >= 0 for rank in listed)
        if not listed or not is_clean or len(set(listed)) < len(listed):
            text = f"got the ranks {listed} for a ProcessSet"
            raise ConfigError(text, remedy="Pass a list of ranks of the job, each once.")
        self.process_set_id: int | None = None
        self._ring: Communicator | None = None
        self._group: Communicator | None = None

    def included(self) -> bool:
        """Whether this rank is in it."""
        return default_communicator().rank in self.ranks

    def size(self) -> int:
        """Number of its ranks."""
        return len(self.ranks)

    def rank(self) -> int:
        """This rank's number in it. Raises as `communicator`."""
        return self.communicator.rank

    @property
    def communicator(self) -> Communicator:
        """The group. Raises ConfigError on a rank that is not in it, and unless it is added."""
        ring = default_communicator()
        if self._ring is not ring:
            text = f"{self} has not been added, or was removed"
            remedy = "Call add_process_set on all ranks, or pass it to init(process_sets=[...])."
            raise ConfigError(text, **ring.config.who, remedy=remedy)
        if self._group is None:
            text = f"makes a call on {self}, in which it is not"
            remedy = "Make it where process_set.included() is true."
            raise ConfigError(text, **ring.config.who, remedy=remedy)
        return self._group

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id, self._ring = 0, None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(default_communicator().size))

    @property
    def communicator(self) -> Communicator:
        return default_communicator()


global_process_set = _GlobalProcessSet()
_numbers = itertools.count(1)
_added: dict[int | None, ProcessSet] = {0: global_process_set}


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Form the group of a process set, or of a list of ranks; return the process set.

    Collective over all ranks of the job, also those that are not in it: all add the same sets in
    the same order.

    Raises:
        ConfigError: there is no such rank.
        MismatchError: the ranks pass different sets.
    """
    ring = default_communicator()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    remedy = "Add the same ones on all ranks, in order."
    require_same_settings([Settings("process sets", {"ranks": str(added.ranks)}, remedy)], ring)
    if added.ranks[-1] >= ring.size:
        text = f"cannot add {added}: ranks are 0 to {ring.size - 1}"
        raise ConfigError(text, **ring.config.who, remedy="Add ranks of this job.")
    added._group = ring.split(0 if ring.rank in added.ranks else None)
    added._ring = ring
    added.process_set_id = next(_numbers)
    _added[added.process_set_id] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close the group of a process set; return whether there was one. All ranks call it."""
    if process_set._ring is None:
        return False
    group = process_set._group
    _added.pop(process_set.process_set_id, None)
    process_set.process_set_id = process_set._ring = process_set._group = None
    if group is not None:
        group.close()
    return True


def with_id(number: int) -> ProcessSet:
    """The process set of that number; ConfigError if there is none."""
    if number in _added:
        return _added[number]
    text = f"got process_set_id={number}; those added are {list(_added)}"
    raise ConfigError(text, remedy="Pass process_set.process_set_id of one that is added.")
