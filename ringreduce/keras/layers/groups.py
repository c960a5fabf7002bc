"""Keeps the ranks of a model group alike, beside their pieces of split layers.

    ranks 0, 1   a model group: pieces 0 and 1 of split layers, all else alike, the same rows
    ranks 2, 3   another one: the same, with other rows
    ranks 0, 2   a data group: the same pieces, over which gradients are averaged; so are 1, 3

All that is alike gets the same gradients on the ranks of a model group, without being sent. So it
need only begin alike: values, and states of random generators.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.layers.part import part_of, pieces_in
from ringreduce.tensorflow.agreement import count_true
from ringreduce.tensorflow.variables import broadcast_variables
from ringreduce.vocabulary.errors import ConfigError


def model_group(
    variables: Iterable[Any], of_layers: Iterable[Communicator] = ()
) -> Communicator | None:
    """The group that holds the pieces of split layers among `variables`; None: there are none.

    `of_layers` are those of split layers that have no variables yet.
    """
    of_parts = [part.communicator for _, part in pieces_in(variables) if part.of_same_rows]
    groups: dict[tuple[int, ...], Communicator] = {}
    for group in (*of_parts, *of_layers):
        groups.setdefault(group.members, group)
    if len(groups) > 1:
        first = next(iter(groups.values()))
        text = f"has split layers on different groups, of ranks {' and '.join(map(str, groups))}"
        remedy = "Pass all split layers of a model one communicator."
        raise ConfigError(text, **first.config.who, remedy=remedy)
    return next(iter(groups.values()), None)


def training_ranks(variables: Iterable[Any], data: Communicator) -> Communicator:
    """All ranks that train a model with these `variables`: `data`, or with split layers more."""
    return ranks_around(model_group(variables), data)


def ranks_around(group: Communicator | None, data: Communicator) -> Communicator:
    """All ranks that train a model whose pieces `group` holds; None: it has none."""
    if group is None:
        return data
    if data.size == 1:
        return group
    every = group.parent
    if every is None or every.size != group.size * data.size or every is not data.parent:
        raise ConfigError(
            f"averages over ranks {list(data.members)} a model with split layers, whose pieces are "
            f"on ranks {list(group.members)}: these do not make up one communicator",
            **data.config.who,
            remedy="Split both from one: model_group = comm.split(comm.rank // S), "
            "data = comm.split(comm.rank % S).",
        )
    return every


def alike(variables: Iterable[Any]) -> list[Any]:
    """Select the `variables` that are equal on all ranks of a model group."""
    return [v for v in variables if (part := part_of(v)) is None or not part.of_same_rows]


def make_alike(variables: Sequence[Any], group: Communicator | None) -> bool:
    """Give all ranks of a model group its first one's values; return whether some differed."""
    if group is None:
        return False
    return count_true(group, bool(broadcast_variables(alike(variables), group))) > 0
