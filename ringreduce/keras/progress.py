"""How a model's training goes: what the loop of `rr.fit` and callbacks tell each other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ringreduce.keras.metric_states import MetricStates
from ringreduce.tensorflow.kept import kept


class Progress:
    """That of one training, whose steps may be traced anew in it, as after ``compile``."""

    # How many batches to read before the first step, and make nothing of.
    unread = 0
    # What metrics had when those were made, in the order of `metric_states.states_of`: on the first
    # rank the values of all ranks together, on others nothing. None: it is not known.
    metrics: Sequence[np.ndarray] | None = None
    # What metrics held when the steps of the latest epoch had ended, with their results.
    ended: MetricStates | None = None
    # Whether metrics have, on some rank, what steps of this epoch have led to that others made.
    has_earlier_steps = False
    # The callbacks, of any rank, that need each step to be a call.
    looking: Sequence[str] = ()
    # Seconds in calls of TensorFlow, and of those in waiting for data; of all steps so far.
    called_s = reading_s = 0.0

    def __init__(self, facts: Callable[[], Mapping[str, str]] = dict) -> None:
        # What the steps of an epoch follow from, by name as text: arguments, and the data in short.
        self.facts = facts


class Packs(Protocol):
    """What a backup has beside weights, such as the `Fields` of callbacks."""

    def packed(self) -> np.ndarray:
        """All of it in bytes, uint8."""


class _Kept:
    progress: Progress | None = None
    fields: Packs | None = None


def progress_of(model: Any) -> Progress | None:
    """That of the training in which `model` is; None: `rr.fit` does not train it by its loop."""
    return kept(model, _Kept).progress


@contextmanager
def training(model: Any, facts: Callable[[], Mapping[str, str]] = dict) -> Iterator[Progress]:
    """Within the block `model` is trained, and `progress_of` it is what this yields."""
    place = kept(model, _Kept)
    before, place.progress = place.progress, Progress(facts)
    try:
        yield place.progress
    finally:
        place.progress = before


def fields_of(model: Any) -> Packs | None:
    """What a backup of `model` takes beside its weights, in the training in which it is."""
    return kept(model, _Kept).fields


def note_fields(model: Any, fields: Packs | None) -> None:
    """Have a backup of `model` take `fields`."""
    kept(model, _Kept).fields = fields
