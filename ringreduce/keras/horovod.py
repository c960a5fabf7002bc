"""Horovod's names with Horovod's meaning: ``import ringreduce.keras.horovod as hvd``.

It has everything of `ringreduce.keras` too. Collectives on tensors average by default, take
factors, and have Horovod's gradients:

                    ringreduce.keras                       here
    allgather       sum over all ranks of the own rows     mean of them
    broadcast       sum on the root, zeros elsewhere       mean on the root
    reducescatter   gathered; for means divided by size    size times that
    allreduce       the same allreduce                     the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.keras.advice import ABSENT
from ringreduce.tensorflow.variables import value_of
from ringreduce.vocabulary.types import ReduceOp

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_",
    "broadcast_object_fn",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "rank_op",
    "reducescatter",
    "size_op",
]

Average, Sum = ReduceOp.MEAN, ReduceOp.SUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

allgather_object = rr.all_gather_object


def allreduce(
    tensor: Any,
    *,
    op: ReduceOp | str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Any:
    """Reduce a tensor over all ranks, by default to the mean; `ringreduce.keras.all_reduce`.

    Args:
        tensor: as there; `tf.IndexedSlices` stay sparse.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: multiply each rank's tensor, and the result; for integers
            in float64, then rounded towards zero.
        name: not used.
    """
    return _scaled(rr.all_reduce(_scaled(tensor, prescale_factor), op), postscale_factor)


def grouped_allreduce(tensors: Sequence[Any], **options: Any) -> list[Any]:
    """`allreduce` of each of `tensors`, in their order."""
    return [allreduce(tensor, **options) for tensor in tensors]


def allgather(tensor: Any, name: str | None = None) -> Any:
    """Join the tensors of all ranks along the first dimension; `ringreduce.keras.all_gather`."""
    return rr.all_gather(_with_gradient_times(tensor, 1 / rr.size()))


def grouped_allgather(tensors: Sequence[Any], name: str | None = None) -> list[Any]:
    """`allgather` of each of `tensors`, in their order."""
    return [allgather(tensor) for tensor in tensors]


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """The tensor that rank `root_rank` passed, on every rank; `ringreduce.keras.broadcast`."""
    return rr.broadcast(_with_gradient_times(tensor, 1 / rr.size()), root_rank)


def reducescatter(
    tensor: Any,
    *,
    op: ReduceOp | str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Any:
    """Reduce as `allreduce`; each rank gets its rows; `ringreduce.keras.reduce_scatter`."""
    own = _with_gradient_times(_scaled(tensor, prescale_factor), float(rr.size()))
    return _scaled(rr.reduce_scatter(own, op), postscale_factor)


def grouped_reducescatter(tensors: Sequence[Any], **options: Any) -> list[Any]:
    """`reducescatter` of each of `tensors`, in their order."""
    return [reducescatter(tensor, **options) for tensor in tensors]


def broadcast_(variables: Sequence[Any], root_rank: int, name: str | None = None) -> list[Any]:
    """Give `variables` rank `root_rank`'s values, eagerly; return the values."""
    rr.broadcast_variables(variables, root_rank)
    return [tf.convert_to_tensor(value_of(variable)) for variable in variables]


def broadcast_object_fn(root_rank: int = 0, name: str | None = None) -> Callable[[Any], Any]:
    """A function that returns, on every rank, the object that rank `root_rank` passes to it."""
    return lambda value: rr.broadcast_object(value, root_rank)


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
