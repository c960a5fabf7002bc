"""Collectives on tensors that reduce, gather or copy: eagerly and in `tf.function`, with gradients.

They run in program order (`ringreduce.tensorflow.order`), including those of the backward pass and
of the bridge; nothing travels while tracing. One of a backward pass carries the number of the one
whose gradient it is (`ringreduce.tensorflow.differentiable`).

The gradient of a collective is a collective, for a loss that is the sum of all ranks' losses; the
mean of these gradients over the ranks, as of `DistributedOptimizer`, is that of the mean loss.
`ringreduce.keras.tensors` says which it is. Of those that only move rows it moves them back.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.payload import bounds_of, checked_counts, checked_root
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.tensorflow import xla
from ringreduce.tensorflow.differentiable import NONE, Sign, checked, collective
from ringreduce.vocabulary.errors import ArrayError, ConfigError
from ringreduce.vocabulary.types import ReduceOp, reduce_op


def all_reduce(
    tensor: Any, ring: Communicator, op: ReduceOp | str = ReduceOp.SUM, of: Any = NONE
) -> Any:
    """`ringreduce.keras.all_reduce` of one tensor; `of` as for `collective`."""
    how, value = reduce_op(op), checked(tensor)

    def run(array: np.ndarray, sign: Sign) -> Any:
        signature = sign("all_reduce of a tensor", array.shape)
        return ring.all_reduce(array, how, signature=signature)

    def gradient(upstream: Any, number: Any) -> Any:
        _require_gradient(ring, "all_reduce", how)
        return all_reduce(upstream, ring, how, number)

    return collective(ring, "reduce a tensor", run, gradient, value, value.shape, of=of)


def all_gather(
    tensor: Any, ring: Communicator, *, counts: Sequence[int] | None = None, of: Any = NONE
) -> Any:
    """`ringreduce.keras.all_gather`; its gradient need not exchange known `counts` of rows."""
    value = checked(tensor)
    if value.shape.rank == 0:
        value = tf.reshape(value, (1,))
    known = None if counts is None else list(counts)
    if known is None and xla.is_compiling() and value.shape[0] is not None:
        known = [value.shape[0]] * ring.size

    def run(array: np.ndarray, sign: Sign) -> Any:
        return ring.all_gather(array, signature=sign("all_gather of tensors"))

    shape = tf.TensorShape([sum(known) if known else None]).concatenate(value.shape[1:])

    def gradient(upstream: Any, number: Any) -> Any:
        rows = tf.shape(value, out_type=tf.int64)[0]
        lengths = known or all_gather(rows, ring, of=number)
        rows = _own_rows(upstream, ring, ReduceOp.SUM, lengths, number)
        return tf.ensure_shape(rows, value.shape)

    return collective(ring, "gather tensors", run, gradient, value, shape, of=of)


def broadcast(tensor: Any, ring: Communicator, root: int) -> Any:
    """`ringreduce.keras.broadcast`."""
    source, value = checked_root(root, ring.size, ring.config.who), checked(tensor)

    def run(array: np.ndarray, sign: Sign) -> Any:
        signature = sign("broadcast of a tensor", array.shape)
        return ring.broadcast(array, source, signature=signature)

    def gradient(upstream: Any, number: Any) -> Any:
        total = all_reduce(upstream, ring, of=number)
        # A choice, not a condition: all ranks must compute gradients of gradients too.
        return tf.where(ring.rank == source, total, tf.zeros_like(total))

    return collective(ring, "broadcast a tensor", run, gradient, value, value.shape)


def reduce_scatter(tensor: Any, ring: Communicator, op: ReduceOp | str) -> Any:
    """`ringreduce.keras.reduce_scatter`."""
    how, value = reduce_op(op), _with_rows(tensor, ring, "reduce_scatter")
    rows = value.shape[0] if value.shape.rank else None
    counts = None if rows is None else np.diff(chunk_bounds(rows, ring.size)).tolist()
    return _own_rows(value, ring, how, counts)


def all_to_all(tensor: Any, ring: Communicator, of: Any = NONE) -> Any:
    """`ringreduce.keras.all_to_all` of equal parts."""
    value = _with_rows(tensor, ring, "all_to_all")
    if value.shape.rank and value.shape[0] is not None:
        checked_counts(None, value.shape[0], ring.size, ring.config.who)

    def run(array: np.ndarray, sign: Sign) -> Any:
        signature = sign("all_to_all of a tensor", array.shape)
        return ring.all_to_all(array, signature=signature)

    def gradient(upstream: Any, number: Any) -> Any:
        return all_to_all(upstream, ring, number)

    return collective(ring, "exchange parts", run, gradient, value, value.shape, of=of)


def all_to_all_uneven(tensor: Any, ring: Communicator, counts: Any, of: Any = NONE) -> Any:
    """`ringreduce.keras.all_to_all` with `counts`: the rows, and how many came from each rank."""
    value = _with_rows(tensor, ring, "all_to_all")
    lengths = tf.convert_to_tensor(counts)
    if not lengths.dtype.is_integer or not lengths.shape.is_compatible_with([ring.size]):
        text = f"all_to_all got counts of dtype {lengths.dtype.name} and shape {lengths.shape}"
        remedy = f"Pass {ring.size} whole numbers, the rows for each rank."
        raise ArrayError(text, **ring.config.who, remedy=remedy)
    if xla.is_compiling():
        raise ConfigError(
            "cannot exchange parts with counts inside a function compiled with jit_compile=True, "
            "which fixes all shapes: how many rows arrive is known only when it runs",
            **ring.config.who,
            remedy="Leave counts out and pad all parts to one length, or leave jit_compile=True "
            "out of the function that exchanges them.",
        )

    def run(array: np.ndarray, counts: np.ndarray, sign: Sign) -> Any:
        signature = sign("all_to_all of tensors")
        rows, received = ring.all_to_all(array, counts.tolist(), signature=signature)
        return rows, np.array(received, np.int64)

    def gradient(upstream: Any, number: Any, received: Any) -> Any:
        rows, _ = all_to_all_uneven(upstream, ring, received, number)
        return tf.ensure_shape(rows, value.shape)

    shape = tf.TensorShape([None]).concatenate(value.shape[1:])
    more = [((ring.size,), tf.int64)]
    lengths = tf.cast(lengths, tf.int64)
    what = "exchange parts"
    return collective(ring, what, run, gradient, value, shape, lengths, more=more, of=of)


def _own_rows(tensor: Any, ring: Communicator, op: ReduceOp, counts: Any, of: Any = NONE) -> Any:
    """This rank's rows of the reduced tensor; rank r has ``counts[r]``, a list or a tensor.

    None: rows are not known before it runs; all ranks get the same number, or one more.
    """
    known = counts if isinstance(counts, list) else None
    others = [] if counts is None else [tf.convert_to_tensor(counts, tf.int64)]

    def run(array: np.ndarray, *more: Any) -> np.ndarray:
        *lengths, sign = more
        rows = array.shape[0]
        bounds = bounds_of(lengths[0].tolist()) if lengths else chunk_bounds(rows, ring.size)
        return _reduce_rows(ring, array, bounds, op, sign)

    def gradient(upstream: Any, number: Any) -> Any:
        _require_gradient(ring, "reduce_scatter", op)
        joined = all_gather(upstream, ring, counts=known, of=number)
        joined = tf.ensure_shape(joined, tensor.shape)
        return joined / ring.size if op is ReduceOp.MEAN else joined

    shape = tf.TensorShape([known and known[ring.rank]]).concatenate(tensor.shape[1:])
    return collective(ring, "reduce a tensor", run, gradient, tensor, shape, *others, of=of)


def _reduce_rows(
    ring: Communicator, array: np.ndarray, bounds: Sequence[int], op: ReduceOp, sign: Sign
) -> np.ndarray:
    """Reduce `array` and return this rank's rows, ``[bounds[rank], bounds[rank + 1])``."""
    rank, size, rest = ring.rank, ring.size, array.shape[1:]
    signature = sign("reduce_scatter of a tensor", array.shape, tuple(bounds))
    kept = slice(bounds[rank], bounds[rank + 1])
    lengths = np.diff(bounds)
    longest = int(lengths.max())
    if longest * size > 2 * array.shape[0]:
        # The parts are so uneven that padding would cost more than the other half of an all-reduce.
        return np.array(ring.all_reduce(array, op, signature=signature)[kept])
    if int(lengths.min()) < longest:
        # The ring splits by elements; padding makes the parts end between rows.
        padded = np.zeros((size, longest, *rest), array.dtype)
        for part, start, length in zip(padded, bounds, lengths, strict=False):
            part[:length] = array[start : start + length]
        array = padded
    chunk = ring.reduce_scatter(array, op, signature=signature)
    return np.array(chunk.reshape(longest, *rest)[: kept.stop - kept.start])


def _require_gradient(ring: Communicator, operation: str, op: ReduceOp) -> None:
    """Raise for an operator whose gradient would need to know which rank's element was used."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return
    text = f"was asked for the gradient of {operation} with op={op.name.lower()!r}, which has none"
    remedy = "Use sum or mean, or tf.stop_gradient where no gradient is needed."
    raise ConfigError(text, **ring.config.who, remedy=remedy)


def _with_rows(tensor: Any, ring: Communicator, operation: str) -> Any:
    value = checked(tensor)
    if value.shape.rank == 0:
        text = f"{operation} got a tensor without dimensions, which has no rows for other ranks"
        remedy = "Use all_reduce or broadcast, or give it a dimension, along which it is cut."
        raise ArrayError(text, **ring.config.who, remedy=remedy)
    return value
