"""Reduces the buckets of a step, on every route."""

from __future__ import annotations

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.buckets import BucketPlan
from ringreduce.tensorflow.numerics import NumericsCheck, Values
from ringreduce.tensorflow.plans import AgreedPlans
from ringreduce.vocabulary.types import ReduceOp


class BucketReducer:
    """Reduces the buckets of one plan in place, in the thread that calls it."""

    def __init__(
        self,
        communicator: Communicator,
        plan: BucketPlan,
        agreed: AgreedPlans,
        numerics: NumericsCheck,
    ) -> None:
        self.communicator, self.plan, self.numerics = communicator, plan, numerics
        self._agreed = agreed
        self._parts = [
            [(plan.gradients[slot.gradient], slot.start, None) for slot in bucket.slots]
            for bucket in plan.buckets
        ]

    def begin_step(self) -> None:
        """Begin a step; compares the plan with every rank's before its first use.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        self._agreed.require(self.communicator, self.plan)
        self.numerics.begin_step()

    def reduce(self, bucket: int, values: np.ndarray) -> None:
        """Replace a bucket's `values` with their mean; every rank reduces buckets in order.

        `values` has the shape (count,), is contiguous, and has the bucket's dtype.

        Raises:
            RingReduceError: as `Communicator.all_reduce`; NumericsError as `NumericsCheck`.
        """
        looked_at = Values(values, self._parts[bucket])
        self.numerics.check_own(self.communicator, looked_at)
        self.communicator.all_reduce(values, ReduceOp.MEAN, signature=self.plan.signature)
        self.numerics.check_mean(self.communicator, looked_at)
