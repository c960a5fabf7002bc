"""Reads variables of a model and its optimizer, and gives all ranks the values of one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.buckets import GradientSpec, first_difference
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow.agreement import Difference, agree


def broadcast_variables(
    variables: Sequence[Any], communicator: Communicator, root: int = 0
) -> bool:
    """Give all ranks `root`'s values of `variables`; return whether any differed on this rank.

    A variable, `tf.Variable` or `keras.Variable`, is assigned only where its value differs.

    Raises:
        MismatchError: as `broadcast_values`.
    """
    own = [value_of(variable) for variable in variables]
    found = broadcast_values([path_of(variable) for variable in variables], communicator, root, own)
    differed = False
    for variable, before, after in zip(variables, own, found, strict=True):
        if before.tobytes() != after.tobytes():
            differed = True
            variable.assign(after)
    return differed


def broadcast_values(
    paths: Sequence[str], communicator: Communicator, root: int, values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The `values` that `root` passed, on all ranks; new arrays.

    Raises:
        MismatchError: the ranks' variables differ in number, name, shape or dtype, or the ranks run
            different versions of TensorFlow or Keras; on all ranks.
    """
    named = zip(paths, values, strict=True)
    own = {
        "versions": _versions(),
        "variables": [(path, value.shape, value.dtype.name) for path, value in named],
    }
    agree(
        communicator,
        own,
        lambda gathered, members: _difference(gathered, members, communicator.rank),
        "broadcast of the initial weights",
        signature_of("variables"),
    )
    found = [np.array(value) for value in values]  # TensorFlow's ops get scalars, not arrays.
    for value in found:
        # As bytes, so that every dtype travels, booleans and 8-bit floats included.
        communicator.broadcast(value.reshape(-1).view(np.uint8), root)
    return found


def _difference(gathered: list[Any], members: Sequence[int], own: int) -> Difference | None:
    """Where a rank's libraries or variables differ from those of rank `own`."""
    ours = gathered[own]
    specs = [[GradientSpec(p, tuple(s), d) for p, s, d in each["variables"]] for each in gathered]
    for place, (peer, theirs) in enumerate(zip(members, gathered, strict=True)):
        # Ranks that never import Keras have no version of it.
        for library in ours["versions"].keys() & theirs["versions"].keys():
            here, there = ours["versions"][library], theirs["versions"][library]
            if here != there:
                return Difference(
                    peer,
                    f"runs {library} {here}, rank {peer} runs {library} {there}",
                    "Install the same versions on every rank: results would differ silently.",
                )
        if difference := first_difference(specs[own], specs[place], "variables"):
            return Difference(
                peer,
                f"has another model than rank {peer}: here {difference[0]}; there {difference[1]}",
                "Build the same model and optimizer on every rank, in the same order and under the "
                "same names; only the numbers of automatic names may differ.",
            )
    return None


def _versions() -> dict[str, str]:
    """The versions, of the libraries this process has imported, that the ranks must share."""
    keras = sys.modules.get("keras")
    found = {"TensorFlow": tf.__version__, "Keras": getattr(keras, "__version__", "")}
    return {library: version for library, version in found.items() if version}


def is_initialized(variable: Any) -> bool:
    """Whether a variable has a value; call it outside of a function, or in `tf.init_scope`.

    A variable created while a function is traced gets its value after that. Until then it reads as
    zeros, without an error.
    """
    plain = variable if isinstance(variable, tf.Variable) else variable.value
    return bool(tf.raw_ops.VarIsInitializedOp(resource=plain.handle))


def value_of(variable: Any) -> np.ndarray:
    """The value of a variable as an array; do not write to it."""
    return np.asarray(variable.numpy())


def path_of(variable: Any) -> str:
    """The name of a variable in messages."""
    return str(getattr(variable, "path", variable.name))
