"""Ranks that have no batch left answer the look-ups of those that have, in evaluation.

    rank 0   meet batch  meet batch  meet batch  meet
    rank 1   meet batch  meet answer meet answer meet      answer: the model on a row of zeros

In training a step does that by itself: one without data runs on zeros too (`rr.join`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.parts.part import is_own_piece
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp


def needs_answers(model: Any, ring: Communicator) -> bool:
    """Whether each call of `model` needs all ranks. ConfigError if they could not answer."""
    if ring.size == 1 or not any(map(is_own_piece, model.weights)):
        return False
    if getattr(model, "steps_per_execution", 1) != 1:
        raise ConfigError(
            f"evaluates a model with parts and steps_per_execution={model.steps_per_execution}",
            **ring.config.who,
            remedy="Compile it with steps_per_execution=1: ranks meet before each batch.",
        )
    return True


class Answering(keras.callbacks.Callback):
    """Makes ranks meet before each batch, and after the last answer the others.

    `example` returns inputs of a batch, whose values do not matter.
    """

    def __init__(self, model: Any, ring: Communicator, example: Callable[[], Any]) -> None:
        super().__init__()
        self._model, self._ring, self._example = model, ring, example

    def meet(self, has_batch: bool = True) -> bool:
        """Return whether a rank has a batch. Collective."""
        found = np.array([int(has_batch)], np.int64)
        self._ring.all_reduce(found, ReduceOp.MAX)
        return bool(found[0])

    def finish(self, with_losses: bool) -> None:
        """Answer until no rank has a batch; `with_losses`: also what regularizers ask for."""
        example = None
        while self.meet(False):
            example = self._example() if example is None else example
            self._model(example, training=False)
            if with_losses:
                _ = self._model.losses

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Meet."""
        self.meet()

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Meet."""
        self.meet()

    def on_test_end(self, logs: Any = None) -> None:
        """Answer the others."""
        self.finish(with_losses=True)

    def on_predict_end(self, logs: Any = None) -> None:
        """Answer the others."""
        self.finish(with_losses=False)
