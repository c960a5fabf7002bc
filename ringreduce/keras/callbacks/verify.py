"""Compares the ranks' weights while training."""

from __future__ import annotations

from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.callbacks.broadcast import shared_state
from ringreduce.tensorflow import verify_replicas
from ringreduce.vocabulary.errors import ConfigError

__all__ = ["VerifyReplicas"]


class VerifyReplicas(keras.callbacks.Callback):
    """Stops training with a `MismatchError` when the ranks' weights are no longer equal.

    Compares trainable variables and the optimizer's, local ones excepted, every `every` batches and
    at the end of training. Each comparison hashes all weights, at about 1 GB/s. Batches are counted
    over all epochs, and with ``steps_per_execution`` as often as Keras reports one, so that all
    ranks compare at the same step.

    Raises:
        ConfigError: `every` is less than 1.
    """

    def __init__(self, every: int, communicator: Communicator | None = None) -> None:
        super().__init__()
        if every < 1:
            raise ConfigError(f"every is {every}; accepted: 1 and more")
        self._every, self._communicator = every, communicator
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count, and compare after every `every` batches."""
        self._batches += 1
        if self._batches % self._every == 0:
            self._verify()

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the final weights."""
        self._verify()

    def _verify(self) -> None:
        verify_replicas(
            shared_state(self.model, self.model.trainable_variables), self._communicator
        )
