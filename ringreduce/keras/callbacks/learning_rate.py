"""Learning rates for many ranks: scaled with their number, warmed up, and equal on all.

See: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
https://arxiv.org/abs/1706.02677.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private
from ringreduce.keras.parts.replicas import training_ranks
from ringreduce.keras.repeating import repeated
from ringreduce.keras.wrappable import all_within
from ringreduce.tensorflow.agreement import Difference
from ringreduce.tensorflow.variables import broadcast_variables, differing
from ringreduce.vocabulary.errors import ConfigError


def linear_scaling(learning_rate: float, communicator: Communicator | None = None) -> float:
    """`learning_rate`, which suits one rank, times the number of ranks.

    The linear scaling rule (Goyal et al., 2.1): when each rank keeps its batch size, there are
    `size` times fewer steps, and each must go `size` times as far. It holds for SGD after the first
    epochs, so use it with `LearningRateWarmup`; for Adam and the like less is often better (the
    square root of `size`). When the global batch stays the same, do not scale.
    """
    return learning_rate * (communicator or default_communicator()).size


class LearningRateSchedule(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a multiplier, in some epochs.

    Several of them, with epochs that do not overlap, make a piecewise schedule.

    Args:
        multiplier: a number, or a function of the epoch: with `staircase` of its number, else of
            epochs done with their fractions, such as 2.25.
        start_epoch, end_epoch: the first epoch in which the rate is set, and the one after the
            last; None: to the end.
        staircase: set it when an epoch begins, else before every batch.
        momentum_correction: as for `LearningRateWarmup`.
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


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate with every batch from ``initial_lr / size`` to `initial_lr`.

    The gradual warm-up of Goyal et al., 2.2: the rate of `linear_scaling` is too large for weights
    that have just been initialized. At the end of batch b of s in epoch e, e + (b + 1) / s epochs
    are done, a part p of `warmup_epochs`; the rate is ``initial_lr * (1 + p * (size - 1)) / size``.
    After that, it does not change the rate. With one rank it is always `initial_lr`.

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


def agree_on_learning_rate(model: Any, communicator: Communicator) -> None:
    """Give the optimizer rank 0's learning rates, where they are variables. Collective."""
    if communicator.size == 1:
        return
    rates = _rates_of(model)

    def agree() -> list[float]:
        broadcast_variables(rates, communicator)
        return list(map(float, rates))

    for rate, value in zip(rates, repeated(communicator, agree), strict=True):
        rate.assign(value)


def kept_rates(model: Any) -> list[float]:
    """The learning rates that a `DistributedOptimizer` keeps equal on all ranks in each step."""
    equal_now = getattr(model.optimizer, "equal_now", None)
    return list(map(float, equal_now(_rates_of(model)))) if equal_now else []


def diverged(model: Any, rates: Sequence[list[float]], ring: Communicator) -> Difference | None:
    """Which ranks, of whose `kept_rates` some differ, have other weights by now. Collective."""
    (first, ours), *others = zip(ring.members, rates, strict=True)
    found = [(rank, theirs) for rank, theirs in others if theirs != ours]
    trained = model.optimizer.equal_now(model.trainable_variables) if found else []
    if not found or not differing(trained, ring):
        return None  # A callback may have set them just now, at the end of the epoch.
    rank, theirs = found[0]
    here, there = (", ".join(f"{rate:g}" for rate in one) for one in (ours, theirs))
    return Difference(
        rank,
        f"found that weights have gone apart: the learning rate is {here} on rank {first} and "
        f"{there} on rank {rank}",
        "Set the learning rate alike on all ranks; or in a callback in rr.callbacks.Together when "
        "an epoch ends, after which rank 0's is that of all.",
    )


def _rates_of(model: Any) -> list[Any]:
    variables = getattr(model.optimizer, "variables", ())
    return [variable for variable in variables if variable.name == "learning_rate"]


def _momenta_of(optimizer: Any) -> list[Any]:
    """The accumulated momenta, where they are kept multiplied by the learning rate."""
    optimizer = all_within(optimizer)[-1]
    if not isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop)):
        return []
    lists = private.lists_of_state(optimizer) if optimizer.built else {}
    # RMSprop has the second name; without momentum there are none.
    found = lists.get("momentums") or lists.get("_momentums") or []
    return [variable for variable in found if variable is not None]
