"""Whether all ranks hold the same weights: a hash of each variable, compared.

Ranks that apply the same means to the same weights stay equal to the last bit. If they do not,
something has touched one of them alone: a callback that assigns on one rank, a layer whose
updates are random, memory that fails.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow.variables import path_of, value_of
from ringreduce.vocabulary.errors import MismatchError, RingReduceError

__all__ = ["verify_replicas"]


def verify_replicas(variables: Sequence[Any], communicator: Communicator) -> None:
    """Return if every rank holds the same values of `variables`, to the last bit.

    Reads all of them, at about 1 GB/s, and sends 8 bytes; more only where something differs.

    Args:
        variables: `tf.Variable` or `keras.Variable`, in the same order on all ranks.
        communicator: whose ranks.

    Raises:
        MismatchError: dtype, shape or a value of one differs, or their number; on all ranks.
            The text names the first such variable, and the ranks that differ from the majority
            (where there is none, from rank 0). The communicator is broken by it.
    """
    if communicator.size == 1:
        return
    own = np.array([_hash_of(variable) for variable in variables], np.int64)
    # A sum with zeros: one short exchange, where an all-gather makes two.
    together = np.zeros(communicator.size, np.int64)
    together[communicator.rank] = _as_number(hashlib.blake2b(own.tobytes(), digest_size=8))
    if len(set(communicator.all_reduce(together).tolist())) == 1:
        return
    # All ranks have seen that, so all of them go on here.
    counts = communicator.all_gather(np.array([own.size], np.int64)).tolist()
    if len(set(counts)) > 1:
        differing = _minority(counts)
        raise _error(
            communicator,
            f"found {counts[differing[0]]} variables on {_names(differing)} and "
            f"{_usual(counts)} on the others",
            differing,
            "Build the same model and optimizer on every rank.",
        )
    hashes = communicator.all_gather(own).reshape(communicator.size, own.size)
    bad = np.flatnonzero((hashes != hashes[0]).any(axis=0))
    column = hashes[:, bad[0]].tolist()
    variable = variables[bad[0]]
    value = value_of(variable)
    whose = "its own value" if len(_minority(column)) == 1 else "values of their own"
    raise _error(
        communicator,
        f"found that {_names(_minority(column))} {_have(_minority(column))} {whose} of "
        f"{path_of(variable)} ({value.dtype.name} of shape {value.shape} here), and that "
        f"{bad.size} of {own.size} variables differ",
        _minority(column),
        "Look for code that changes weights on some ranks only: a callback that assigns, a "
        "layer that draws random numbers for its updates, a checkpoint loaded after the first "
        "step. Start again from a checkpoint, or call broadcast_variables.",
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
    """What most ranks have; where as many have another, rank 0's if it is among them."""
    often = Counter(values).most_common()
    most = [value for value, count in often if count == often[0][1]]
    return values[0] if values[0] in most else most[0]


def _minority(values: Sequence[int]) -> list[int]:
    """The ranks that have another value than most."""
    usual = _usual(values)
    return [rank for rank, value in enumerate(values) if value != usual]


def _names(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _error(
    communicator: Communicator, message: str, differing: Sequence[int], remedy: str
) -> RingReduceError:
    """The error to raise here; the other ranks raise it too, having found the same."""
    return communicator.fail(
        MismatchError(
            message,
            rank=communicator.rank,
            size=communicator.size,
            peer=differing[0],
            operation="verify_replicas",
            remedy=remedy,
        )
    )
