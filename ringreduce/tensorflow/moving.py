"""Collectives on tensors that move rows from rank to rank, as their gradients move them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.payload import checked_counts, checked_root
from ringreduce.tensorflow import xla
from ringreduce.tensorflow.collectives import all_gather, as_rows, known_counts
from ringreduce.tensorflow.differentiable import NONE, Sign, checked, collective
from ringreduce.vocabulary.errors import ArrayError, ConfigError


def all_to_all(tensor: Any, communicator: Communicator, of: Any = NONE) -> Any:
    """`ringreduce.keras.all_to_all` of equal parts."""
    value = _with_rows(tensor, communicator, "all_to_all")
    if value.shape.rank and value.shape[0] is not None:
        checked_counts(None, value.shape[0], communicator.size, communicator.config.who)

    def run(array: np.ndarray, sign: Sign) -> Any:
        signature = sign("all_to_all of a tensor", array.shape)
        return communicator.all_to_all(array, signature=signature)

    def gradient(upstream: Any, number: Any) -> Any:
        return all_to_all(upstream, communicator, number)

    return collective(communicator, "exchange parts", run, gradient, value, value.shape, of=of)


def all_to_all_uneven(tensor: Any, communicator: Communicator, counts: Any, of: Any = NONE) -> Any:
    """`ringreduce.keras.all_to_all` with `counts`: the rows, and how many came from each rank."""
    value = _with_rows(tensor, communicator, "all_to_all")
    each = tf.convert_to_tensor(counts)
    if not each.dtype.is_integer or not each.shape.is_compatible_with([communicator.size]):
        raise ArrayError(
            f"all_to_all got counts of dtype {each.dtype.name} and shape {each.shape}",
            **communicator.config.who,
            remedy=f"Pass {communicator.size} whole numbers, the rows for each rank.",
        )
    if xla.is_compiling():
        raise ConfigError(
            "cannot exchange parts with counts inside a function compiled with jit_compile=True, "
            "which fixes all shapes: how many rows arrive is known only when it runs",
            **communicator.config.who,
            remedy="Leave counts out and pad all parts to one length, or leave jit_compile=True "
            "out of the function that exchanges them.",
        )

    def run(array: np.ndarray, counts: np.ndarray, sign: Sign) -> Any:
        signature = sign("all_to_all of tensors")
        rows, received = communicator.all_to_all(array, counts.tolist(), signature=signature)
        return rows, np.array(received, np.int64)

    def gradient(upstream: Any, number: Any, received: Any) -> Any:
        own, _ = all_to_all_uneven(upstream, communicator, received, number)
        return tf.ensure_shape(own, value.shape)

    shape = tf.TensorShape([None]).concatenate(value.shape[1:])
    more = [((communicator.size,), tf.int64)]
    given = tf.cast(each, tf.int64)
    what = "exchange parts"
    return collective(communicator, what, run, gradient, value, shape, given, more=more, of=of)


def gather(
    tensor: Any,
    communicator: Communicator,
    root: int,
    counts: Sequence[int] | None = None,
    of: Any = NONE,
) -> Any:
    """`ringreduce.keras.gather`; its gradient need not exchange known `counts` of rows."""
    source, value = checked_root(root, communicator.size, communicator.config.who), as_rows(tensor)

    def run(array: np.ndarray, sign: Sign) -> Any:
        return communicator.gather(array, source, signature=sign("gather of tensors"))

    known = known_counts(value, counts, communicator)
    rows = 0 if communicator.rank != source else sum(known) if known else None
    shape = tf.TensorShape([rows]).concatenate(value.shape[1:])

    def gradient(upstream: Any, number: Any) -> Any:
        each = known
        if each is None:
            each = all_gather(tf.shape(value, out_type=tf.int64)[0], communicator, of=number)
        return _parts(upstream, communicator, source, each, value.shape, of=number)

    return collective(communicator, "gather tensors", run, gradient, value, shape, of=of)


def scatter(
    tensor: Any, communicator: Communicator, root: int, counts: Sequence[int] | None = None
) -> Any:
    """`ringreduce.keras.scatter`."""
    size, who = communicator.size, communicator.config.who
    source, value = checked_root(root, size, who), _with_rows(tensor, communicator, "scatter")
    known = None if counts is None else list(counts)
    if value.shape.rank and value.shape[0] is not None:
        known = checked_counts(counts, value.shape[0], size, who)
    shape = tf.TensorShape([known and known[communicator.rank]]).concatenate(value.shape[1:])

    def sign_with(sign: Sign, array: np.ndarray) -> int:
        return sign("scatter of a tensor", array.shape, known)

    return _parts(value, communicator, source, known, shape, sign_with)


def _parts(
    tensor: Any,
    communicator: Communicator,
    source: int,
    counts: Any,
    shape: Any,
    sign_with: Callable[[Sign, np.ndarray], int] = lambda sign, _: sign("parts of a tensor"),
    of: Any = NONE,
) -> Any:
    """This rank's rows, of `shape`, of the tensor of rank `source`, whose parts have `counts` rows.

    `counts` is a list, a tensor, or None for equal parts.
    """
    known = counts if isinstance(counts, list) else None

    def run(array: np.ndarray, *rest: Any) -> Any:
        *given, sign = rest
        parts = given[0].tolist() if given else None
        return communicator.scatter(array, source, parts, signature=sign_with(sign, array))

    def gradient(upstream: Any, number: Any) -> Any:
        whole = gather(upstream, communicator, source, known, of=number)
        # The same ops on all ranks, so that they compute gradients of gradients in the same order.
        missing = tf.shape(tensor)[0] - tf.shape(whole)[0]
        after = tf.pad([[0, missing]], [[0, tf.rank(whole) - 1], [0, 0]])
        return tf.ensure_shape(tf.pad(whole, after), tensor.shape)

    others = [] if counts is None else [tf.convert_to_tensor(counts, tf.int64)]
    what = "scatter a tensor"
    return collective(communicator, what, run, gradient, tensor, shape, *others, of=of)


def _with_rows(tensor: Any, communicator: Communicator, operation: str) -> Any:
    value = checked(tensor)
    if value.shape.rank == 0:
        raise ArrayError(
            f"{operation} got a tensor without dimensions, which has no rows for other ranks",
            **communicator.config.who,
            remedy="Give it a dimension, along which it is cut.",
        )
    return value
