"""Warns of what cannot be equal for N ranks and for one process with the same global batch."""

from __future__ import annotations

from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.normalization import SyncBatchNormalization
from ringreduce.keras.users_line import warn_at_users_line


class ParityWarning(UserWarning):
    """N ranks do not train exactly as one process with the same global batch does."""


def warn_of_differences(model: Any, communicator: Communicator) -> None:
    """Warn on rank 0 of layers and losses that look at a whole batch."""
    if communicator.rank == 0 and (found := differences(model)):
        warn_at_users_line(
            f"{communicator.size} ranks will not train exactly as one process does with the same "
            "global batch, since " + "; ".join(found) + ".",
            ParityWarning,
        )


def differences(model: Any) -> list[str]:
    """What in a built and compiled model sees its rank's rows only, by name and with a remedy."""
    layers = [layer for layer in private.layers_of(model) if layer.trainable]
    found = []
    if names := _names(filter(_normalizes_batches, layers)):
        found.append(f"{names}: each rank normalizes its rows (use rr.SyncBatchNormalization)")
    if names := _names(filter(_is_random, [model, *layers])):
        found.append(f"{names}: each rank draws other random numbers")
    for loss in _losses(model):
        reduction = getattr(loss, "reduction", None)
        if reduction in ("mean_with_sample_weight", "sum"):
            found.append(
                f"the loss {loss.name}: with reduction={reduction!r} it is no mean over samples"
            )
    if (names := _names(filter(_masks, layers))) and _may_mask_outputs(model):
        found.append(f"{names}: if the mask reaches the loss, that is a mean over what it leaves")
    return found


def _normalizes_batches(layer: Any) -> bool:
    is_plain = not isinstance(layer, SyncBatchNormalization)
    return isinstance(layer, keras.layers.BatchNormalization) and is_plain


def _is_random(layer: Any) -> bool:
    if isinstance(layer, keras.layers.RNN) or hasattr(layer, "cell"):
        return False  # Their cells are layers too, and always have a generator.
    if hasattr(layer, "recurrent_dropout"):
        return bool(layer.dropout or layer.recurrent_dropout)
    return any(isinstance(one, keras.random.SeedGenerator) for one in vars(layer).values())


def _masks(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Masking) or bool(getattr(layer, "mask_zero", 0))


def _may_mask_outputs(model: Any) -> bool:
    outputs = getattr(model, "outputs", None)
    if outputs is None:  # Of a subclassed model this is not known.
        return True
    return any(getattr(output, "_keras_mask", None) is not None for output in outputs)


def _names(layers: Any) -> str:
    names = [layer.name for layer in layers]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _losses(model: Any) -> list[Any]:
    given = keras.tree.flatten(getattr(model, "loss", None) or [])
    return [loss for loss in given if isinstance(loss, keras.losses.Loss)]
