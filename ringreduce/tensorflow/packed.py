"""A bucket plan whose buckets TensorFlow's threads pack and the engine reduces.

    gradients of bucket 0 --> start 0 --token--+--> wait 0 --> means of bucket 0
                                 |  engine     |
    gradients of bucket 1 --> start 1 --token--+--> wait 1 --> means of bucket 1

A start runs as soon as its bucket's gradients are computed, while those of earlier layers are
still under way. Every wait depends on every start, so that none can hold a thread that a
start needs. Buckets lie in registered memory where ranks share some; a gradient that has one to
itself in a step that XLA compiles stays where it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.effects.handoff import BucketItem, Layout
from ringreduce.pure.buckets import BucketPlan
from ringreduce.tensorflow import ops, order, xla
from ringreduce.tensorflow.numerics import NumericsCheck
from ringreduce.vocabulary.types import ReduceOp

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
            None
            if bucket.in_place
            else communicator.empty(bucket.count * sizes[bucket.dtype], np.uint8)
            for bucket in plan.buckets
        ]
        nbytes = [bucket.count * sizes[bucket.dtype] for bucket in plan.buckets]
        engine = communicator.engine
        assert engine.native is not None
        self._number = engine.native.register(
            [
                Layout(whole, size, [(s.start * each, s.count * each) for s in bucket.slots])
                for whole, size, bucket in zip(memory, nbytes, plan.buckets, strict=True)
                for each in (sizes[bucket.dtype],)
            ]
        )
        self._prepare = prepare
        # The engine must not keep alive an optimizer that everybody else has forgotten.
        owner = weakref.ref(self)

        def reduce(item: BucketItem) -> None:
            this, bucket = owner(), item.bucket
            if (whole := memory[bucket]) is None:
                whole = item.view(nbytes[bucket])
            array = whole.view(dtypes[plan.buckets[bucket].dtype])
            if bucket == 0 and this is not None:
                this._prepare()
                numerics.begin_step()
            numerics.check_own(communicator, plan, bucket, array)
            communicator.all_reduce(array, ReduceOp.MEAN, signature=plan.signature)
            numerics.check_mean(communicator, plan, bucket, array)

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
        if xla.is_compiling():
            after = order.token(self.communicator)
            return [
                xla.start(self._number, bucket, part, after, self._plan.buckets[bucket].in_place)
                for bucket, part in parts
            ]
        with order.in_turn(self.communicator):
            return [ops.start(self._number, bucket, part) for bucket, part in parts]

    def wait(self, gradients: Sequence[Any], tokens: Sequence[Any]) -> list[Any]:
        """Add the ops that wait for the buckets; return the means of the gradients in them.

        Args:
            gradients, tokens: what `start` was given, and what it returned.
        """
        means: dict[int, Any] = {}
        parts = self._parts(gradients)
        over: list[Any] = []
        for number, (bucket, part) in enumerate(zip(self._plan.buckets, parts, strict=True)):
            if xla.is_compiling():
                likes = [(gradient.shape, gradient.dtype) for gradient in part]
                last = number == len(parts) - 1
                # The last keeps the others from being dropped.
                *reduced, token = xla.wait(
                    self._number, number, likes, tokens, over if last else (), last
                )
                over.append(token)
            else:
                reduced = ops.wait(self._number, number, part, tokens)
            for slot, mean in zip(bucket.slots, reduced, strict=True):
                means[slot.gradient] = mean
        if xla.is_compiling():
            order.follow(self.communicator, over[-1])
        else:
            order.done(self.communicator, list(means.values()))
        return [means[index] for index in self._plan.present]

    def _parts(self, gradients: Sequence[Any]) -> list[list[Any]]:
        """The gradients of each bucket."""
        return [[gradients[slot.gradient] for slot in b.slots] for b in self._plan.buckets]
