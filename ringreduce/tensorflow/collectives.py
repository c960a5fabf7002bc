"""Collectives on tensors that reduce, gather or copy: eagerly and in `tf.function`, with gradients.

They run in program order (`ringreduce.tensorflow.order`), including those of the backward pass and
of the bridge; the communicator first waits for what its engine was given. So ranks that run the
same program make the same calls in the same order. Nothing travels while tracing.

A collective of a backward pass carries the number of the one whose gradient it is, since TensorFlow
chooses the order of a backward pass by more than the program (`differentiable.py`).

The gradient of a collective is a collective, for a loss that is the sum of all ranks' losses; the
mean of these gradients over the ranks, as of `DistributedOptimizer`, is that of the mean loss.
`ringreduce.keras.tensors` says which it is. Those that only move rows are in
`ringreduce.tensorflow.moving`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.payload import bounds_of, checked_root
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.tensorflow import xla
from ringreduce.tensorflow.differentiable import NONE, Sign, checked, collective
from ringreduce.vocabulary.errors import ArrayError, ConfigError
from ringreduce.vocabulary.types import ReduceOp, reduce_op


@tf.autograph.experimental.do_not_convert
def all_reduce(
    tensor: Any, communicator: Communicator, op: ReduceOp | str = ReduceOp.SUM, of: Any = NONE
) -> Any:
    """`ringreduce.keras.all_reduce` of one tensor; in a graph, errors come when it is run.

    With `of`, it is the gradient of the collective with that number.
    """
    how, value = reduce_op(op), checked(tensor)

    def run(array: np.ndarray, sign: Sign) -> Any:
        signature = sign("all_reduce of a tensor", array.shape)
        return communicator.all_reduce(array, how, signature=signature)

    def gradient(upstream: Any, number: Any) -> Any:
        _require_gradient(communicator, "all_reduce", how)
        return all_reduce(upstream, communicator, how, number)

    return collective(communicator, "reduce a tensor", run, gradient, value, value.shape, of=of)


@tf.autograph.experimental.do_not_convert
def all_gather(
    tensor: Any, communicator: Communicator, *, counts: Sequence[int] | None = None, of: Any = NONE
) -> Any:
    """`ringreduce.keras.all_gather`; its gradient need not exchange known `counts` of rows."""
    value = as_rows(tensor)

    def run(array: np.ndarray, sign: Sign) -> Any:
        return communicator.all_gather(array, signature=sign("all_gather of tensors"))

    known = known_counts(value, counts, communicator)
    shape = tf.TensorShape([sum(known) if known else None]).concatenate(value.shape[1:])

    def gradient(upstream: Any, number: Any) -> Any:
        rows = tf.shape(value, out_type=tf.int64)[0]
        each = known or all_gather(rows, communicator, of=number)
        own = _own_rows_of_sum(upstream, each, communicator, value.shape, number)
        return tf.ensure_shape(own, value.shape)

    return collective(communicator, "gather tensors", run, gradient, value, shape, of=of)


def as_rows(tensor: Any) -> Any:
    """`tensor` as a tensor to gather; one without dimensions counts as one of shape (1,)."""
    value = checked(tensor)
    return tf.reshape(value, (1,)) if value.shape.rank == 0 else value


def known_counts(
    value: Any, counts: Sequence[int] | None, communicator: Communicator
) -> list[int] | None:
    """All ranks' `counts` of rows to gather, if they are known before anything runs."""
    if counts is None and xla.is_compiling() and value.shape[0] is not None:
        return [value.shape[0]] * communicator.size
    return None if counts is None else list(counts)


def broadcast(tensor: Any, communicator: Communicator, root: int) -> Any:
    """`ringreduce.keras.broadcast`."""
    source, value = checked_root(root, communicator.size, communicator.config.who), checked(tensor)

    def run(array: np.ndarray, sign: Sign) -> Any:
        signature = sign("broadcast of a tensor", array.shape)
        return communicator.broadcast(array, source, signature=signature)

    def gradient(upstream: Any, number: Any) -> Any:
        total = all_reduce(upstream, communicator, of=number)
        # A choice, not a condition: all ranks must compute gradients of gradients too.
        return tf.where(communicator.rank == source, total, tf.zeros_like(total))

    return collective(communicator, "broadcast a tensor", run, gradient, value, value.shape)


def reduce_scatter(tensor: Any, communicator: Communicator, op: ReduceOp | str) -> Any:
    """`ringreduce.keras.reduce_scatter`."""
    how, value = reduce_op(op), checked(tensor)
    if value.shape.rank == 0:
        raise ArrayError(
            "reduce_scatter got a tensor without dimensions, which has no rows to deal out",
            **communicator.config.who,
            remedy="Use all_reduce.",
        )

    def run(array: np.ndarray, sign: Sign) -> np.ndarray:
        bounds = chunk_bounds(array.shape[0], communicator.size)
        return _reduce_rows(communicator, array, bounds, how, sign)

    counts, shape = None, value.shape
    if shape.rank and shape[0] is not None:
        counts = np.diff(chunk_bounds(shape[0], communicator.size)).tolist()
    if shape.rank:
        shape = tf.TensorShape([counts and counts[communicator.rank]]).concatenate(shape[1:])

    def gradient(upstream: Any, number: Any) -> Any:
        _require_gradient(communicator, "reduce_scatter", how)
        whole = all_gather(upstream, communicator, counts=counts, of=number)
        whole = tf.ensure_shape(whole, value.shape)
        return whole / communicator.size if how is ReduceOp.MEAN else whole

    return collective(communicator, "reduce a tensor", run, gradient, value, shape)


def _own_rows_of_sum(
    tensor: Any, counts: Any, communicator: Communicator, own: Any, of: Any
) -> Any:
    """This rank's rows of the sum over all ranks; rank r has the next ``counts[r]``.

    `counts` is a list if known; `own` is the static shape of the result, as far as it is known.
    """
    known = counts if isinstance(counts, list) else None

    def run(array: np.ndarray, counts: np.ndarray, sign: Sign) -> np.ndarray:
        bounds = bounds_of(counts.tolist())
        return _reduce_rows(communicator, array, bounds, ReduceOp.SUM, sign)

    def gradient(upstream: Any, number: Any) -> Any:
        return all_gather(upstream, communicator, counts=known, of=number)

    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:]).merge_with(own)
    given = tf.convert_to_tensor(counts, tf.int64)
    what = "reduce a tensor"
    return collective(communicator, what, run, gradient, tensor, shape, given, of=of)


def _reduce_rows(
    communicator: Communicator, array: np.ndarray, bounds: Sequence[int], op: ReduceOp, sign: Sign
) -> np.ndarray:
    """Reduce `array` and return this rank's rows, ``[bounds[rank], bounds[rank + 1])``."""
    rank, size, rest = communicator.rank, communicator.size, array.shape[1:]
    signature = sign("reduce_scatter of a tensor", array.shape, tuple(bounds))
    own = slice(bounds[rank], bounds[rank + 1])
    lengths = np.diff(bounds)
    longest = int(lengths.max())
    if longest * size > 2 * array.shape[0]:
        # The parts are so uneven that padding would cost more than the other half of an all-reduce.
        return np.array(communicator.all_reduce(array, op, signature=signature)[own])
    if int(lengths.min()) < longest:
        # The ring splits by elements; padding makes the parts end between rows.
        padded = np.zeros((size, longest, *rest), array.dtype)
        for part, start, length in zip(padded, bounds, lengths, strict=False):
            part[:length] = array[start : start + length]
        array = padded
    chunk = communicator.reduce_scatter(array, op, signature=signature)
    return np.array(chunk.reshape(longest, *rest)[: own.stop - own.start])


def _require_gradient(communicator: Communicator, operation: str, op: ReduceOp) -> None:
    """Raise for an operator whose gradient would need to know which rank's element was used."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return
    raise ConfigError(
        f"was asked for the gradient of {operation} with op={op.name.lower()!r}, which has none",
        **communicator.config.who,
        remedy="Use sum or mean, or tf.stop_gradient where no gradient is needed.",
    )
