"""A step's gradients through custom calls, in a graph that XLA compiles.

XLA runs independent ops in any order. So every start depends on the token of the collective before
it, every wait on all starts, and the last wait on all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.tensorflow import order, xla
from ringreduce.tensorflow.packed import PackedPlan


class XlaRoute:
    """The route of one plan, whose gradients are all dense."""

    def __init__(self, packed: PackedPlan) -> None:
        self._packed = packed

    def mean(self, dense: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The means of the plan's dense gradients, in their order; `slices` must be empty."""
        assert not slices
        communicator, number = self._packed.communicator, self._packed.number
        parts = self._packed.parts(dense)
        after = order.token(communicator)
        started = [
            xla.start(number, place, part, after, bucket.in_place)
            for place, (part, bucket) in enumerate(
                zip(parts, self._packed.plan.buckets, strict=True)
            )
        ]
        waited: list[list[Any]] = []
        over: list[Any] = []
        for place, part in enumerate(parts):
            likes = [(gradient.shape, gradient.dtype) for gradient in part]
            is_last = place == len(parts) - 1
            # The last wait keeps XLA from dropping the others.
            *means, token = xla.wait(
                number, place, likes, started, over if is_last else (), is_last
            )
            waited.append(means)
            over.append(token)
        order.follow(communicator, over[-1])
        return self._packed.joined(waited), []
