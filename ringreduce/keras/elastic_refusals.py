"""What elastic training refuses, since a loss would spoil it: one table, which the guide prints."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.normalization import SyncBatchNormalization
from ringreduce.keras.parts.part import parts_in
from ringreduce.keras.private import layers_of
from ringreduce.keras.strategies import EveryStep
from ringreduce.tensorflow.variables import path_of
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp
from ringreduce.vocabulary.words import named


class Refused(NamedTuple):
    """What is refused, the fact by which it is found, that fact's allowed values, and a remedy."""

    what: str
    fact: str
    allowed: Sequence[Any]
    remedy: str


TABLE = [
    Refused(*row)
    for row in (
        ("several optimizers", "distributed optimizers", [1], "one `rr.DistributedOptimizer`"),
        (
            *("`LocalSGD` and other strategies, `accumulate_steps`", "strategy", [EveryStep()]),
            "larger batches",
        ),
        (
            *("int8 and `PowerSGD`", "compression", ["none", "fp16", "bf16"]),
            '`compression="bf16"` or `"fp16"`',
        ),
        ('`op="sum"`', "op", [ReduceOp.MEAN], '`op="mean"`'),
        ("local variables", "local_variables", [0], "variables that all ranks share"),
        (
            *("`ShardedEmbedding`, `PartLayer`, split layers", "variables in pieces", [""]),
            "whole layers, such as `keras.layers.Embedding`",
        ),
        (
            *("`rr.SyncBatchNormalization`", "SyncBatchNormalization", [False]),
            "`keras.layers.BatchNormalization`",
        ),
        ("groups of ranks", "a group of ranks", [False], "all ranks of the job"),
        ("`steps_per_execution` above 1", "steps_per_execution", [1], "`steps_per_execution=1`"),
        (
            "a `train_step` of your own with `jit_compile=True`",
            *("a train_step of its own with jit_compile", [False], "`jit_compile=False`"),
        ),
        (
            "a `train_step` that updates weights several times, or never",
            *("updates in one train_step", [1], "one `apply` in each `train_step`"),
        ),
        ("`sharded=True`", "sharded", [False], "the whole data on all ranks"),
        ("`batch_share`", "batch_share", ["equal"], '`batch_share="equal"`'),
        (
            *("callbacks that not all ranks have", "callbacks", [""]),
            "the same callbacks on all ranks; `rr.callbacks.OnRankZero` has one act on rank 0 only",
        ),
        (
            *("`rr.elastic.run` around `rr.fit`", "rr.elastic.run around rr.fit", [False]),
            "`rr.fit` alone",
        ),
        (
            *("`model.fit`, and loops of your own", "steps that rr.fit does not make", [False]),
            "`rr.fit`, or a loop within `rr.elastic.run`",
        ),
    )
]


def refuse(ring: Communicator, *trainings: Mapping[str, Any]) -> None:
    """ConfigError if a fact of `trainings`, by its name in the table, is none that it allows."""
    given = [{"a group of ranks": ring.parent is not None}, *trainings]
    found = [
        (row.fact if one[row.fact] is True else f"{row.fact}={one[row.fact]}", row.remedy)
        for row in TABLE
        for one in given
        if row.fact in one and one[row.fact] not in row.allowed
    ]
    if found:
        texts, remedies = zip(*found, strict=True)
        raise ConfigError(
            f"could not go on if a rank was lost: has {', '.join(texts)}",
            **ring.config.who,
            remedy="Leave --elastic and RINGREDUCE_ELASTIC out; or use "
            f"{'; '.join(dict.fromkeys(remedies)).replace('`', '')}.",
        )


def facts_of(model: Any, variables: Sequence[Any] = ()) -> dict[str, Any]:
    """What the table wants to know of variables, and a model if it is not None."""
    layers, weights = ([], []) if model is None else (layers_of(model), model.weights)
    return {
        "variables in pieces": ", ".join(map(path_of, parts_in([*weights, *variables])[:1])),
        "SyncBatchNormalization": any(isinstance(one, SyncBatchNormalization) for one in layers),
    }


def differing(ring: Communicator, callbacks: Sequence[Any]) -> str:
    """Which ranks have which `callbacks`; empty if all have the same. Collective."""
    ranks: dict[str, list[int]] = {}
    own = ", ".join(type(getattr(one, "callback", one)).__name__ for one in callbacks)
    for rank, names in enumerate(ring.all_gather_object(own or "none")):
        ranks.setdefault(names, []).append(ring.members[rank])
    each = [f"{named('rank', which)}: {names}" for names, which in ranks.items()]
    return f"({'; '.join(each)})" if each[1:] else ""
