"""Registers a bucket plan with the engine: TensorFlow's threads pack, the engine reduces.

Buckets are in registered memory where ranks share some. A gradient that has a bucket to itself in a
step that XLA compiles is reduced in XLA's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.effects.handoff import BucketItem, Layout
from ringreduce.tensorflow.reducer import BucketReducer

# What the kernels are registered for (native/src/tf_ops.c).
_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


def can_pack(gradients: Sequence[Any]) -> bool:
    """Whether there are any `gradients`, all of dtypes that the kernels support."""
    return bool(gradients) and all(g.dtype.name in _DTYPES for g in gradients)


class PackedPlan:
    """The memory of a plan's buckets, registered with the engine.

    Memory and registration last as long as this object; a graph that runs after that gets an error
    that says so. The engine's thread calls `reducer`; `number` is the plan's in the handoff queue.
    """

    def __init__(self, reducer: BucketReducer, present: Sequence[Any]) -> None:
        self.plan, self.communicator = reducer.plan, reducer.communicator
        buckets = self.plan.buckets
        dtypes = {g.dtype.name: np.dtype(g.dtype.as_numpy_dtype) for g in present}
        nbytes = [bucket.count * dtypes[bucket.dtype].itemsize for bucket in buckets]
        memory = [
            None if bucket.in_place else self.communicator.empty(size, np.uint8)
            for bucket, size in zip(buckets, nbytes, strict=True)
        ]
        layouts = []
        for whole, size, bucket in zip(memory, nbytes, buckets, strict=True):
            each = dtypes[bucket.dtype].itemsize
            spans = [(slot.start * each, slot.count * each) for slot in bucket.slots]
            layouts.append(Layout(whole, size, spans))
        engine = self.communicator.engine
        assert engine.native is not None
        self.number = engine.native.register(layouts)

        def reduce(item: BucketItem) -> None:
            bucket = item.bucket
            if (whole := memory[bucket]) is None:
                whole = item.view(nbytes[bucket])
            if bucket == 0:
                reducer.begin_step()
            reducer.reduce(bucket, whole.view(dtypes[buckets[bucket].dtype]))

        engine.serve(self.number, reduce)
        weakref.finalize(self, engine.forget, self.number).atexit = False

    def parts(self, dense: Sequence[Any]) -> list[list[Any]]:
        """The gradients in each bucket."""
        by_gradient = dict(zip(self.plan.present, dense, strict=True))
        return [[by_gradient[slot.gradient] for slot in b.slots] for b in self.plan.buckets]

    def joined(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """The means of the dense gradients, in their order, from the means in each bucket."""
        means = {
            slot.gradient: mean
            for bucket, part in zip(self.plan.buckets, parts, strict=True)
            for slot, mean in zip(bucket.slots, part, strict=True)
        }
        return [means[index] for index in self.plan.present]
