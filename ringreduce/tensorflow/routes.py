"""Two ways of a step's gradients out of TensorFlow and back, with bit-equal results.

Buckets that TensorFlow's threads pack and the engine reduces, in a graph and where XLA compiles
(`ringreduce.tensorflow.rounds`). They are in registered memory where ranks share some, which in a
graph the means stay in; a gradient that has a bucket to itself in a step that XLA compiles is
reduced in XLA's memory.

One Python function, for which the step waits, eagerly and where there are no native ops: several
would run one after the other, and each that blocks holds a thread that another may need. The means
are views of a bucket's memory, which TensorFlow then owns. Sparse gradients come after it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.effects.handoff import Area, BucketItem, Layout
from ringreduce.pure.payload import aligned
from ringreduce.tensorflow.plans import BucketReducer
from ringreduce.tensorflow.python_calls import blocking, call
from ringreduce.tensorflow.rounds import Round, serve
from ringreduce.tensorflow.sparse import mean_of_slices
from ringreduce.vocabulary.types import dtype_named

# The means of a plan's gradients over all ranks, by their numbers.
Route = Callable[[Sequence[Any]], dict[int, Any]]


def packed(reducer: BucketReducer) -> Route:
    """The route by the native ops; its buckets are registered as long as the function lives."""
    ring, plan = reducer.communicator, reducer.plan
    dtypes = [dtype_named(bucket.dtype) for bucket in plan.buckets]
    layouts: list[Layout] = []
    for bucket, dtype in zip(plan.buckets, dtypes, strict=True):
        itemsize = dtype.itemsize
        nbytes = bucket.count * itemsize
        areas = [] if bucket.in_place else [Area(ring.empty(nbytes, np.uint8))]
        spans = [(slot.start * itemsize, slot.count * itemsize) for slot in bucket.slots]
        layouts.append(Layout(areas, nbytes, spans))
    in_place = [bucket.in_place for bucket in plan.buckets]

    def reduce(item: BucketItem) -> None:
        if item.bucket == 0:
            reducer.begin_step()
        memory = layouts[item.bucket].memory(item)
        reducer.reduce(item.bucket, memory.view(dtypes[item.bucket]))

    def mean(gradients: Sequence[Any]) -> dict[int, Any]:
        handed = Round(ring, number, plan, gradients, in_place)
        sparse = mean_of_slices(reducer, gradients)
        kinds = {place: (gradients[place].shape, gradients[place].dtype) for place in plan.present}
        return sparse | handed.results(kinds)

    number = serve(mean, ring, layouts, reduce)
    return mean


def in_python(reducer: BucketReducer) -> Route:
    """The route by a Python function."""
    ring, plan = reducer.communicator, reducer.plan

    def reduced(*arrays: np.ndarray) -> list[Any]:
        """Pack and reduce bucket by bucket; return views."""
        reducer.begin_step()
        by_gradient = dict(zip(plan.present, arrays, strict=True))
        means: dict[int, np.ndarray] = {}
        for number, bucket in enumerate(plan.buckets):
            dtype = by_gradient[bucket.slots[0].gradient].dtype
            # Zeros, since padding travels too; TensorFlow would copy what is not aligned.
            memory = aligned(bucket.count * dtype.itemsize).view(dtype)
            for slot in bucket.slots:
                gradient = by_gradient[slot.gradient]
                view = memory[slot.start : slot.start + slot.count].reshape(gradient.shape)
                view[...] = gradient
                means[slot.gradient] = view
            reducer.reduce(number, memory)
        return [np.int32(len(arrays)), *(means[index] for index in plan.present)]

    def mean(gradients: Sequence[Any]) -> dict[int, Any]:
        dense = [gradients[number] for number in plan.present]
        # One more result than means, so that ranks without gradients are compared too.
        results = [((), tf.int32), *((gradient.shape, gradient.dtype) for gradient in dense)]
        _, *means = call(ring, "reduce gradients", blocking(ring, reduced), dense, results)
        return dict(zip(plan.present, means, strict=True)) | mean_of_slices(reducer, gradients)

    return mean
