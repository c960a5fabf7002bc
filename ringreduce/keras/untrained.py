"""Warns of weights that nothing trains and that differ between ranks when training begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.seeds import is_seed_state
from ringreduce.keras.users_line import warn_at_users_line
from ringreduce.tensorflow.replicas import differing
from ringreduce.tensorflow.variables import path_of


class WeightsWarning(UserWarning):
    """Ranks train with different values of weights that training does not make equal."""


def warn_of_different_weights(
    model: Any, trained: Sequence[Any], communicator: Communicator
) -> None:
    """Compare the weights of `model` that are not among `trained`; rank 0 warns of a difference.

    Collective. Frozen layers with random values, `Normalization` adapted to a part of the data, and
    moving averages are such weights. States of random generators should differ and are left out.
    """
    if communicator.size == 1:
        return
    known = {id(variable) for variable in trained}
    others = {id(v): v for v in model.weights if id(v) not in known and not is_seed_state(v)}
    found = differing(list(others.values()), communicator)
    if not found or communicator.rank != 0:
        return
    names = ", ".join(path_of(variable) for variable in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    warn_at_users_line(
        f"the ranks have different values of {names}{more}, which training does not change or make "
        "equal: each rank goes on with its own. Call rr.broadcast_variables(model.variables) after "
        "building the model (and after Normalization.adapt, which sees only its rank's data), or "
        "seed all ranks alike with keras.utils.set_random_seed.",
        WeightsWarning,
    )
