"""Moving averages of normalization layers, which each rank computes of its own rows alone."""

from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.parts.part import part_of
from ringreduce.keras.repeating import is_repeating, repeated
from ringreduce.tensorflow.variables import broadcast_variables


def averages_of(model: Any) -> list[Any]:
    """The variables of `model` that its training moves without a gradient."""
    return [
        variable
        for layer in private.layers_of(model)
        # Frozen averages do not move, and may be large.
        if layer.trainable and not private.has_layers(layer)
        for variable in layer.non_trainable_weights
        if part_of(variable) is None
    ]


def take_averages_of_rank_0(model: Any, ring: Communicator) -> None:
    """Have all ranks go on with rank 0's, which it would save. Collective."""
    averages = averages_of(model)
    if ring.size == 1 or not averages:
        return
    if not is_repeating(ring):
        broadcast_variables(averages, ring)
        return
    # In plain types, since a rank that has missed the end gets them from another.
    averages_here = [variable.numpy().tolist() for variable in averages]
    values = repeated(ring, lambda: ring.broadcast_object(averages_here))
    for variable, value in zip(averages, values, strict=True):
        variable.assign(value)
