"""Gradients in and out of TensorFlow: the bridge between a step's tensors and the ring.

A step's gradients take one of three routes, with the same results to the last bit:

- In a graph, native ops hand each bucket to the engine as soon as its gradients are computed
  (`ringreduce.tensorflow.native_route`).
- In what XLA compiles, custom calls do that (`ringreduce.tensorflow.xla_route`).
- Eagerly, and without the native library, one Python function takes all gradients
  (`ringreduce.tensorflow.python_route`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.buckets import BucketPlan, GradientSpec
from ringreduce.tensorflow import failures, ops, xla
from ringreduce.tensorflow.codecs import Codec
from ringreduce.tensorflow.native_route import NativeRoute
from ringreduce.tensorflow.numerics import NumericsCheck
from ringreduce.tensorflow.packed import PackedPlan, can_pack
from ringreduce.tensorflow.places import refuse_unreachable_places
from ringreduce.tensorflow.plans import AgreedPlans
from ringreduce.tensorflow.python_route import PythonRoute
from ringreduce.tensorflow.reducer import BucketReducer
from ringreduce.tensorflow.sparse import SparseMean, as_tensors, merged
from ringreduce.tensorflow.xla_route import XlaRoute
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import dtype_code

__all__ = ["GradientBridge"]

# Smaller gradients are cheaper to pack together than to reduce one by one.
_IN_PLACE_BYTES = 1 << 20


class _Route(Protocol):
    """How the gradients of one plan come out of TensorFlow, and their means go back."""

    def mean(self, dense: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The means of the plan's dense gradients, and of its sparse ones, in their order."""


class GradientBridge:
    """Averages lists of gradients over all ranks.

    Args:
        bucket_bytes: about how much is reduced at a time.
        first_bytes: the same for the first bucket.
        check_numerics: one of `ringreduce.tensorflow.numerics.MODES`.
        compression: one of `ringreduce.tensorflow.codecs.CODECS`.
        sparse_as_dense: reduce sparse gradients as tensors, and return them so.

    Raises:
        ConfigError: there is no such mode or compression.
    """

    def __init__(
        self,
        bucket_bytes: int,
        first_bytes: int | None = None,
        check_numerics: str = "off",
        compression: str = "none",
        sparse_as_dense: bool = False,
    ) -> None:
        self._bucket_bytes, self._first_bytes = bucket_bytes, first_bytes
        self._codec, self._sparse_as_dense = Codec(compression), sparse_as_dense
        self._numerics = NumericsCheck(check_numerics)
        self._sparse = SparseMean(self._numerics)
        # Of the communicator that was used last.
        self._agreed: tuple[Communicator, AgreedPlans] | None = None
        # By the gradients, with their paths, and not by signature: errors name the paths.
        self._routes: dict[tuple[tuple[GradientSpec, ...], str], tuple[BucketPlan, _Route]] = {}

    # Python that runs while tracing or as an op; there is nothing in it for AutoGraph to convert.
    @tf.autograph.experimental.do_not_convert
    def mean(
        self,
        communicator: Communicator,
        gradients: Sequence[Any],
        paths: Sequence[str],
    ) -> list[Any]:
        """The mean of each gradient over all ranks; a new list, None where there was None.

        Sparse gradients (`tf.IndexedSlices`) come back sparse, each index once
        (`ringreduce.tensorflow.sparse`), or dense with `sparse_as_dense`, or where XLA compiles.
        So it is with one rank too.
        In a graph this adds the ops that do it; nothing travels while tracing, since ranks may
        trace at other times.

        Args:
            communicator: whose ranks.
            gradients: tensors, `tf.IndexedSlices` or None, equal on all ranks in number,
                order, shape, dtype and whether they are sparse; not in the rows those have.
            paths: a name for each, for messages.

        Raises:
            ConfigError: in a place where ranks could not all take part: inside a branch of
                `tf.cond`, or under ``jit_compile=True`` where XLA cannot call the ring.
            RingReduceError: eagerly, what went wrong; out of a graph when that is run
                (`ringreduce.tensorflow.failures`).
        """
        if communicator.size == 1:
            return [self.own(gradient) for gradient in gradients]
        refuse_unreachable_places(communicator)
        failures.watch(communicator)
        given = [as_tensors(gradient, self._sparse_as_dense) for gradient in gradients]
        encoded = [self._codec.encode(gradient) for gradient in given]
        plan, route = self._routed(communicator, encoded, paths)
        dense, sparse = route.mean(
            [encoded[index] for index in plan.present], [encoded[index] for index in plan.sparse]
        )
        means = dict(zip((*plan.present, *plan.sparse), (*dense, *sparse), strict=True))
        return [self._codec.decode(means.get(i), gradient) for i, gradient in enumerate(given)]

    def own(self, gradient: Any) -> Any:
        """A gradient of this rank alone, in the form that `mean` gives it; nothing travels."""
        return merged(as_tensors(gradient, self._sparse_as_dense))

    def _routed(
        self,
        communicator: Communicator,
        gradients: Sequence[Any],
        paths: Sequence[str],
    ) -> tuple[BucketPlan, _Route]:
        """The plan for these gradients and the route that they take here; made once for each."""
        if self._agreed is None or self._agreed[0] is not communicator:
            self._agreed = communicator, AgreedPlans(communicator, self._bucket_bytes)
            self._routes.clear()
        specs = tuple(map(_spec_of, gradients, paths))
        way = "eager" if tf.executing_eagerly() else "XLA" if xla.is_compiling() else "graph"
        if (specs, way) not in self._routes:
            compiled_over = communicator.transport if way == "XLA" else None
            plan = self._plan(specs, gradients, compiled_over)
            reducer = BucketReducer(communicator, plan, self._agreed[1], self._numerics)
            present = [gradients[index] for index in plan.present]
            self._routes[specs, way] = plan, self._route(way, reducer, present)
        return self._routes[specs, way]

    def _route(self, way: str, reducer: BucketReducer, present: Sequence[Any]) -> _Route:
        if way == "XLA" and present:
            return XlaRoute(PackedPlan(reducer, present))
        if way == "graph" and can_pack(present) and ops.are_available():
            return NativeRoute(PackedPlan(reducer, present), self._sparse)
        return PythonRoute(reducer, self._sparse)

    def _plan(
        self, specs: tuple[GradientSpec, ...], gradients: Sequence[Any], compiled_over: str | None
    ) -> BucketPlan:
        """The plan for these gradients, in a step that XLA compiles, for a transport; None: not.

        XLA lets a custom call have its operands' memory for good, so what lies there need not be
        packed. But only in shared memory is it let go as soon as a call has failed: libzmq may hold
        on to pieces until its context has gone.
        """
        dtypes = {
            g.dtype.name: np.dtype(g.dtype.as_numpy_dtype) for g in gradients if g is not None
        }
        for dtype in dtypes.values():
            dtype_code(dtype)
        return BucketPlan.make(
            specs,
            {name: dtype.itemsize for name, dtype in dtypes.items()},
            self._bucket_bytes,
            self._first_bytes,
            compiled=compiled_over is not None,
            in_place_bytes=_IN_PLACE_BYTES if compiled_over == "shm" else None,
        )


def _spec_of(gradient: Any, path: str) -> GradientSpec:
    if gradient is None:
        return GradientSpec(path, (), "", present=False)
    if not gradient.shape.is_fully_defined():
        raise ConfigError(
            f"got a gradient of unknown shape {gradient.shape} for {path}",
            remedy="Give the variable a fixed shape.",
        )
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return GradientSpec(path, tuple(gradient.shape), gradient.dtype.name, sparse=is_sparse)
