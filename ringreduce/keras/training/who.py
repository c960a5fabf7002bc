"""Who trains a model: asked by all that divides data, prints, writes or meets."""

from dataclasses import dataclass
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.parts.replicas import model_group, training_ranks


@dataclass(frozen=True)
class Training:
    """The ranks of a training.

    Attributes:
        data: they divide the rows of each batch among them, and average gradients.
        alike: they have the same rows, and pieces of split layers; None: there are none.
        everyone: all of them.
    """

    data: Communicator
    alike: Communicator | None
    everyone: Communicator

    @classmethod
    def of(cls, model: Any, data: Communicator) -> "Training":
        """That of `model`, whose gradients the ranks of `data` average; see `training_ranks`."""
        weights = model.weights
        return cls(data, model_group(weights), training_ranks(weights, data))

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.everyone.rank == 0
