"""Averages the gradients of a step over all ranks, by routes with bit-equal results.

Which one: `GradientBridge._routed`; what they do: `ringreduce.tensorflow.routes`.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import share_count
from ringreduce.pure.buckets import BucketPlan, GradientSpec
from ringreduce.tensorflow import failures, ops, xla
from ringreduce.tensorflow.codecs import Codec, Residuals
from ringreduce.tensorflow.control_flow import refuse_unreachable
from ringreduce.tensorflow.low_rank import LowRank, LowRankReducer, PowerSGD
from ringreduce.tensorflow.numerics import NumericsCheck
from ringreduce.tensorflow.plans import AgreedPlans, BucketReducer
from ringreduce.tensorflow.routes import Route, in_python, packed
from ringreduce.tensorflow.same_rows import SameRows
from ringreduce.tensorflow.sparse import as_tensors, merged
from ringreduce.vocabulary.config import elastic_minimum
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import dtype_code

_log = logging.getLogger(__name__)

# Smaller gradients are cheaper to pack together than to reduce one by one.
_IN_PLACE_BYTES = 1 << 20
# Communicators that were told that their compression changes nothing.
_told: weakref.WeakSet[Communicator] = weakref.WeakSet()


class GradientBridge:
    """Averages lists of gradients over all ranks; arguments as for `DistributedOptimizer`."""

    def __init__(
        self,
        bucket_bytes: int,
        check_numerics: str = "off",
        compression: str | PowerSGD = "none",
        sparse_as_dense: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; accepted: 1 and more")
        self._bucket_bytes = bucket_bytes
        self._sparse_as_dense = sparse_as_dense
        self._codec = compression if isinstance(compression, PowerSGD) else Codec(compression)
        # The state of `PowerSGD`; None without.
        self.low_rank = LowRank(compression) if isinstance(compression, PowerSGD) else None
        self._residuals = Residuals(2) if self._codec == "int8" else None
        self._numerics = NumericsCheck(check_numerics)
        # The line of the loop whose first gradients ranks compare, if they are to; once.
        self.compares_rows_of = ""
        # The plans are for the communicator that was used last.
        self._agreed: AgreedPlans | None = None
        # The keys hold the gradients' paths, which errors name; a signature would not.
        self._routes: dict[tuple[Any, ...], Route] = {}

    # AutoGraph must not convert this: it is Python that runs while tracing, or as an op.
    def mean(
        self,
        ring: Communicator,
        gradients: Sequence[Any],
        paths: Sequence[str],
        variables: Sequence[Any] = (),
    ) -> list[Any]:
        """The mean of each gradient over all ranks; a new list, None where there was None.

        Sparse gradients (`tf.IndexedSlices`) come back sparse, each index once, for one rank too;
        dense with `sparse_as_dense` and where XLA compiles. In a graph this adds ops; nothing
        travels while tracing, since ranks may trace at different times.

        `gradients` are equal on all ranks except in values and rows; `paths` name them in messages,
        and residuals belong to `variables`. ConfigError as `refuse_unreachable`, and for a shape
        that is not known. Eagerly raises what went wrong; from a graph that comes when it is run.
        """
        if ring.size == 1:
            return [self.own(gradient) for gradient in gradients]
        refuse_unreachable(ring)
        failures.watch(ring)
        taken = [as_tensors(gradient, self._sparse_as_dense) for gradient in gradients]
        encoded = [self._codec.encoded(g) if isinstance(g, tf.IndexedSlices) else g for g in taken]
        route = self._routed(ring, encoded, paths, variables)
        means = route(encoded)
        return [None if g is None else tf.cast(means[i], g.dtype) for i, g in enumerate(taken)]

    def own(self, gradient: Any) -> Any:
        """This rank's gradient in the form that `mean` returns; nothing travels."""
        return merged(as_tensors(gradient, self._sparse_as_dense))

    def _routed(
        self,
        ring: Communicator,
        gradients: Sequence[Any],
        paths: Sequence[str],
        variables: Sequence[Any],
    ) -> Route:
        """The route of these gradients, made once."""
        kept = self._residuals if self.low_rank is None else self.low_rank.residuals
        if self._agreed is None or self._agreed.communicator is not ring:
            self._agreed = AgreedPlans(ring, self._bucket_bytes)
            self._routes.clear()
            is_within = ring.transport == "shm" and ring not in _told
            if self._codec != "none" and is_within and ring.rank == 0:
                _told.add(ring)
                _log.warning(
                    "compression=%r changes nothing: all ranks are on one host, where gradients do "
                    "not travel.",
                    str(self._codec),
                )
        specs = tuple(map(_spec_of, gradients, paths))
        way = "eager" if tf.executing_eagerly() else "XLA" if xla.is_compiling() else "graph"
        key = specs, way, () if kept is None else tuple(map(id, variables))
        if key not in self._routes:
            over = ring.transport if way == "XLA" else None
            # In a job whose number of ranks changes, as at its start: newcomers know that alone.
            may_change = elastic_minimum() is not None and ring.parent is None
            count = ring.config.size if may_change else share_count(ring)
            plan = self._plan(specs, gradients, count, over)
            coded = None if self._residuals is None else self._residuals.of(plan, variables)
            thin = None if self.low_rank is None else LowRankReducer(self.low_rank, plan, variables)
            line, self.compares_rows_of = self.compares_rows_of, ""
            same = SameRows(ring, line) if line else None
            reducer = BucketReducer(plan, self._agreed, self._numerics, coded, thin, same)
            # The kernels are registered for floats (native/src/tf_ops.c).
            can_pack = all(gradients[number].dtype.is_floating for number in plan.present)
            is_native = way == "graph" and can_pack and ops.are_available()
            is_packed = plan.present and (is_native or way == "XLA")
            self._routes[key] = packed(reducer) if is_packed else in_python(reducer)
        return self._routes[key]

    def _plan(
        self,
        specs: tuple[GradientSpec, ...],
        gradients: Sequence[Any],
        ranks: int,
        compiled_over: str | None,
    ) -> BucketPlan:
        """The plan for these gradients; `compiled_over` is the transport if XLA compiles them.

        XLA lets a custom call keep its operands' memory, so a large gradient in it need not be
        packed. That is safe only in shared memory, which is released as soon as a call fails:
        libzmq may read pieces until its context ends.
        """
        present = [gradient.dtype for gradient in gradients if gradient is not None]
        for dtype in present:
            dtype_code(np.dtype(dtype.as_numpy_dtype))
        return BucketPlan.make(
            specs,
            {dtype.name: dtype.size for dtype in present},
            self._bucket_bytes,
            compiled=compiled_over is not None,
            in_place_bytes=_IN_PLACE_BYTES if compiled_over == "shm" else None,
            compression=str(self._codec),
            ranks=ranks,
        )


def _spec_of(gradient: Any, path: str) -> GradientSpec:
    if gradient is None:
        return GradientSpec(path, (), "", present=False)
    if not gradient.shape.is_fully_defined():
        text = f"got a gradient of unknown shape {gradient.shape} for {path}"
        raise ConfigError(text, remedy="Give the variable a fixed shape.")
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return GradientSpec(path, tuple(gradient.shape), gradient.dtype.name, sparse=is_sparse)
