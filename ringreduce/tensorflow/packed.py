"""A bucket plan whose buckets TensorFlow's threads pack and the engine reduces.

    gradients of bucket 0 --> start 0 --token--+--> wait 0 --> means of bucket 0
                                 |  engine     |
    gradients of bucket 1 --> start 1 --token--+--> wait 1 --> means of bucket 1

A start runs as soon as its bucket's gradients are computed, while those of earlier layers are
still under way. Every wait depends on every start, so that none can hold a thread that a
start needs. Buckets lie in registered memory where ranks share some.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.buckets import BucketPlan
from ringreduce.communicator import Communicator
from ringreduce.tensorflow import ops, order
from ringreduce.tensorflow.numerics import NumericsCheck
from ringreduce.types import ReduceOp

__all__ = ["PackedPlan"]

# What the kernels are registered for (native/src/tf_ops.c).
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


class PackedPlan:
    """A plan as the engine of one communicator knows it.

    Memory and registration last as long as this object; a graph that is run after that gets
    an error that says so.

    Args:
        communicator: whose engine.
        plan: which gradients lie where.
        present: the gradients that there are, for their dtypes.
        prepare: called by the engine's thread before the first bucket of each step.
        numerics: looks at each bucket before it is reduced, and after.
    """

    def __init__(
        self,
        communicator: Communicator,
        plan: BucketPlan,
        present: Sequence[Any],
        prepare: Callable[[], None],
        numerics: NumericsCheck,
    ) -> None:
        self.communicator = communicator
        self._plan = plan
        dtypes = {g.dtype.name: np.dtype(g.dtype.as_numpy_dtype) for g in present}
        sizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
        memory = [
            communicator.empty(bucket.count * sizes[bucket.dtype], np.uint8)
            for bucket in plan.buckets
        ]
        arrays = [
            whole.view(dtypes[bucket.dtype])
            for whole, bucket in zip(memory, plan.buckets, strict=True)
        ]
        engine = communicator.engine
        assert engine.native is not None
        self._number = engine.native.register(plan.buckets, memory, sizes)
        self._prepare = prepare
        # The engine must not keep alive an optimizer that everybody else has forgotten.
        owner = weakref.ref(self)

        def reduce(bucket: int) -> None:
            this = owner()
            if bucket == 0 and this is not None:
                this._prepare()
                numerics.begin_step()
            numerics.check_own(communicator, plan, bucket, arrays[bucket])
            communicator.all_reduce(arrays[bucket], ReduceOp.MEAN, signature=plan.signature)
            numerics.check_mean(communicator, plan, bucket, arrays[bucket])

        engine.serve(self._number, reduce)
        weakref.finalize(self, engine.forget, self._number).atexit = False

    @staticmethod
    def can_take(gradients: Sequence[Any]) -> bool:
        """Whether the kernels know the dtypes of all `gradients`."""
        return bool(gradients) and all(g.dtype.name in _DTYPES for g in gradients)

    def start(self, gradients: Sequence[Any]) -> list[Any]:
        """Add the ops that hand the buckets of one step over; return what `wait` needs.

        Args:
            gradients: one for each of the plan's, None where it is in no bucket.
        """
        parts = enumerate(self._parts(gradients))
        with order.in_turn():
            return [ops.start(self._number, bucket, part) for bucket, part in parts]

    def wait(self, gradients: Sequence[Any], tokens: Sequence[Any]) -> list[Any]:
        """Add the ops that wait for the buckets; return the means of the gradients in them.

        Args:
            gradients, tokens: what `start` was given, and what it returned.
        """
        means: dict[int, Any] = {}
        parts = self._parts(gradients)
        for number, (bucket, part) in enumerate(zip(self._plan.buckets, parts, strict=True)):
            reduced = ops.wait(self._number, number, part, tokens)
            for slot, mean in zip(bucket.slots, reduced, strict=True):
                means[slot.gradient] = mean
        order.done(list(means.values()))
        return [means[index] for index in self._plan.present]

    def _parts(self, gradients: Sequence[Any]) -> list[list[Any]]:
        """The gradients of each bucket."""
        return [[gradients[slot.gradient] for slot in b.slots] for b in self._plan.buckets]
