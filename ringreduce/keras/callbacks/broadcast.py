"""Gives all ranks one rank's weights and optimizer state, and compares those of all ranks."""

from collections.abc import Sequence
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.initial import plain_variable
from ringreduce.keras.parts.replicas import alike, make_alike, model_group
from ringreduce.keras.repeating import repeated
from ringreduce.keras.wrappable import build_optimizer_here, wrappers_in
from ringreduce.pure.payload import checked_root
from ringreduce.tensorflow.agreement import count_true
from ringreduce.tensorflow.variables import broadcast_variables, verify_replicas
from ringreduce.vocabulary.errors import ConfigError


class Broadcast(keras.callbacks.Callback):
    """Gives all ranks rank `root_rank`'s weights and optimizer variables before the first batch.

    `DistributedOptimizer` does this itself, from rank 0, for trainable weights and the optimizer.
    Use this for another root, for moving averages and other weights that are not trained, and after
    one rank has loaded something. States of random generators stay different.

    It builds an optimizer that is not built. A model that is not built has no weights before its
    first batch; it gets them after that, and only from rank 0.

    Args:
        root_rank: whose values all get.
        communicator: by default the process's.
        local_variables: variables of the model or the optimizer to leave as they are, besides those
            that the optimizer has been told of.

    Raises:
        ArrayError: when training begins: `root_rank` is no rank.
        ConfigError: it is not 0, and the model is not built on every rank.
        MismatchError: the ranks' models differ.
    """

    looks_at_batches = False  # After the first call, which makes one step.

    def __init__(
        self,
        root_rank: int = 0,
        communicator: Communicator | None = None,
        *,
        local_variables: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self._root, self._communicator = root_rank, communicator
        self._local = local_variables
        self._is_due = False

    def on_train_begin(self, logs: Any = None) -> None:
        ring = self._communicator or default_communicator()
        checked_root(self._root, ring.size, ring.config.who)
        if ring.size == 1:
            return
        built = count_true(ring, self.model.built)
        self._is_due = built < ring.size
        if self._is_due and self._root:
            text = f"cannot copy from rank {self._root}: the model is built on {built} ranks"
            remedy = "Build the model before fit, with model.build() or a keras.Input."
            raise ConfigError(text, **ring.config.who, remedy=remedy)
        if not self._is_due:
            build_optimizer_here(self.model)
            broadcast_state(self.model, self._root, ring, self._local)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_due:
            self._is_due = False
            ring = self._communicator or default_communicator()
            broadcast_state(self.model, self._root, ring, self._local)


class BroadcastGlobalVariablesCallback(Broadcast):
    """`Broadcast` with Horovod's arguments; `device` is not used."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__(root_rank, local_variables=keras.tree.flatten(local_variables or []))


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
            if wrappers and not any(int(one.iterations) for one in wrappers):
                self.on_train_end()  # The step may have updated weights itself.
            else:
                # Where a layer that needs all units has got this rank's, they differ at once.
                _verify_group(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        verify_model(self.model, self._communicator or default_communicator())


def verify_model(model: Any, ring: Communicator) -> None:
    """As `VerifyReplicas` does, now. Collective."""
    state = shared_state(model, model.trainable_variables)
    equal_now = getattr(model.optimizer, "equal_now", lambda every: every)
    repeated(ring, lambda: verify_replicas(equal_now(state), ring))
    _verify_group(model)


def _verify_group(model: Any) -> None:
    state = shared_state(model, model.trainable_variables)
    if (group := model_group(state)) is not None:
        verify_replicas(alike(state), group)


def broadcast_state(
    model: Any, root: int, communicator: Communicator, local: Sequence[Any] = ()
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


def shared_state(model: Any, weights: Sequence[Any]) -> list[Any]:
    """All variables of the optimizer of `model`, then `weights`, without local ones.

    Where a learning rate differs weights do too, and the first one is named.
    """
    optimizer = model.optimizer
    every = [*([] if optimizer is None else optimizer.variables), *weights]
    return every if not hasattr(optimizer, "shared") else optimizer.shared(every)
