"""Who trains a model: asked by all that divides data, prints, writes or meets."""

from dataclasses import dataclass
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.layers.groups import model_group, ranks_around
from ringreduce.keras.layers.split import SplitLayer


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
        """That of `model`, whose gradients the ranks of `data` average.

        Where it is not built, layers that are split say it before they have weights.
        """
        layers = [layer for layer in private.layers_of(model) if isinstance(layer, SplitLayer)]
        of_layers = [layer.ring() for layer in layers if not layer.built]
        group = model_group(model.weights, of_layers)
        return cls(data, group, ranks_around(group, data))

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.everyone.rank == 0
