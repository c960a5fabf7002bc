"""Finds weights that were changed on some ranks only, before a step hides that they differ.

    step -- note -- ends of batch and epoch, validation, begin of an epoch -- compare -- step

Elsewhere ranks whose weights differ stay apart, and the comparison at the end of training says so.
But a sharded update gives each rank the shares of the others, a meeting of ranks that step alone
makes a mean of what each has, and after a loss an elastic rank may take the state of another: of
two models they make one. There ranks tell each other before a step whether something was assigned
since the step before, and compare weights if so: one short exchange in an epoch, or in each step
where a callback that is neither Keras's nor ours has hooks for the begin of batches. What hooks for
their end have done is told with the wish to stop, in the exchange of `StopTogether`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.callbacks.learning_rate import kept_rates, rates_of, unlike_rates
from ringreduce.keras.callbacks.watching import BEGINS, all_of, that_see_batches
from ringreduce.keras.checks.warnings import warn_of_change_between_meetings
from ringreduce.keras.layers.groups import training_ranks
from ringreduce.keras.layers.part import FlatPart, pieces_in
from ringreduce.keras.optimizers_in import is_settled, wrappers_in
from ringreduce.keras.repeating import is_repeating, repeated, told_by_ranks
from ringreduce.tensorflow.agreement import Difference, refuse
from ringreduce.tensorflow.held import Held
from ringreduce.tensorflow.variables import path_of, verify_replicas
from ringreduce.tensorflow.written import Written
from ringreduce.vocabulary.types import ReduceOp
from ringreduce.vocabulary.words import named

# What has happened to a variable since it was noted.
_UNTOUCHED, _TOUCHED, _CHANGED = range(3)


class OneSided:
    """Compares what callbacks have changed in a training of `model`; does nothing elsewhere.

    The ranks of `ring` average gradients. Collective: they tell each other where it is needed.
    """

    def __init__(self, model: Any, callbacks: Sequence[Any], ring: Communicator) -> None:
        self._model, self._ring = model, ring
        self._held: Held | Written | None = None
        self._written = Written([])
        # What was held last, and where it was found.
        self._all: list[Any] = []
        self._found_in: tuple[Any, list[int]] = (None, [])
        self._rates: list[float] | None = None  # those that were told last
        # Whether all ranks have told each other that nothing was changed since a step.
        self._are_equal = False
        self._is_first, self._has_warned = True, False
        hides = any(one.options["shard_state"] or one.is_alone for one in wrappers_in(model))
        own = all_of(callbacks)
        sees = that_see_batches(own), that_see_batches(own, BEGINS)
        flags = np.array([bool(hides or is_repeating(ring)), *sees], np.int64)
        every = training_ranks(model.weights, ring)
        if every.size > 1:
            flags = repeated(every, lambda: every.all_reduce(flags.copy(), ReduceOp.MAX).tolist())
        self._is_needed = ring.size > 1 and bool(flags[0])
        self._in_batches, self._before_batches = map(bool, flags[1:])
        # Whether it is watched what hooks for the end of batches write, rather than held what they
        # find: where weights are compared whether those have changed or were assigned again.
        self._watches = not hides and not self._before_batches

    def noting(self, *, is_batch: bool) -> AbstractContextManager[None]:
        """Hold what a step has left, unless that is held; callbacks see its end in the block."""
        self._are_equal = False
        if not self._is_needed or not (self._in_batches or not is_batch):
            return nullcontext()
        if isinstance(self._held, Written) and not any(map(self._held.is_changed, self._all)):
            # It has watched the hooks of a batch, and sees no others. Rates are told in any case.
            self._held = None
        if self._held is None:
            # Looked for once in an epoch, unless another optimizer or layer is trained since then.
            found_in = self._model.optimizer, [*map(id, self._model.trainable_variables)]
            if not is_batch or found_in != self._found_in:
                self._found_in, self._all = found_in, self._weights() + self._pieces()
                self._written = Written([*self._all, *rates_of(self._model)])
            if is_batch and self._watches:
                self._held = self._written
                return self._written
            self._held = Held(self._all)
        return nullcontext()

    def has_changed(self) -> bool:
        """Whether this rank has something to tell before the next step."""
        if (held := self._held) is None:
            return False
        if held is self._written:
            return held.any_is_changed()
        rates = kept_rates(self._model)
        is_new, self._rates = rates != self._rates, rates
        return is_new or held.any_is_changed()

    def hear(self, *, has_changed: bool) -> None:
        """Take what ranks have told each other when a batch had ended: `has_changed` of any."""
        self._are_equal = not has_changed

    def compare(self) -> None:
        """Raise if weights were changed on some ranks only since they were noted. Collective.

        MismatchError, on all ranks; where ranks step alone, and have other weights anyway, rank 0
        warns. In a training's first step ranks compare all with which they have begun before.
        """
        if not self._is_needed:
            return
        is_first, self._is_first = self._is_first, False
        held, self._held = self._held, None
        are_equal = self._are_equal and not self._before_batches
        self._are_equal = False
        if is_first:
            begun = [v for one in wrappers_in(self._model) for v in one.begun(self._weights())]
            self._verify(begun)
        elif held is not None and not are_equal:
            self._tell(held)

    @property
    def state(self) -> list[bool]:
        """Whether ranks will tell each other before the next step, for `join`."""
        return [self._held is not None, self._are_equal]

    def join(self, is_held: bool, are_equal: bool) -> None:
        """Go on, as a newcomer that has all weights now, where the others have this `state`."""
        self._is_first, self._are_equal = False, are_equal
        self._held = Held(self._weights() + self._pieces()) if is_held else None

    def _tell(self, held: Held | Written) -> None:
        ring, weights, pieces = self._ring, self._weights(), self._pieces()
        changed = [any(map(held.is_changed, some)) for some in (weights, pieces)]
        entry = [*changed, kept_rates(self._model)]
        told = told_by_ranks(ring, entry)
        rates = unlike_rates({rank: rates for rank, (*_, rates) in told.items()})
        if rates is not None:
            rates = rates._replace(text=f"found, before a step, that {rates.text}")
            refuse(ring, rates, "comparison of learning rates")
        if any(are_changed for are_changed, *_ in told.values()):
            if is_settled(self._model):
                self._verify(weights)
            elif found := self._on_some(held, weights):
                self._warn(*found[:2])
        if any(are_changed for _, are_changed, _ in told.values()) and (
            found := self._on_some(held, pieces)
        ):
            refuse(ring, _difference(*found), "comparison of what callbacks have changed")

    def _weights(self) -> list[Any]:
        """What optimizers keep equal, or make equal in meetings."""
        shared = self._model.trainable_variables
        for wrapper in wrappers_in(self._model):
            shared = wrapper.shared(shared)
        return list(shared)

    def _pieces(self) -> list[Any]:
        """This rank's shares of the state of optimizers, of which no other has a copy."""
        every = [pair for one in wrappers_in(self._model) for pair in pieces_in(one.variables)]
        return [variable for variable, part in every if isinstance(part, FlatPart)]

    def _verify(self, variables: Sequence[Any]) -> None:
        equal = list(variables)
        for wrapper in wrappers_in(self._model):
            equal = wrapper.equal_now(equal)
        repeated(self._ring, lambda: verify_replicas(equal, self._ring))

    def _on_some(
        self, held: Held | Written, variables: Sequence[Any]
    ) -> tuple[Any, list[int], list[int]] | None:
        """The first variable that some ranks have changed, and others not; both by their ranks.

        None: there is none. A rank that has assigned what it had already has changed it alike.
        """

        def state(variable: Any) -> int:
            # Of the shortest variables some ranks have nothing.
            if not held.is_touched(variable):
                return _UNTOUCHED if np.prod(variable.shape) else _TOUCHED
            return _CHANGED if held.is_changed(variable) else _TOUCHED

        told = told_by_ranks(self._ring, list(map(state, variables)))
        for variable, *column in zip(variables, *told.values(), strict=True):
            if {_UNTOUCHED, _CHANGED} <= {*column}:
                changed, untouched = (
                    [rank for rank, found in zip(told, column, strict=True) if found == one]
                    for one in (_CHANGED, _UNTOUCHED)
                )
                return variable, changed, untouched
        return None

    def _warn(self, variable: Any, changed: list[int]) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_of_change_between_meetings(variable, changed, self._ring)


def _difference(variable: Any, changed: list[int], untouched: list[int]) -> Difference:
    has = "has" if len(changed) == 1 else "have"
    return Difference(
        changed[0],
        f"found that, since the step before, {named('rank', changed)} {has} changed "
        f"{path_of(variable)}, in the own share of the optimizer's state, and "
        f"{named('rank', untouched)} not",
        "Look for a callback that changes the optimizer on some ranks only: let all do it.",
    )
