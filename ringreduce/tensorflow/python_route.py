"""A step's gradients through one Python function: eagerly, and where there are no native ops.

The step waits for it. It is one function, not one per bucket: stateful ops run in program order, so
several would not overlap, and each that blocks holds a thread that another may need. The means are
views of a bucket's memory, which TensorFlow then owns. Sparse gradients come after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.pure.buckets import ALIGNMENT
from ringreduce.tensorflow.plans import BucketReducer
from ringreduce.tensorflow.python_calls import call
from ringreduce.tensorflow.sparse import mean_of_slices


class PythonRoute:
    """The route of one plan."""

    def __init__(self, reducer: BucketReducer) -> None:
        self._reducer = reducer

    def mean(self, dense: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The means of the plan's dense gradients and of its sparse ones, in their order."""
        # One more result than means, so that ranks without gradients are compared too.
        results = [((), tf.int32), *((gradient.shape, gradient.dtype) for gradient in dense)]
        communicator = self._reducer.communicator
        _, *means = call(communicator, "reduce gradients", self._run, dense, results)
        return means, mean_of_slices(self._reducer, slices)

    def _run(self, *arrays: np.ndarray) -> list[Any]:
        started = time.perf_counter()
        try:
            self._reducer.begin_step()
            means = self._reduce(arrays)
        finally:
            self._reducer.communicator.blocked_for(time.perf_counter() - started)
        return [np.int32(len(means)), *means]

    def _reduce(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Pack and reduce bucket by bucket; return views."""
        plan = self._reducer.plan
        by_gradient = dict(zip(plan.present, arrays, strict=True))
        means: dict[int, np.ndarray] = {}
        for number, bucket in enumerate(plan.buckets):
            dtype = by_gradient[bucket.slots[0].gradient].dtype
            memory = _aligned(bucket.count * dtype.itemsize).view(dtype)
            for slot in bucket.slots:
                own = by_gradient[slot.gradient]
                view = memory[slot.start : slot.start + slot.count].reshape(own.shape)
                view[...] = own
                means[slot.gradient] = view
            self._reducer.reduce(number, memory)
        return [means[index] for index in plan.present]


def _aligned(nbytes: int) -> np.ndarray:
    """Zeros, since padding travels too; aligned, since TensorFlow would copy other memory."""
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -whole.__array_interface__["data"][0] % ALIGNMENT
    return whole[start : start + nbytes]
