"""Checks that all ranks hold the same weights by comparing a hash of each variable."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.tensorflow.agreement import Difference, agree
from ringreduce.tensorflow.variables import path_of, value_of
from ringreduce.vocabulary.words import named


def verify_replicas(variables: Sequence[Any], communicator: Communicator | None = None) -> None:
    """Return if every rank holds the same values of `variables`, to the last bit.

    Ranks that apply the same means to the same weights stay bit-identical. If they do not,
    something has changed one rank alone: a callback that assigns on one rank, a layer whose updates
    are random, faulty memory. Collective: all ranks must call it at the same point of the program,
    with `keras.Variable` or `tf.Variable` in the same order. Leave out what may differ: states of
    random generators, and moving averages of normalization layers, which follow each rank's own
    data. Hashes every variable (about 1 GB/s) and sends 8 bytes; more only where something differs.

    Raises:
        MismatchError: they differ; on all ranks. The text names the first variable that differs,
            and the ranks that differ from the majority, or from rank 0 where there is none.
    """
    ring = communicator or default_communicator()
    if ring.size == 1:
        return
    own = np.array([_hash_of(variable) for variable in variables], np.int64)
    # A sum with zeros: one short exchange, where an all-gather makes two.
    together = np.zeros(ring.size, np.int64)
    together[ring.rank] = _as_number(hashlib.blake2b(own.tobytes(), digest_size=8))
    if len(set(ring.all_reduce(together).tolist())) == 1:
        return
    # All ranks have seen the difference, so all take part here.
    agree(ring, own.tolist(), partial(_difference, variables), "verify_replicas")


def differing(variables: Sequence[Any], communicator: Communicator) -> list[Any]:
    """Those of `variables` of which not all ranks hold the same value.

    Collective. Ranks that have different numbers of variables find no difference.
    """
    gathered = communicator.all_gather_object([_hash_of(variable) for variable in variables])
    if len(set(map(len, gathered))) > 1:
        return []
    columns = zip(*gathered, strict=True)
    return [v for v, column in zip(variables, columns, strict=True) if len(set(column)) > 1]


def _difference(
    variables: Sequence[Any], gathered: list[list[int]], members: Sequence[int]
) -> Difference:
    """Find, in the hashes of every rank, which ranks differ and in which of `variables`."""
    counts = list(map(len, gathered))
    if len(set(counts)) > 1:
        differing = _minority(counts)
        names = [members[place] for place in differing]
        return Difference(
            names[0],
            f"found {counts[differing[0]]} variables on {named('rank', names)} and "
            f"{_usual(counts)} on the others",
            "Build the same model and optimizer on every rank.",
        )
    columns = list(zip(*gathered, strict=True))
    bad = [number for number, column in enumerate(columns) if len(set(column)) > 1]
    differing = [members[place] for place in _minority(columns[bad[0]])]
    variable = variables[bad[0]]
    value = value_of(variable)
    whose = "has its own value" if len(differing) == 1 else "have values of their own"
    return Difference(
        differing[0],
        f"found that {named('rank', differing)} {whose} of {path_of(variable)} "
        f"({value.dtype.name} of shape {value.shape} here), and that {len(bad)} of "
        f"{len(columns)} variables differ",
        "Look for code that changes weights on some ranks only: a callback that assigns, a "
        "layer that draws random numbers for its updates, a checkpoint loaded after the first "
        "step; or an optimizer with a communicator of its own, which is to be passed here too. "
        "Start again from a checkpoint, or call broadcast_variables.",
    )


def _hash_of(variable: Any) -> int:
    value = np.ascontiguousarray(value_of(variable))
    about = f"{value.dtype.name} {tuple(variable.shape)} ".encode()
    # As bytes, since dtypes such as bfloat16 offer no buffer.
    digest = hashlib.blake2b(value.reshape(-1).view(np.uint8).data, digest_size=8)
    return _as_number(hashlib.blake2b(about + digest.digest(), digest_size=8))


def _as_number(digest: Any) -> int:
    return int.from_bytes(digest.digest(), "little", signed=True)


def _usual(values: Sequence[int]) -> int:
    """The value of most ranks; of several equally common ones rank 0's, if it is among them."""
    return max(values, key=lambda value: (values.count(value), value == values[0]))


def _minority(values: Sequence[int]) -> list[int]:
    """The ranks whose value differs from the usual one."""
    usual = _usual(values)
    return [rank for rank, value in enumerate(values) if value != usual]
