"""Plans of buckets: compared by all ranks before their first use, then reduced; on every route."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import (
    explain_by,
    membership_of,
    note_step,
    reduce_shares,
    shares,
)
from ringreduce.pure.buckets import BucketPlan, GradientSpec, first_difference
from ringreduce.pure.encodings import Coding, encoding_of
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow.agreement import Difference, agree
from ringreduce.tensorflow.low_rank import LowRankReducer
from ringreduce.tensorflow.numerics import NumericsCheck
from ringreduce.tensorflow.same_rows import SameRows
from ringreduce.vocabulary.errors import MismatchError
from ringreduce.vocabulary.types import ReduceOp

_OPERATION = "gradient reduction"
_REMEDY = (
    "All ranks must compute gradients for the same variables in each step: look for code that "
    "depends on the rank or on the data."
)


class AgreedPlans:
    """The plans that the ranks of a communicator, which calls `explain`, have found equal.

    In a ring that is formed anew they are compared anew: a comparison that the failure cut short
    may have ended well on some ranks alone.
    """

    def __init__(self, ring: Communicator, bucket_bytes: int) -> None:
        self.communicator, self._bucket_bytes = ring, bucket_bytes
        self._plans: dict[int, BucketPlan] = {}
        self._epoch = membership_of(ring).epoch
        self._latest: BucketPlan | None = None
        self._comparing: BucketPlan | None = None
        explain_by(ring, self)

    def require(self, plan: BucketPlan) -> None:
        """Compare a plan with every rank's before its first use; on all ranks MismatchError."""
        ring = self.communicator
        epoch = membership_of(ring).epoch
        if self._epoch != epoch:
            self._epoch, self._plans = epoch, {}
        if plan.signature in self._plans:
            return
        gradients = [(g.path, g.shape, g.dtype, g.present, g.sparse) for g in plan.gradients]
        buckets = f"{plan.describe_buckets()} (bucket_bytes={self._bucket_bytes})"
        description = [gradients, plan.signature, buckets]

        def difference(_: int, __: Any, peer: int, theirs: Any) -> Difference | None:
            specs = [GradientSpec(path, tuple(shape), *rest) for path, shape, *rest in theirs[0]]
            what, pair = "gradients", first_difference(plan.gradients, specs)
            if pair is None and theirs[1] != plan.signature:
                what, pair = "buckets of gradients", (buckets, theirs[2])
            if pair is None:
                return None
            text = f"has other {what} than rank {peer}: here {pair[0]}; there {pair[1]}"
            return Difference(peer, text, _REMEDY)

        self._comparing = plan
        try:
            agree(ring, description, difference, _OPERATION, signature_of("gradients"))
        finally:
            self._comparing = None
        self._plans[plan.signature] = self._latest = plan

    def explain(self, error: MismatchError) -> MismatchError | None:
        """Explain `error`, of ranks in different calls, by their gradients; None if it cannot."""
        if self._comparing is not None and self._latest is not None:
            # Only this rank's plan changed; the others use that of the step before.
            if (pair := _difference(self._comparing, self._latest)) is None:
                return None
            text = (
                f"has gradients that changed since the last step, from {pair[1]} to {pair[0]}, "
                f"while rank {error.peer} goes on as before"
            )
        else:
            # All ranks know both plans, and use different ones in this step.
            ours, theirs = map(self._plans.get, error.signatures)
            if ours is None or theirs is None or ours is theirs:
                return None
            described = ours.describe_buckets(), theirs.describe_buckets()
            here, there = _difference(ours, theirs) or described
            text = (
                f"has other gradients than rank {error.peer} in this step: here {here}; "
                f"there {there}"
            )
        return replace(
            error, message=text, operation=_OPERATION, sequence=None, step=None, remedy=_REMEDY
        )


def _difference(ours: BucketPlan, theirs: BucketPlan) -> tuple[str, str] | None:
    difference = first_difference(ours.gradients, theirs.gradients)
    if difference is None and ours.compiled != theirs.compiled:
        difference = ours.describe_buckets(), theirs.describe_buckets()
    return difference


class BucketReducer:
    """Reduces the buckets of one plan in place, in the thread that calls it.

    `residuals` returns those of a bucket, if they are kept; `thin` reduces buckets for `PowerSGD`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        agreed: AgreedPlans,
        numerics: NumericsCheck,
        residuals: Callable[[int], np.ndarray] | None = None,
        thin: LowRankReducer | None = None,
        same_rows: SameRows | None = None,
    ) -> None:
        self.communicator, self._agreed = agreed.communicator, agreed
        self._encodes = plan.compression != "none" and self.communicator.transport != "shm"
        self._residuals, self._thin = residuals, thin if self._encodes else None
        self.plan, self.numerics, self._same_rows = plan, numerics, same_rows
        self._begun_s: float | None = None  # when the latest step was
        self._parts = [
            [(plan.gradients[slot.gradient], slot.start, None) for slot in bucket.slots]
            for bucket in plan.buckets
        ]

    def begin_step(self) -> None:
        """Begin a step: `require` that all ranks have this plan."""
        now = time.monotonic()
        if self._begun_s is not None:
            note_step(self.communicator, self._begun_s, now)
        self._begun_s = now
        self._agreed.require(self.plan)
        self.numerics.begin_step()
        if self._thin is not None:
            self._thin.begin_step()

    def reduce(self, bucket: int, values: np.ndarray) -> None:
        """Replace a bucket's contiguous `values`, of shape (count,), with their mean; in order."""
        parts = self._parts[bucket]
        if self._same_rows is not None and bucket == 0 and self._same_rows.see(values):
            self._same_rows = None
        self.numerics.check_own(self.communicator, values, parts)
        encodes = self._encodes and values.dtype == np.float32
        if encodes and self._thin is not None:
            self._thin.reduce(bucket, values, self._mean)
        else:
            self._mean(values, self._coding(bucket) if encodes else None)
        compression = self.plan.compression if encodes else "none"
        self.numerics.check_mean(self.communicator, values, parts, compression)

    def scatter(self, bucket: int, values: np.ndarray) -> None:
        """Reduce as `reduce` does, but only this rank's share of `values` becomes its mean."""
        ring, parts = self.communicator, self._parts[bucket]
        self.numerics.check_own(ring, values, parts)
        reduce_shares(ring, values, self.plan.signature)
        own = shares(ring, values.size, values.itemsize)[ring.rank]
        self.numerics.check_mean(ring, values, parts, own=own)

    def _mean(self, values: np.ndarray, coding: Coding | None = None) -> None:
        signature = self.plan.signature
        self.communicator.all_reduce(values, ReduceOp.MEAN, signature=signature, coding=coding)

    def _coding(self, bucket: int) -> Coding:
        residuals = None if self._residuals is None else self._residuals(bucket)
        return Coding(encoding_of(self.plan.compression), residuals)
