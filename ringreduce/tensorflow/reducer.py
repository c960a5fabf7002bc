"""How the buckets of a step get from all ranks to all ranks, whichever route they take there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.buckets import BucketPlan, GradientSpec, first_difference
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow.agreement import Difference, agree
from ringreduce.tensorflow.numerics import NumericsCheck
from ringreduce.vocabulary.errors import MismatchError
from ringreduce.vocabulary.types import ReduceOp

__all__ = ["AgreedPlans", "Reducer"]

_OPERATION = "gradient reduction"
_REMEDY = (
    "All ranks must compute gradients for the same variables in each step: look for code that "
    "depends on the rank or on the data."
)


class Reducer:
    """Reduces the buckets of one plan in place, in the thread that calls it.

    Args:
        communicator: whose ranks.
        plan: what lies in each bucket.
        agreed: the plans that its ranks have compared.
        numerics: looks at each bucket before it is reduced, and after.
        before: called first in each step.
    """

    def __init__(
        self,
        communicator: Communicator,
        plan: BucketPlan,
        agreed: AgreedPlans,
        numerics: NumericsCheck,
        before: Callable[[], None],
    ) -> None:
        self.communicator, self.plan, self.numerics = communicator, plan, numerics
        self._agreed, self._before = agreed, before

    def begin_step(self) -> None:
        """Compare the plan with every rank's before its first use; once in each step.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        self._before()
        self._agreed.require(self.communicator, self.plan)
        self.numerics.begin_step()

    def reduce(self, bucket: int, values: np.ndarray) -> None:
        """Replace a bucket's `values` with their mean over all ranks.

        Args:
            bucket: its place in the plan; every rank reduces them in order.
            values: shape (count,), contiguous, of the bucket's dtype.

        Raises:
            RingReduceError: as `Communicator.all_reduce`; NumericsError as `NumericsCheck`.
        """
        self.numerics.check_own(self.communicator, self.plan, bucket, values)
        self.communicator.all_reduce(values, ReduceOp.MEAN, signature=self.plan.signature)
        self.numerics.check_mean(self.communicator, self.plan, bucket, values)


class AgreedPlans:
    """The plans that the ranks of a communicator have compared and found alike.

    Args:
        communicator: asks `explain` when ranks are seen to be in different calls. It keeps only a
            weak reference.
        bucket_bytes: what the plans were made with, for messages.
    """

    def __init__(self, communicator: Communicator, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._plans: dict[int, BucketPlan] = {}
        self._latest: BucketPlan | None = None
        self._comparing: BucketPlan | None = None
        communicator.explain_with(self.explain)

    def require(self, communicator: Communicator, plan: BucketPlan) -> None:
        """Compare a plan with that of every rank, before its first use.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        if plan.signature in self._plans:
            return
        own = {
            "gradients": [(g.path, g.shape, g.dtype, g.present, g.sparse) for g in plan.gradients],
            "signature": plan.signature,
            "buckets": f"{plan.describe_buckets()} (bucket_bytes={self._bucket_bytes})",
        }

        def compare(gathered: list[dict[str, object]]) -> Difference | None:
            for peer, theirs in enumerate(gathered):
                specs = [
                    GradientSpec(path, tuple(shape), *rest)
                    for path, shape, *rest in theirs["gradients"]  # type: ignore[attr-defined]
                ]
                what, found = "gradients", first_difference(plan.gradients, specs)
                if found is None and theirs["signature"] != plan.signature:
                    what = "buckets of gradients"
                    found = str(own["buckets"]), str(theirs["buckets"])
                if found is not None:
                    text = f"has other {what} than rank {peer}: here {found[0]}; there {found[1]}"
                    return Difference(peer, text, _REMEDY)
            return None

        self._comparing = plan
        try:
            agree(communicator, own, compare, _OPERATION, signature_of("gradients"))
        finally:
            self._comparing = None
        self._plans[plan.signature] = self._latest = plan

    def explain(self, error: MismatchError) -> MismatchError | None:
        """What `error`, of ranks in different calls, means for gradients; None: nothing."""
        if self._comparing is not None and self._latest is not None:
            # The others go on with the plan of the step before: only this rank's changed.
            if (found := _difference(self._comparing, self._latest)) is None:
                return None
            text = (
                f"has gradients that changed since the last step, from {found[1]} to {found[0]}, "
                f"while rank {error.peer} goes on as before"
            )
        else:
            # All have used both plans before, and do not now use the same.
            ours, theirs = map(self._plans.get, error.signatures)
            if ours is None or theirs is None or ours is theirs:
                return None
            here, there = _difference(ours, theirs) or _buckets(ours, theirs)
            text = (
                f"has other gradients than rank {error.peer} in this step: here {here}; "
                f"there {there}"
            )
        return MismatchError(
            text,
            rank=error.rank,
            size=error.size,
            peer=error.peer,
            operation=_OPERATION,
            remedy=_REMEDY,
        )


def _difference(ours: BucketPlan, theirs: BucketPlan) -> tuple[str, str] | None:
    found = first_difference(ours.gradients, theirs.gradients)
    if found is None and ours.compiled != theirs.compiled:
        found = _buckets(ours, theirs)
    return found


def _buckets(ours: BucketPlan, theirs: BucketPlan) -> tuple[str, str]:
    return ours.describe_buckets(), theirs.describe_buckets()
