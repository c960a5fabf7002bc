"""Refusals of elastic training, which a loss would spoil: one table, which the guide prints."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.layers.normalization import SyncBatchNormalization
from ringreduce.keras.layers.part import parts_in
from ringreduce.keras.private import layers_of
from ringreduce.keras.strategies.base import EveryStep
from ringreduce.tensorflow.variables import path_of
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp
from ringreduce.vocabulary.words import named


class Row(NamedTuple):
    """One refusal; the fact that tells, and its allowed values; the remedy."""

    what: str
    fact: str
    allowed: Sequence[Any]
    remedy: str


_PIECES = "variables in pieces"
_EQUAL = "the same callbacks on all ranks; in `rr.callbacks.OnRankZero` one acts on rank 0 only"
TABLE = (
    Row("several optimizers", "distributed optimizers", [1], "one `rr.DistributedOptimizer`"),
    Row("accumulation, `LocalSGD`, `DiLoCo`", "strategy", [EveryStep()], "larger batches"),
    Row("int8 and `PowerSGD`", "compression", ["none", "fp16", "bf16"], '`compression="bf16"`'),
    Row('`op="sum"`', "op", [ReduceOp.MEAN], '`op="mean"`'),
    Row("local variables", "local_variables", [0], "variables that all ranks share"),
    Row("`ShardedEmbedding`, `PartLayer`, split layers", _PIECES, [""], "whole layers"),
    Row("`rr.SyncBatchNormalization`", "SyncBatchNormalization", [False], "`BatchNormalization`"),
    Row("groups of ranks", "a group of ranks", [False], "all ranks of the job"),
    Row("a `fit` of another package", "fit of another package", [False], "its callback"),
    Row("`steps_per_execution` above 1", "steps_per_execution", [1], "`steps_per_execution=1`"),
    Row("a `train_step` of yours in XLA", "own train_step in XLA", [False], "`jit_compile=False`"),
    Row("several updates in a `train_step`, or none", "updates in a step", [1], "one in each step"),
    Row("`per_rank_data=True`", "per_rank_data", [False], "the whole data on all ranks"),
    Row("`batch_share`", "batch_share", ["equal"], "equal shares"),
    Row(
        "`compile` in a callback", "compile in training", [False], "an `rr.fit` before and after it"
    ),
    Row("callbacks that not all ranks have", "callbacks", [""], _EQUAL),
    Row("`rr.elastic.run` around `rr.fit`", "rr.elastic.run around it", [False], "`rr.fit` alone"),
    Row("`model.fit`, other loops", "steps of another loop", [False], "`rr.fit`, `rr.elastic.run`"),
)


def refuse(ring: Communicator, *trainings: Mapping[str, Any]) -> None:
    """ConfigError if a fact of `trainings`, by its name in the table, is none that it allows."""
    facts = [{"a group of ranks": ring.parent is not None}, *trainings]
    refused = [
        (row.fact if (value := fact[row.fact]) is True else f"{row.fact}={value}", row.remedy)
        for row in TABLE
        for fact in facts
        if fact.get(row.fact, row.allowed[0]) not in row.allowed
    ]
    if refused:
        texts, remedies = map("; ".join, zip(*refused, strict=True))
        text = f"could not go on if a rank was lost: has {texts}"
        remedy = f"Leave --elastic and RINGREDUCE_ELASTIC out; or use {remedies.replace('`', '')}."
        raise ConfigError(text, **ring.config.who, remedy=remedy)


def facts_of(model: Any, variables: Sequence[Any] = ()) -> dict[str, Any]:
    """Collect the facts for the table from variables, and a model if it is not None."""
    layers, weights = ([], []) if model is None else (layers_of(model), model.weights)
    return {
        _PIECES: ", ".join(map(path_of, parts_in([*weights, *variables])[:1])),
        "SyncBatchNormalization": any(
            isinstance(layer, SyncBatchNormalization) for layer in layers
        ),
    }


def differing(ring: Communicator, callbacks: Sequence[Any]) -> str:
    """Which ranks have which `callbacks`; empty if all have the same. Collective."""
    ranks: dict[str, list[int]] = {}
    plain = [getattr(callback, "callback", callback) for callback in callbacks]
    listed = ", ".join(type(callback).__name__ for callback in plain)
    for rank, names in enumerate(ring.all_gather_object(listed or "none")):
        ranks.setdefault(names, []).append(ring.members[rank])
    lines = [f"{named('rank', which)}: {names}" for names, which in ranks.items()]
    return f"({'; '.join(lines)})" if lines[1:] else ""
