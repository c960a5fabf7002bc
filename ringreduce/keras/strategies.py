"""When ranks combine what they learn: `DistributedOptimizer(strategy=)`.

A `Strategy` is settings, equal on all ranks. For each optimizer it begins a `Running`, which
applies that optimizer's steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.gradients import Accumulating, Reducer
from ringreduce.keras.weighting import Kind, Weight
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.vocabulary.errors import ConfigError


class Step(NamedTuple):
    """A call of `DistributedOptimizer.apply`.

    Attributes:
        gradients, variables, kinds: this rank's gradients, as for `Reducer.reduce`.
        weight: this rank's in a mean over all ranks; None: all are equal.
        reducer: averages gradients over all ranks.
        apply: updates variables with gradients, by the wrapped optimizer.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    kinds: Sequence[Kind]
    weight: Weight | None
    reducer: Reducer
    apply: Callable[[Sequence[Any], Sequence[Any]], None]


class Use(NamedTuple):
    """Of the optimizer that a strategy is begun for.

    Attributes:
        communicator: returns that of the steps.
        keeps_rows: whether means of sparse gradients are to be sparse.
        compression: how what it sends travels: the name of a `Compression`, or `PowerSGD`.
    """

    communicator: Callable[[], Communicator]
    keeps_rows: bool
    compression: str | PowerSGD


class Running:
    """A strategy at work for one optimizer, which owns it.

    Attributes:
        is_settled: whether the ranks' weights are equal now.
        has_met: whether ranks have met in the latest step, and no meeting is under way: the time
            for other collectives.
        keeps_state_equal: whether the wrapped optimizer's state is then equal too.
        is_alone: whether steps use this rank's gradients alone, so that ranks need not wait for
            each other.
    """

    is_settled = True
    has_met = True
    keeps_state_equal = True
    is_alone = False

    def take(self, step: Step) -> None:
        """Use a step's gradients. Called on all ranks; often while a graph is traced."""
        raise NotImplementedError

    def settle(self) -> None:
        """Make the ranks' weights equal. Eager; collective."""

    def state(self) -> Mapping[str, np.ndarray]:
        """What is to be saved with the optimizer, and is equal on all ranks when settled."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from what `state` returned, on any number of ranks."""


class Strategy:
    """Settings; a subclass that is a frozen dataclass has `get_config` by its fields."""

    def get_config(self) -> dict[str, Any]:
        """The settings, by name; compared between ranks."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}  # type: ignore[arg-type]

    def check(self, inner: Any) -> None:
        """Raise ConfigError if it cannot be used with the optimizer `inner`."""

    def begin(self, use: Use) -> Running:
        """What takes an optimizer's steps."""
        raise NotImplementedError


@dataclass(frozen=True)
class EveryStep(Strategy):
    """Average gradients in every step: N ranks of batch B train as one process with N B."""

    def begin(self, use: Use) -> Running:
        """See `Strategy`."""
        return _EveryStep()


class _EveryStep(Running):
    def take(self, step: Step) -> None:
        reducer, variables = step.reducer, step.variables
        step.apply(reducer.reduce(step.gradients, variables, step.kinds, step.weight), variables)


@dataclass(frozen=True)
class Accumulate(Strategy):
    """Average and apply only every `steps` steps, with the mean of all their gradients.

    As one step with so many times the batch. The step counter counts what is applied. What is left
    at the end of an epoch counts for the next.
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"accumulate_steps is {self.steps}; accepted: 1 and more")

    def begin(self, use: Use) -> Running:
        """See `Strategy`."""
        return _Accumulate(Accumulating(self.steps, use.keeps_rows))


class _Accumulate(Running):
    def __init__(self, sums: Accumulating) -> None:
        self._sums = sums

    def take(self, step: Step) -> None:
        self._sums.step(*step)
