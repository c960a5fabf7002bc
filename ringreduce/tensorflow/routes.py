"""Two ways of a step's gradients out of TensorFlow and back, with bit-equal results.

Buckets that TensorFlow's threads pack and the engine reduces, in a graph and where XLA compiles:

    gradients of bucket 0 --> start 0 --token--+--> wait 0 --> means of bucket 0
                                 |  engine     |
    gradients of bucket 1 --> start 1 --token--+--> wait 1 --> means of bucket 1

Every wait depends on every start, so that no wait holds a thread that a start needs; where XLA
compiles, every start also on the token of the collective before it, and the last wait on all
others. Buckets are in registered memory where ranks share some, which in a graph the means stay in;
a gradient that has a bucket to itself in a step that XLA compiles is reduced in XLA's memory.

One Python function, for which the step waits, eagerly and where there are no native ops: several
would run one after the other, and each that blocks holds a thread that another may need. The means
are views of a bucket's memory, which TensorFlow then owns. Sparse gradients come after it.
"""

import itertools
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.effects.handoff import Area, BucketItem, Layout
from ringreduce.pure.payload import aligned
from ringreduce.tensorflow import ops, order, xla
from ringreduce.tensorflow.plans import BucketReducer
from ringreduce.tensorflow.python_calls import call
from ringreduce.tensorflow.sparse import mean_of_slices
from ringreduce.vocabulary.types import dtype_named

# Means of each bucket's slots, and of sparse gradients by their numbers.
_Means = tuple[list[list[Any]], dict[int, Any]]


class PackedRoute:
    """The route of one plan; its buckets are registered with the engine as long as it lives."""

    def __init__(self, reducer: BucketReducer) -> None:
        self._reducer = reducer
        ring, buckets = reducer.communicator, reducer.plan.buckets
        dtypes = [dtype_named(bucket.dtype) for bucket in buckets]
        layouts: list[Layout] = []
        for bucket, dtype in zip(buckets, dtypes, strict=True):
            itemsize = dtype.itemsize
            nbytes = bucket.count * itemsize
            areas = [] if bucket.in_place else [Area(ring.empty(nbytes, np.uint8))]
            spans = [(slot.start * itemsize, slot.count * itemsize) for slot in bucket.slots]
            layouts.append(Layout(areas, nbytes, spans))

        def reduce(item: BucketItem) -> None:
            if item.bucket == 0:
                reducer.begin_step()
            memory = layouts[item.bucket].memory(item)
            reducer.reduce(item.bucket, memory.view(dtypes[item.bucket]))

        engine = ring._session.engine
        assert engine.native is not None
        self._number = engine.native.register(layouts)
        engine.serve(self._number, reduce)
        weakref.finalize(self, engine.forget, self._number).atexit = False

    def mean(self, gradients: Sequence[Any]) -> dict[int, Any]:
        """The mean of each of the plan's gradients, by its number."""
        buckets = self._reducer.plan.buckets
        parts = [[gradients[slot.gradient] for slot in bucket.slots] for bucket in buckets]
        way = self._compiled if xla.is_compiling() else self._in_graph
        waited, sparse = way(parts, gradients)
        numbers = [slot.gradient for bucket in buckets for slot in bucket.slots]
        return sparse | dict(zip(numbers, itertools.chain(*waited), strict=True))

    def _in_graph(self, parts: Sequence[Any], gradients: Sequence[Any]) -> _Means:
        ring, number = self._reducer.communicator, self._number
        with order.in_order(ring):
            tokens = [ops.start(number, bucket, part) for bucket, part in enumerate(parts)]
        sparse = mean_of_slices(self._reducer, gradients)
        likes = enumerate([(gradient.shape, gradient.dtype) for gradient in part] for part in parts)
        waited = [ops.wait(number, bucket, like, tokens) for bucket, like in likes]
        order.done(ring, list(itertools.chain(*waited)))
        return waited, sparse

    def _compiled(self, parts: Sequence[Any], _: Sequence[Any]) -> _Means:
        ring, plan, number = self._reducer.communicator, self._reducer.plan, self._number
        assert not plan.sparse
        after = order.token(ring)
        buckets = enumerate(zip(parts, plan.buckets, strict=True))
        started = [xla.start(number, i, part, after, b.in_place) for i, (part, b) in buckets]
        tokens = [token for *_, token in started]
        waited: list[list[Any]] = []
        over: list[Any] = []
        for place, (part, (*kept, _)) in enumerate(zip(parts, started, strict=True)):
            likes = [(gradient.shape, gradient.dtype) for gradient in part]
            # The last wait keeps XLA from dropping the others.
            last = place == len(parts) - 1
            before = [*tokens, *over] if last else tokens
            *means, token = xla.wait(number, place, likes, before, kept, last)
            waited.append(means)
            over.append(token)
        order.follow(ring, over[-1])
        return waited, {}


class PythonRoute:
    """The route of one plan."""

    def __init__(self, reducer: BucketReducer) -> None:
        self._reducer = reducer

    def mean(self, gradients: Sequence[Any]) -> dict[int, Any]:
        """The mean of each of the plan's gradients, by its number."""
        present = self._reducer.plan.present
        dense = [gradients[number] for number in present]
        # One more result than means, so that ranks without gradients are compared too.
        results = [((), tf.int32), *((gradient.shape, gradient.dtype) for gradient in dense)]
        ring = self._reducer.communicator
        _, *means = call(ring, "reduce gradients", self._run, dense, results)
        return dict(zip(present, means, strict=True)) | mean_of_slices(self._reducer, gradients)

    def _run(self, *arrays: np.ndarray) -> list[Any]:
        started = time.perf_counter()
        try:
            return [np.int32(len(arrays)), *self._reduced(arrays)]
        finally:
            self._reducer.communicator._session.blocked_for(time.perf_counter() - started)

    def _reduced(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Pack and reduce bucket by bucket; return views."""
        self._reducer.begin_step()
        plan = self._reducer.plan
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
            self._reducer.reduce(number, memory)
        return [means[index] for index in plan.present]
