"""Horovod's names with Horovod's meaning: ``import ringreduce.keras.horovod as hvd``.

It has everything of `ringreduce.keras` too. Collectives on tensors average by default, take
factors, and have Horovod's gradients:

                    ringreduce.keras                       here
    allgather       sum over all ranks of the own rows     mean of them
    broadcast       sum on the root, zeros elsewhere       mean on the root
    reducescatter   gathered; for means divided by size    size times that
    allreduce       the same allreduce                     the same
    alltoall        the same alltoall, back                the same

With a `process_set` this is about its ranks. A `root_rank` is always a rank of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.advice import ABSENT
from ringreduce.keras.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from ringreduce.tensorflow.variables import value_of
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp

__all__ = [
    "Average",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "local_rank_op",
    "local_size_op",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "size_op",
]

Average, Sum = ReduceOp.MEAN, ReduceOp.SUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def init(process_sets: Sequence[ProcessSet] = (), **settings: Any) -> Communicator:
    """`ringreduce.init`, then `add_process_set` of each of `process_sets`."""
    ring = rr.init(**settings)
    for process_set in process_sets:
        add_process_set(process_set)
    return ring


def DistributedOptimizer(
    optimizer: Any, *, process_set: ProcessSet = global_process_set, **options: Any
) -> Any:
    """`ringreduce.keras.DistributedOptimizer` with its `options`."""
    return rr.DistributedOptimizer(optimizer, _unless_global(process_set), **options)


def DistributedGradientTape(
    tape: Any = None, *, process_set: ProcessSet = global_process_set, **options: Any
) -> Any:
    """`ringreduce.keras.DistributedGradientTape` with its `options`."""
    return rr.DistributedGradientTape(tape, _unless_global(process_set), **options)


def SyncBatchNormalization(*, process_set: ProcessSet = global_process_set, **options: Any) -> Any:
    """`ringreduce.keras.SyncBatchNormalization` with its `options`."""
    return rr.SyncBatchNormalization(communicator=_unless_global(process_set), **options)


def allreduce(
    tensor: Any,
    *,
    op: ReduceOp | str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over all ranks, by default to the mean; `ringreduce.keras.all_reduce`.

    Args:
        tensor: as there; `tf.IndexedSlices` stay sparse.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: multiply each rank's tensor, and the result; for integers
            in float64, then rounded towards zero.
        name: not used.
        process_set: the ranks that take part.
    """
    scaled, ring = _scaled(tensor, prescale_factor), process_set.communicator
    return _scaled(rr.all_reduce(scaled, op, ring), postscale_factor)


def grouped_allreduce(tensors: Sequence[Any], **options: Any) -> list[Any]:
    """`allreduce` of each of `tensors`, in their order."""
    return [allreduce(tensor, **options) for tensor in tensors]


def allgather(
    tensor: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Join the tensors of all ranks along the first dimension; `ringreduce.keras.all_gather`."""
    ring = process_set.communicator
    return rr.all_gather(_with_gradient_times(tensor, 1 / ring.size), ring)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of each of `tensors`, in their order."""
    return [allgather(tensor, process_set=process_set) for tensor in tensors]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of `tensor` to each rank; `ringreduce.keras.all_to_all`.

    Args:
        splits: rows for each rank, as `counts` there.

    Returns:
        The rows that came; with `splits` also how many came from each rank, int32.
    """
    found = rr.all_to_all(tensor, splits, communicator=process_set.communicator)
    if splits is None:
        return found
    rows, received = found
    return rows, tf.cast(received, tf.int32)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor that rank `root_rank` passed, on every rank; `ringreduce.keras.broadcast`."""
    ring = process_set.communicator
    root = _root_in(process_set, root_rank)
    return rr.broadcast(_with_gradient_times(tensor, 1 / ring.size), root, ring)


def reducescatter(
    tensor: Any,
    *,
    op: ReduceOp | str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce as `allreduce`; each rank gets its rows; `ringreduce.keras.reduce_scatter`."""
    ring = process_set.communicator
    own = _with_gradient_times(_scaled(tensor, prescale_factor), float(ring.size))
    return _scaled(rr.reduce_scatter(own, op, ring), postscale_factor)


def grouped_reducescatter(tensors: Sequence[Any], **options: Any) -> list[Any]:
    """`reducescatter` of each of `tensors`, in their order."""
    return [reducescatter(tensor, **options) for tensor in tensors]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, *, process_set: ProcessSet = global_process_set
) -> None:
    """Give `variables` rank `root_rank`'s values; `ringreduce.keras.broadcast_variables`."""
    ring = process_set.communicator
    rr.broadcast_variables(variables, _root_in(process_set, root_rank), ring)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give `variables` rank `root_rank`'s values, eagerly; return the values."""
    broadcast_variables(variables, root_rank, process_set=process_set)
    return [tf.convert_to_tensor(value_of(variable)) for variable in variables]


def broadcast_object(
    value: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object that rank `root_rank` passed, on every rank."""
    ring = process_set.communicator
    return ring.broadcast_object(value, _root_in(process_set, root_rank))


def broadcast_object_fn(
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that returns, on every rank, the object that rank `root_rank` passes to it."""
    return lambda value: broadcast_object(value, root_rank, process_set=process_set)


def allgather_object(
    value: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects that all ranks passed, in rank order."""
    return process_set.communicator.all_gather_object(value)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank has called it."""
    process_set.communicator.barrier()


def rank_op(name: str | None = None) -> Any:
    """This rank, as a scalar int32 tensor."""
    return tf.constant(rr.rank(), name=name)


def size_op(name: str | None = None) -> Any:
    """The number of ranks, as a scalar int32 tensor."""
    return tf.constant(rr.size(), name=name)


def local_rank_op(name: str | None = None) -> Any:
    """This rank's number on its host, as a scalar int32 tensor."""
    return tf.constant(rr.local_rank(), name=name)


def local_size_op(name: str | None = None) -> Any:
    """The number of ranks on this host, as a scalar int32 tensor."""
    return tf.constant(rr.local_size(), name=name)


def __getattr__(name: str) -> Any:
    return _is_absent if name in ABSENT else getattr(rr, name)


def _is_absent() -> bool:
    """False: ringreduce is built with none of Horovod's transports."""
    return False


def _unless_global(process_set: ProcessSet) -> Communicator | None:
    """The group; None for all ranks, whose communicator need not exist yet."""
    return None if process_set is global_process_set else process_set.communicator


def _root_in(process_set: ProcessSet, root_rank: int) -> int:
    """The number of a rank of the job within the set."""
    if root_rank not in process_set.ranks:
        raise ConfigError(
            f"got root_rank {root_rank}, which is not in {process_set}",
            **process_set.communicator.config.who,
            remedy="Pass a rank of the job that is in it.",
        )
    return process_set.ranks.index(root_rank)


def _scaled(tensor: Any, factor: float) -> Any:
    if factor == 1.0:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        values = _scaled(tensor.values, factor)
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    value = tf.convert_to_tensor(tensor)
    if value.dtype.is_floating:
        return value * tf.cast(factor, value.dtype)
    return tf.cast(tf.cast(value, tf.float64) * factor, value.dtype)


def _with_gradient_times(tensor: Any, factor: float) -> Any:
    """`tensor`, whose gradient is multiplied by `factor`."""

    @tf.custom_gradient
    def same(value: Any) -> Any:
        return tf.identity(value), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

    return same(tf.convert_to_tensor(tensor))
