"""The learning rates of all ranks, which must be equal."""

from collections.abc import Mapping, Sequence
from typing import Any

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow.agreement import Difference
from ringreduce.tensorflow.variables import differing


def kept_rates(model: Any) -> list[float]:
    """The learning rates that a `DistributedOptimizer` keeps equal on all ranks in each step."""
    equal_now = getattr(model.optimizer, "equal_now", None)
    return list(map(float, equal_now(rates_of(model)))) if equal_now else []


def diverged(model: Any, rates: Sequence[list[float]], ring: Communicator) -> Difference | None:
    """Which ranks, of whose `kept_rates` some differ, have other weights by now. Collective."""
    unlike = unlike_rates(dict(zip(ring.members, rates, strict=True)))
    trained = model.optimizer.equal_now(model.trainable_variables) if unlike else []
    if unlike is None or not differing(trained, ring):
        return None  # A callback may have set them just now, at the end of the epoch.
    return unlike._replace(text=f"found that weights have gone apart: {unlike.text}")


def unlike_rates(rates: Mapping[int, list[float]]) -> Difference | None:
    """Which ranks have other learning rates, of `kept_rates` by rank; None: none."""
    (first, ours), *others = rates.items()
    unlike = [(rank, theirs) for rank, theirs in others if theirs != ours]
    if not unlike:
        return None
    rank, theirs = unlike[0]
    here, there = (", ".join(f"{rate:g}" for rate in one) for one in (ours, theirs))
    return Difference(
        rank,
        f"the learning rate is {here} on rank {first} and {there} on rank {rank}",
        "Set it alike on all ranks: give each of them the callback that does, and let it not look "
        "at the rank. What is set when an epoch ends is made rank 0's on all, in rr.fit and in "
        "rr.callbacks.Together.",
    )


def rates_of(model: Any) -> list[Any]:
    """The learning rates of the optimizer of `model` that are variables."""
    variables = getattr(model.optimizer, "variables", ())
    return [variable for variable in variables if variable.name == "learning_rate"]
