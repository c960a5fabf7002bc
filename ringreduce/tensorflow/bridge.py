"""Gradients in and out of TensorFlow: the bridge between a step's tensors and the ring.

There are four ways, with the same results to the last bit:

- In a graph, with the native library: one op per bucket packs its gradients as soon as they
  are there and hands them to the engine, which reduces while backpropagation goes on
  (`ringreduce.tensorflow.packed`).
- In a graph without it: a single stateful `tf.numpy_function` takes all gradients of the
  step, and the step waits for it. One function and not one per bucket: stateful ops run in
  program order, so more would not overlap, and each that blocks holds a thread that another
  may need.
- Eagerly: the same Python function, called directly.
- In what XLA compiles: as in a graph, by custom calls for ops (`ringreduce.tensorflow.xla`).

The tensors that come back from Python are views of the bucket's memory, which TensorFlow may
keep as long as it likes. So a bucket's memory is used again only when nothing refers to it
any more, which Python's reference count tells (`ringreduce.tensorflow.memory`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.buckets import BucketPlan, GradientSpec, first_difference
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow import compiled, failures, ops, order, xla
from ringreduce.tensorflow.memory import Memory
from ringreduce.tensorflow.numerics import NumericsCheck
from ringreduce.tensorflow.packed import PackedPlan
from ringreduce.tensorflow.places import refuse_unreachable_places
from ringreduce.tensorflow.sparse import SparseMean, as_tensors
from ringreduce.vocabulary.errors import ConfigError, MismatchError
from ringreduce.vocabulary.types import ReduceOp, dtype_code

__all__ = ["COMPRESSIONS", "GradientBridge"]


# Smaller gradients are cheaper to pack together than to reduce one by one.
_IN_PLACE_BYTES = 1 << 20

# 16-bit floats are added up in float32 (`ringreduce.pure.kernels`), and the sum is divided before
# it is rounded again: only a gradient, or a mean, too large for the dtype overflows, not a sum.
COMPRESSIONS: dict[str, Any] = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}


class GradientBridge:
    """Averages lists of gradients over all ranks; the interface a faster bridge will keep.

    Args:
        communicator: asked for when gradients first arrive, so that an optimizer can be made
            before the ring is.
        bucket_bytes: about how much is reduced at a time.
        first_bytes: the same for the first bucket.
        check_numerics: one of `ringreduce.tensorflow.numerics.MODES`.
        compression: one of `COMPRESSIONS`: what 32- and 64-bit gradients are rounded to before they
            travel.
        sparse_as_dense: reduce sparse gradients as tensors, and return them so.

    Raises:
        ConfigError: there is no such mode or compression.
    """

    def __init__(
        self,
        communicator: Callable[[], Communicator],
        bucket_bytes: int,
        first_bytes: int | None = None,
        check_numerics: str = "off",
        compression: str = "none",
        sparse_as_dense: bool = False,
    ) -> None:
        if compression not in COMPRESSIONS:
            accepted = ", ".join(COMPRESSIONS)
            raise ConfigError(f"compression is {compression!r}; accepted: {accepted}")
        self._wire = COMPRESSIONS[compression]
        self._communicator = communicator
        self._bucket_bytes, self._first_bytes = bucket_bytes, first_bytes
        self._plans: dict[tuple[tuple[GradientSpec, ...], str | Literal[False]], BucketPlan] = {}
        self._agreed: set[int] = set()
        self._latest: BucketPlan | None = None
        self._agreeing: BucketPlan | None = None
        self._explains: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._memory = Memory()
        # By the gradients, with their paths, and not by signature: errors name the paths.
        self._packed: dict[tuple[tuple[GradientSpec, ...], bool], PackedPlan] = {}
        self._numerics = NumericsCheck(check_numerics)
        self._sparse, self._sparse_as_dense = SparseMean(self._numerics), sparse_as_dense

    # Python that runs while tracing or as an op; there is nothing in it for AutoGraph to convert.
    @tf.autograph.experimental.do_not_convert
    def mean(
        self,
        gradients: Sequence[Any],
        paths: Sequence[str],
        before: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """The mean of each gradient over all ranks; a new list, None where there was None.

        Sparse gradients (`tf.IndexedSlices`) come back sparse, each index once
        (`ringreduce.tensorflow.sparse`), or dense with `sparse_as_dense`, or where XLA compiles.
        In a graph this adds the ops that do it; nothing travels while tracing, since ranks may
        trace at other times.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None, equal on all ranks in number,
                order, shape, dtype and whether they are sparse; not in the rows those have.
            paths: a name for each, for messages.
            before: called each time before they travel, in the thread that reduces them;
                the same in every call.

        Raises:
            ConfigError: in a place where ranks could not all take part: inside a branch of
                `tf.cond`, or under ``jit_compile=True`` where XLA cannot call the ring.
            RingReduceError: eagerly, what went wrong; out of a graph when that is run
                (`ringreduce.tensorflow.failures`).
        """
        communicator = self._communicator()
        if communicator.size == 1:
            return list(gradients)
        refuse_unreachable_places(communicator)
        failures.watch(communicator)
        if communicator not in self._explains:
            communicator.explain_with(self._explained)
            self._explains.add(communicator)
        compiling = xla.is_compiling()
        # XLA fixes all shapes, and rows are as many as a batch happens to use.
        given = [as_tensors(g, self._sparse_as_dense or compiling) for g in gradients]
        gradients = [self._compressed(g) for g in given]
        plan = self._plan(gradients, paths, compiling and communicator.transport)
        sparse = [gradients[index] for index in plan.sparse]
        present = [gradients[index] for index in plan.present]

        def prepare() -> None:
            before()
            self._agree_once(communicator, plan)

        def sparse_means() -> list[Any]:
            return self._sparse.mean(communicator, plan, sparse, prepare) if sparse else []

        def reduce(*arrays: np.ndarray) -> list[np.ndarray]:
            started = time.perf_counter()
            try:
                prepare()
                return self._reduce(communicator, plan, arrays)
            finally:
                communicator.blocked_for(time.perf_counter() - started)

        # Whatever the way, the buckets go first: ranks need not take the same one.
        if sparse and not present:
            means, others = [], sparse_means()
        elif tf.executing_eagerly():
            means = [tf.convert_to_tensor(a) for a in reduce(*(g.numpy() for g in present))]
            others = sparse_means()
        elif not present:
            # Not a gradient at all. The ranks agree on that too.
            nothing = partial(_agreed_on_nothing, reduce)
            if compiling:
                results = [((), tf.int32)]
                compiled.call(communicator, "reduce gradients", lambda: [nothing()], [], results)
            else:
                with order.in_turn(communicator):
                    agreed = tf.numpy_function(nothing, [], tf.int32, stateful=True)
                order.done(communicator, [agreed])
            means, others = [], []
        elif compiling or (PackedPlan.can_take(present) and ops.are_available()):
            packed = self._packed_plan(communicator, plan, present, prepare)
            tokens = packed.start(gradients)
            others = sparse_means()
            means = packed.wait(gradients, tokens)
        else:
            kinds = [g.dtype for g in present]
            with order.in_turn(communicator):
                means = tf.numpy_function(reduce, present, kinds, stateful=True)
            order.done(communicator, means)
            for tensor, gradient in zip(means, present, strict=True):
                tensor.set_shape(gradient.shape)
            others = sparse_means()
        found = dict(zip((*plan.present, *plan.sparse), (*means, *others), strict=True))
        return [
            None if g is None else _cast(found[index], g.dtype) for index, g in enumerate(given)
        ]

    def _compressed(self, gradient: Any) -> Any:
        if gradient is None or self._wire is None or gradient.dtype not in (tf.float32, tf.float64):
            return gradient
        return _cast(gradient, self._wire)

    def _packed_plan(
        self,
        communicator: Communicator,
        plan: BucketPlan,
        present: Sequence[Any],
        prepare: Callable[[], None],
    ) -> PackedPlan:
        """The plan as the engine of `communicator` knows it; made once for each."""
        known = self._packed.get((plan.gradients, plan.compiled))
        if known is None or known.communicator is not communicator:
            known = PackedPlan(communicator, plan, present, prepare, self._numerics)
            self._packed[plan.gradients, plan.compiled] = known
        return known

    def _plan(
        self, gradients: Sequence[Any], paths: Sequence[str], compiled_over: str | Literal[False]
    ) -> BucketPlan:
        """The plan for these gradients, in a step that XLA compiles, for a transport, or does not.

        XLA lets a custom call have its operands' memory for good, so what lies there need not be
        packed. But only in shared memory is it let go as soon as a call has failed: libzmq may hold
        on to pieces until its context has gone.
        """
        specs = tuple(
            GradientSpec(path, (), "", present=False)
            if gradient is None
            else GradientSpec(
                path,
                _static_shape(gradient, path),
                gradient.dtype.name,
                sparse=isinstance(gradient, tf.IndexedSlices),
            )
            for gradient, path in zip(gradients, paths, strict=True)
        )
        key = specs, compiled_over
        if key not in self._plans:
            dtypes = {g.dtype.name: g.dtype.as_numpy_dtype for g in gradients if g is not None}
            for dtype in dtypes.values():
                dtype_code(np.dtype(dtype))
            sizes = {name: np.dtype(dtype).itemsize for name, dtype in dtypes.items()}
            self._plans[key] = BucketPlan.make(
                specs,
                sizes,
                self._bucket_bytes,
                self._first_bytes,
                compiled=bool(compiled_over),
                in_place_bytes=_IN_PLACE_BYTES if compiled_over == "shm" else None,
            )
        return self._plans[key]

    def _reduce(
        self, communicator: Communicator, plan: BucketPlan, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Pack, reduce bucket by bucket, and hand out views; runs in a thread of TensorFlow's."""
        by_gradient = dict(zip(plan.present, arrays, strict=True))
        means: dict[int, np.ndarray] = {}
        self._numerics.begin_step()
        for number, bucket in enumerate(plan.buckets):
            dtype = by_gradient[bucket.slots[0].gradient].dtype
            memory = self._memory.take(bucket.count * dtype.itemsize).view(dtype)
            filled = 0
            for slot in bucket.slots:
                memory[filled : slot.start] = 0  # Padding travels too; it must be a number.
                filled = slot.start + slot.count
                memory[slot.start : filled] = by_gradient[slot.gradient].reshape(-1)
            memory[filled:] = 0
            self._numerics.check_own(communicator, plan, number, memory)
            communicator.all_reduce(memory, ReduceOp.MEAN, signature=plan.signature)
            self._numerics.check_mean(communicator, plan, number, memory)
            for slot in bucket.slots:
                view = memory[slot.start : slot.start + slot.count]
                means[slot.gradient] = view.reshape(by_gradient[slot.gradient].shape)
        return [means[index] for index in plan.present]

    def _agree_once(self, communicator: Communicator, plan: BucketPlan) -> None:
        if plan.signature not in self._agreed:
            self._agree(communicator, plan)

    def _agree(self, communicator: Communicator, plan: BucketPlan) -> None:
        """Compare a plan's gradients with those of every rank, before its first use."""
        buckets = f"{plan.describe_buckets()} (bucket_bytes={self._bucket_bytes})"
        own = {
            "gradients": [(g.path, g.shape, g.dtype, g.present, g.sparse) for g in plan.gradients],
            "signature": plan.signature,
            "buckets": buckets,
        }
        self._agreeing = plan
        try:
            gathered = communicator.all_gather_object(own, signature=signature_of("gradients"))
        finally:
            self._agreeing = None
        for rank, theirs in enumerate(gathered):
            specs = [GradientSpec(p, tuple(s), *rest) for p, s, *rest in theirs["gradients"]]
            what, difference = "gradients", first_difference(plan.gradients, specs)
            if difference is None and theirs["signature"] != plan.signature:
                what, difference = "buckets of gradients", (buckets, theirs["buckets"])
            if difference is None:
                continue
            raise communicator.fail(
                MismatchError(
                    f"has other {what} than rank {rank}: here {difference[0]}; "
                    f"there {difference[1]}",
                    rank=communicator.rank,
                    size=communicator.size,
                    peer=rank,
                    operation="gradient reduction",
                    remedy=_ALIKE,
                )
            )
        self._agreed.add(plan.signature)
        self._latest = plan

    def _explained(self, error: MismatchError) -> MismatchError | None:
        """What `error`, in which ranks are seen to be in different calls, means for gradients."""
        if self._agreeing is not None and self._latest is not None:
            # The others go on with the plan of the step before: only this rank's changed.
            change = first_difference(self._agreeing.gradients, self._latest.gradients)
            if change is None and self._agreeing.compiled != self._latest.compiled:
                change = self._agreeing.describe_buckets(), self._latest.describe_buckets()
            if change is None:
                return None
            text = (
                f"has gradients that changed since the last step, from {change[1]} "
                f"to {change[0]}, while rank {error.peer} goes on as before"
            )
        else:
            # All have used both plans before, and do not now use the same.
            known = {plan.signature: plan for plan in self._plans.values()}
            ours, theirs = (known.get(signature) for signature in error.signatures)
            if ours is None or theirs is None or ours is theirs:
                return None
            difference = first_difference(ours.gradients, theirs.gradients)
            if difference is None:
                difference = ours.describe_buckets(), theirs.describe_buckets()
            text = (
                f"has other gradients than rank {error.peer} in this step: here {difference[0]}; "
                f"there {difference[1]}"
            )
        return MismatchError(
            text,
            rank=error.rank,
            size=error.size,
            peer=error.peer,
            operation="gradient reduction",
            remedy=_ALIKE,
        )


def _agreed_on_nothing(reduce: Callable[[], list[np.ndarray]]) -> np.ndarray:
    return np.array(len(reduce()), np.int32)


_ALIKE = (
    "All ranks must compute gradients for the same variables in each step: look for code that "
    "depends on the rank or on the data."
)


def _cast(gradient: Any, dtype: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)


def _static_shape(gradient: Any, path: str) -> tuple[int, ...]:
    if not gradient.shape.is_fully_defined():
        raise ConfigError(
            f"got a gradient of unknown shape {gradient.shape} for {path}",
            remedy="Give the variable a fixed shape.",
        )
    return tuple(gradient.shape)
