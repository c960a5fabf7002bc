"""A step's gradients through native ops, in a graph that TensorFlow runs.

    gradients of bucket 0 --> start 0 --token--+--> wait 0 --> means of bucket 0
                                 |  engine     |
    gradients of bucket 1 --> start 1 --token--+--> wait 1 --> means of bucket 1

A start runs as soon as its bucket's gradients are computed, before those of earlier layers are.
Every wait depends on every start, so that no wait holds a thread that a start needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.tensorflow import ops, order
from ringreduce.tensorflow.packed import PackedPlan
from ringreduce.tensorflow.sparse import SparseMean


class NativeRoute:
    """The route of one plan; sparse gradients are reduced between the starts and the waits."""

    def __init__(self, packed: PackedPlan, sparse: SparseMean) -> None:
        self._packed, self._sparse = packed, sparse

    def mean(self, dense: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The means of the plan's dense gradients and of its sparse ones, in their order."""
        communicator, number = self._packed.communicator, self._packed.number
        parts = self._packed.parts(dense)
        with order.in_order(communicator):
            tokens = [ops.start(number, bucket, part) for bucket, part in enumerate(parts)]
        sparse = self._sparse.mean(communicator, self._packed.plan, slices)
        waited = [ops.wait(number, bucket, part, tokens) for bucket, part in enumerate(parts)]
        means = self._packed.joined(waited)
        order.done(communicator, means)
        return means, sparse
