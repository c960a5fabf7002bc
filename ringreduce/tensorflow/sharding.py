"""Gradients to the ranks that update them, and updated weights to all: two plans of buckets.

    gradients --start--> buckets --reduce-scatter--> own pieces --wait--> update
    weights   <--wait--  buckets <---all-gather----  own pieces <--start-----+

Every start of the second plan needs all waits of the first, as the engine needs the ranks in one
order. In a graph, and where XLA compiles, the engine serves both; eagerly, and without the native
library, a Python function does each. The ranks of a host fill the same memory with weights. In a
graph it is lent: variables live in one area while the next step uses the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import gather_shares, share_count, shared_memory, shares
from ringreduce.effects.handoff import Area, BucketItem, Layout
from ringreduce.pure.buckets import Bucket, BucketPlan, GradientSpec, Piece, pieces
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow import failures, ops, xla
from ringreduce.tensorflow.control_flow import refuse_unreachable
from ringreduce.tensorflow.numerics import NumericsCheck
from ringreduce.tensorflow.plans import AgreedPlans, BucketReducer
from ringreduce.tensorflow.python_calls import blocking, call
from ringreduce.tensorflow.rounds import Round, left_here, serve
from ringreduce.vocabulary.types import dtype_named

_Tensors = Sequence[Any]


def piece_of(whole: Any, piece: Piece) -> Any:
    """Return the elements of `whole`, a tensor or variable, that `piece` names, flat."""
    return tf.reshape(tf.convert_to_tensor(whole), [-1])[piece.first : piece.first + piece.length]


class ShardedBuckets:
    """The buckets of variables, of which each rank updates its share.

    `specs` are of all variables, in their order; `pieces` says what of each is this rank's. Memory
    is registered, owned by this object, and made in the first step.
    """

    def __init__(
        self,
        ring: Communicator,
        specs: Sequence[GradientSpec],
        bucket_bytes: int,
        check_numerics: str,
    ) -> None:
        sizes = {spec.dtype: tf.as_dtype(spec.dtype).size for spec in specs}
        self._ring, self._sizes = ring, sizes
        count = share_count(ring)
        self._plan = BucketPlan.make(specs, sizes, bucket_bytes, ranks=count)
        self.pieces = self.pieces_of(ring.rank)
        self._agreed = AgreedPlans(ring, bucket_bytes)
        self._numerics = NumericsCheck(check_numerics)
        # By which variables have gradients.
        self._reducers: dict[tuple[bool, ...], BucketReducer] = {}
        # By that, whether XLA compiles, and the number of areas.
        self._native: dict[tuple[tuple[bool, ...], bool, int], tuple[int, int]] = {}

    def pieces_of(self, rank: int) -> list[Piece]:
        """Return the piece of each variable that a rank updates."""
        parts = [
            shares(self._ring, bucket.count, self._sizes[bucket.dtype])[rank]
            for bucket in self._plan.buckets
        ]
        found = pieces(self._plan, parts)
        return [found[number] for number in range(len(self._plan.gradients))]

    def scatter(self, gradients: _Tensors) -> list[Any]:
        """Return this rank's pieces of the means of `gradients`, None where there is none.

        Collective.
        """
        refuse_unreachable(self._ring)
        failures.watch(self._ring)
        present = tuple(gradient is not None for gradient in gradients)
        specs, dense = self._plan.gradients, []
        for gradient, spec in zip(gradients, specs, strict=True):
            zeros = tf.zeros(spec.shape, spec.dtype)
            dense.append(zeros if gradient is None else tf.cast(gradient, spec.dtype))
        reducer = self._reducer_of(present)
        if self._is_native():
            found = self._scattered_natively(present, dense)
        else:
            results = [((piece.length,), spec.dtype) for piece, spec in self._each()]
            run = blocking(self._ring, lambda *arrays: self._scattered(reducer, arrays))
            found = call(self._ring, "reduce gradients", run, dense, results)
        return [one if there else None for one, there in zip(found, present, strict=True)]

    def gather(
        self, own: _Tensors, present: Sequence[bool], use: Callable[[_Tensors], None]
    ) -> None:
        """Call `use` with the wholes of all ranks' pieces, of which `own` are this rank's.

        Where XLA compiles that is in the graph around this one, if it can be. Collective. `present`
        says which had gradients in the `scatter` before, whose memory is used.
        """
        results = [(spec.shape, spec.dtype) for _, spec in self._each()]
        if not self._is_native():
            run = blocking(self._ring, self._gathered)
            use(call(self._ring, "give weights to all ranks", run, own, results))
            return
        number = self._numbers(tuple(present))[1]
        Round(self._ring, number, self._plan, own).give(results, use)

    @cached_property
    def _memory(self) -> "_Memory":
        return _Memory(self._ring, self._plan)

    def _each(self) -> Any:
        return zip(self.pieces, self._plan.gradients, strict=True)

    def _is_native(self) -> bool:
        return not tf.executing_eagerly() and (xla.is_compiling() or ops.are_available())

    def _reducer_of(self, present: tuple[bool, ...]) -> BucketReducer:
        if present not in self._reducers:
            specs = zip(self._plan.gradients, present, strict=True)
            gradients = tuple(replace(spec, present=there) for spec, there in specs)
            plan = replace(self._plan, gradients=gradients)
            self._reducers[present] = BucketReducer(plan, self._agreed, self._numerics)
        return self._reducers[present]

    # --- The engine's ---

    def _scattered_natively(self, present: tuple[bool, ...], gradients: _Tensors) -> list[Any]:
        """Return this rank's pieces of the means of `gradients`, all of which the engine has."""
        number, in_place = self._numbers(present)[0], self._in_place()
        each = zip(self._plan.buckets, in_place, strict=True)
        wholes = {bucket.slots[0].gradient for bucket, stays in each if stays}
        results = [
            (spec.shape if place in wholes else (piece.length,), spec.dtype)
            for place, (piece, spec) in enumerate(self._each())
        ]
        found = Round(self._ring, number, self._plan, gradients, in_place).results(results)
        return [
            piece_of(mean, self.pieces[place]) if place in wholes else mean
            for place, mean in found.items()
        ]

    def _in_place(self) -> list[bool]:
        """Which buckets XLA has in memory as they are: within a host, each of one gradient."""
        may_be = xla.is_compiling() and self._ring.transport == "shm"
        return [may_be and bucket.slots[0].count == bucket.count for bucket in self._plan.buckets]

    def _numbers(self, present: tuple[bool, ...]) -> tuple[int, int]:
        """The numbers of the plans of a step for the engine, which are made once."""
        # In a graph the weights stay in one area while the next step uses the other.
        count = 1 if xla.is_compiling() and left_here() is None else 2
        key = present, xla.is_compiling(), count
        if key in self._native:
            return self._native[key]
        # What the engine calls must not keep this object, which has it forgotten.
        reducer, memory = self._reducer_of(present), self._memory
        dtypes = [dtype_named(bucket.dtype) for bucket in self._plan.buckets]
        scattering, gathering = [], []
        shared = memory.shared
        for number, (bucket, in_place) in enumerate(
            zip(self._plan.buckets, self._in_place(), strict=True)
        ):
            areas = [] if in_place and shared else memory.areas(number, 1 if shared else count)
            size = dtypes[number].itemsize
            nbytes = bucket.count * size
            wholes = [(slot.start * size, slot.count * size) for slot in bucket.slots]
            mine = [self.pieces[slot.gradient] for slot in bucket.slots]
            own = [(piece.start * size, piece.length * size) for piece in mine]
            if in_place:
                scattering.append(Layout([], nbytes, wholes))
            else:
                scattering.append(Layout(areas, nbytes, wholes, own))
            gathering.append(Layout(shared[number] if shared else areas, nbytes, own, wholes))

        def scatter(item: BucketItem) -> None:
            if item.bucket == 0:
                reducer.begin_step()
            values = scattering[item.bucket].memory(item)
            reducer.scatter(item.bucket, values.view(dtypes[item.bucket]))

        def gather(item: BucketItem) -> None:
            values = gathering[item.bucket].memory(item)
            memory.give(values.view(dtypes[item.bucket]))

        self._native[key] = (
            serve(self, self._ring, scattering, scatter),
            serve(self, self._ring, gathering, gather),
        )
        return self._native[key]

    # --- In Python ---

    def _scattered(self, reducer: BucketReducer, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        reducer.begin_step()
        found: list[Any] = [None] * len(arrays)
        for number, bucket in enumerate(self._plan.buckets):
            values = self._memory.buckets[number]
            for slot in bucket.slots:
                values[slot.start : slot.start + slot.count] = arrays[slot.gradient].reshape(-1)
            reducer.scatter(number, values)
            for piece, place in self._own(bucket):
                found[place] = values[piece.start : piece.start + piece.length].copy()
        return found

    def _gathered(self, *arrays: np.ndarray) -> list[np.ndarray]:
        found: list[Any] = [None] * len(arrays)
        for number, bucket in enumerate(self._plan.buckets):
            values = self._memory.buckets[number]
            for piece, place in self._own(bucket):
                values[piece.start : piece.start + piece.length] = arrays[place]
            self._memory.give(values)
            for slot in bucket.slots:
                whole = values[slot.start : slot.start + slot.count]
                shape = self._plan.gradients[slot.gradient].shape
                found[slot.gradient] = whole.reshape(shape).copy()
        return found

    def _own(self, bucket: Bucket) -> list[tuple[Piece, int]]:
        return [(self.pieces[slot.gradient], slot.gradient) for slot in bucket.slots]


class _Memory:
    """Registered memory for a plan's buckets; as long as the engine, or its owner, uses it."""

    def __init__(self, ring: Communicator, plan: BucketPlan) -> None:
        self._ring, self._plan = ring, plan
        self._signature = signature_of("weights", plan.signature)
        self._areas: list[list[Area]] = [[] for _ in plan.buckets]

    @cached_property
    def buckets(self) -> list[np.ndarray]:
        """Those of the Python function, since results may still be lent from an area."""
        return [
            self._zeros(number).view(dtype_named(bucket.dtype))
            for number, bucket in enumerate(self._plan.buckets)
        ]

    def areas(self, bucket: int, count: int) -> list[Area]:
        """Return `count` areas for a bucket of the engine's."""
        areas = self._areas[bucket]
        while len(areas) < count:
            areas.append(Area(self._zeros(bucket)))
        return areas[:count]

    @cached_property
    def shared(self) -> list[list[Area]]:
        """Two areas for each bucket's weights that the host's ranks share, or none. Collective."""
        sizes = [self._nbytes(number) for number in range(len(self._areas))]
        found = shared_memory(self._ring, [size for size in sizes for _ in range(2)])
        areas = [Area(*each) for each in found or []]
        return [areas[at : at + 2] for at in range(0, len(areas), 2)]

    def give(self, values: np.ndarray) -> None:
        """Fill a bucket's `values` with all ranks' shares of it."""
        gather_shares(self._ring, values, self._signature)

    def _nbytes(self, number: int) -> int:
        bucket = self._plan.buckets[number]
        return bucket.count * dtype_named(bucket.dtype).itemsize

    def _zeros(self, number: int) -> np.ndarray:
        memory = self._ring.empty(self._nbytes(number), np.uint8)
        memory[:] = 0  # Padding travels too.
        return memory
