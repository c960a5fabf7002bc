"""Horovod's callbacks; those of `ringreduce.keras.callbacks` are here too.

Learning rates for many ranks are scaled with their number and warmed up: Goyal et al., "Accurate,
Large Minibatch SGD: Training ImageNet in 1 Hour", https://arxiv.org/abs/1706.02677.
"""

import math
from collections.abc import Callable
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import callbacks, private
from ringreduce.keras.callbacks.metric_average import MetricAverage
from ringreduce.keras.callbacks.replicas import broadcast_state
from ringreduce.keras.layers.groups import training_ranks
from ringreduce.keras.optimizers_in import all_within, build_optimizer_here
from ringreduce.pure.payload import checked_root
from ringreduce.tensorflow.agreement import count_true
from ringreduce.vocabulary.errors import ConfigError

__all__ = ["BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback"]
__all__ += ["LearningRateWarmupCallback", "MetricAverageCallback"]

MetricAverageCallback = MetricAverage


def __getattr__(name: str) -> Any:
    return getattr(callbacks, name)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks rank `root_rank`'s weights and optimizer variables before the first batch.

    `DistributedOptimizer` does this itself, from rank 0, for trainable weights and the optimizer.
    Use this for another root, for moving averages and other weights that are not trained, and after
    one rank has loaded something. States of random generators stay different.

    It builds an optimizer that is not built. A model that is not built has no weights before its
    first batch; it gets them after that, and only from rank 0.

    Args:
        root_rank: whose values all get.
        device: not used.
        local_variables: variables of the model or the optimizer to leave as they are, besides those
            that the optimizer has been told of.
        communicator: by default the process's.

    Raises:
        ArrayError: when training begins: `root_rank` is no rank.
        ConfigError: it is not 0, and the model is not built on every rank.
        MismatchError: the ranks' models differ.
    """

    looks_at_batches = False  # After the first call, which makes one step.

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__()
        self._root, self._communicator = root_rank, communicator
        self._local = keras.tree.flatten(local_variables or [])
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


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a multiplier, in some epochs.

    Several of them, with epochs that do not overlap, make a piecewise schedule.

    Args:
        multiplier: a number, or a function of the epoch: with `staircase` of its number, else of
            epochs done with their fractions, such as 2.25.
        start_epoch, end_epoch: the first epoch in which the rate is set, and the one after the
            last; None: to the end.
        staircase: set it when an epoch begins, else before every batch.
        momentum_correction: as for `LearningRateWarmupCallback`.
        steps_per_epoch: needed without `staircase` where `fit` does not know it.

    Raises:
        ConfigError: when training begins without `staircase`, the number of batches is unknown.
        TypeError: Keras's, when the optimizer was made with a learning rate schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._initial_lr, self._multiplier = initial_lr, multiplier
        self._start_epoch, self._end_epoch = start_epoch, end_epoch
        # A number has no fractions of epochs to depend on.
        self._staircase = staircase or not callable(multiplier)
        self._momentum_correction = momentum_correction
        self._steps_per_epoch = steps_per_epoch
        self._steps, self._epoch = 0, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._steps = int(self._steps_per_epoch or (self.params or {}).get("steps") or 0)
        if not self._steps and not self._staircase:
            text = f"{type(self).__name__} does not know how many batches an epoch has"
            raise ConfigError(text, remedy="Pass steps_per_epoch to it, or to fit.")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self._staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._staircase:
            self._set(self._epoch + batch / self._steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def _set(self, done: float) -> None:
        end = math.inf if self._end_epoch is None else self._end_epoch
        if not self._start_epoch <= self._epoch < end:
            return
        multiplier = self._multiplier(done) if callable(self._multiplier) else self._multiplier
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        optimizer.learning_rate = self._initial_lr * multiplier
        after = float(optimizer.learning_rate)
        if self._momentum_correction and after != before and before:
            # Change what the momentum coefficient multiplies, since the coefficient is a constant
            # of the compiled step: m * (after / before) * v either way.
            for variable in _momenta_of(optimizer):
                variable.assign(variable * (after / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate with every batch from ``initial_lr / size`` to `initial_lr`.

    The gradual warm-up of Goyal et al., 2.2: a rate times the number of ranks is too large for
    weights that have just been initialized. At the end of batch b of s in epoch e, e + (b + 1) / s
    epochs are done, a part p of `warmup_epochs`; the rate is
    ``initial_lr * (1 + p * (size - 1)) / size``. After that, it does not change the rate. With one
    rank it is always `initial_lr`.

    Args:
        initial_lr: the learning rate to end with, already scaled.
        momentum_correction: scale the accumulated momentum with each change of the rate, since SGD
            and RMSprop keep it multiplied by the rate at that time (Goyal et al., remark 2).
            Ignored for other optimizers, such as Adam. Reads and writes the momentum once per
            batch.
        steps_per_epoch: batches of an epoch; by default what `fit` knows of the data.
        verbose: 1 prints on rank 0 when it is done.

    Raises:
        ConfigError: `warmup_epochs` is negative; when training begins, the number of batches is
            unknown.
        TypeError: Keras's, when the optimizer was made with a learning rate schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        if warmup_epochs < 0:
            raise ConfigError(f"warmup_epochs is {warmup_epochs}; accepted: 0 and more")
        super().__init__(
            initial_lr,
            self._multiplier_after,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._warmup_epochs, self._verbose = warmup_epochs, verbose
        self._communicator = communicator

    def _multiplier_after(self, done: float) -> float:
        size = (self._communicator or default_communicator()).size
        return (done * (size - 1) / self._warmup_epochs + 1) / size

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._set(self._epoch + (batch + 1) / self._steps)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch + 1 >= self._warmup_epochs > epoch:
            ring = self._communicator or default_communicator()
            if training_ranks(self.model.weights, ring).rank == 0:
                rate = float(self.model.optimizer.learning_rate)
                print(f"Epoch {epoch + 1}: learning rate warmed up to {rate:g}.")


def _momenta_of(optimizer: Any) -> list[Any]:
    """The accumulated momenta, where they are kept multiplied by the learning rate."""
    optimizer = all_within(optimizer)[-1]
    if not isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop)):
        return []
    lists = private.lists_of_state(optimizer) if optimizer.built else {}
    # RMSprop has the second name; without momentum there are none.
    momenta = lists.get("momentums") or lists.get("_momentums") or []
    return [variable for variable in momenta if variable is not None]
