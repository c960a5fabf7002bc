"""Compares the weights and optimizer state of all ranks, and gives all those of one."""

from collections.abc import Sequence
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.layers.groups import alike, make_alike, model_group
from ringreduce.keras.optimizers_in import wrappers_in
from ringreduce.keras.repeating import repeated
from ringreduce.tensorflow.variables import broadcast_variables, plain_variable, verify_replicas
from ringreduce.vocabulary.errors import ConfigError


class VerifyReplicas(keras.callbacks.Callback):
    """Stops training with a `MismatchError` when the ranks' weights are no longer equal.

    Compares trainable variables and the optimizer's, local ones excepted, every `every` batches and
    at the end of training; None: only then, as `rr.fit` does by itself. Each comparison hashes all
    weights, at about 1 GB/s. Batches are counted over all epochs, and with ``steps_per_execution``
    as often as Keras reports one, so that all ranks compare at the same step. With split layers
    ranks of a model group compare what they have alike, also after the first batch.

    Raises:
        ConfigError: `every` is less than 1.
    """

    def __init__(self, every: int | None, communicator: Communicator | None = None) -> None:
        super().__init__()
        if every is not None and every < 1:
            raise ConfigError(f"every is {every}; accepted: 1 and more")
        self._every, self._communicator = every, communicator
        self.looks_at_batches = every is not None
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._every is not None and self._batches % self._every == 0:
            self.on_train_end()
        elif self._batches == 1:
            wrappers = wrappers_in(self.model)
            if wrappers and not any(int(wrapper.iterations) for wrapper in wrappers):
                self.on_train_end()  # The step may have updated weights itself.
            else:
                # Where a layer that needs all units has got this rank's, they differ at once.
                _verify_group(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        verify_model(self.model, self._communicator or default_communicator())


def verify_model(model: keras.Model, ring: Communicator) -> None:
    """Verify the model now, as `VerifyReplicas` does. Collective."""
    state = shared_state(model, model.trainable_variables)
    equal_now = getattr(model.optimizer, "equal_now", lambda every: every)
    repeated(ring, lambda: verify_replicas(equal_now(state), ring))
    _verify_group(model)


def _verify_group(model: keras.Model) -> None:
    state = shared_state(model, model.trainable_variables)
    if (group := model_group(state)) is not None:
        verify_replicas(alike(state), group)


def broadcast_state(
    model: keras.Model, root: int, communicator: Communicator, local: Sequence[Any] = ()
) -> None:
    """Give `model` and its optimizer, without local variables, rank `root`'s values. Collective."""
    kept = {id(plain_variable(variable)) for variable in local}
    # Not `model.variables`, which has the states of random generators.
    state = shared_state(model, model.weights)
    shared = [variable for variable in state if id(plain_variable(variable)) not in kept]
    broadcast_variables(shared, communicator, root)
    make_alike(shared, model_group(shared))
    for wrapper in wrappers_in(model):
        wrapper.broadcast_state(root)


def shared_state(model: keras.Model, weights: Sequence[Any]) -> list[Any]:
    """All variables of the optimizer of `model`, then `weights`, without local ones.

    Where a learning rate differs weights do too, and the first one is named.
    """
    optimizer = model.optimizer
    every = [*([] if optimizer is None else optimizer.variables), *weights]
    return every if not hasattr(optimizer, "shared") else optimizer.shared(every)
