"""Averages sparse gradients: some rows of a table, without sending the rest of it.

The gradient of an embedding is a `tf.IndexedSlices`: the rows that the batch used, often with
duplicates, and different rows on every rank. In each step

    add duplicates -> exchange the numbers of rows -> gather the rows, or reduce the table

One exchange, with the plan's signature, covers all sparse gradients; from the numbers each rank
makes the same choice for each (`ringreduce.pure.buckets.gathers_rows`). Gathered rows are added in
rank order, so all get the same bits, and divided by the number of ranks. In a graph all this is
Python, after the starts of all buckets and before the first wait.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import fail
from ringreduce.pure import kernels
from ringreduce.pure.buckets import INDEX_BYTES, GradientSpec, gathers_rows
from ringreduce.tensorflow.plans import BucketReducer
from ringreduce.tensorflow.python_calls import blocking, call
from ringreduce.tensorflow.variables import path_of
from ringreduce.tensorflow.xla import is_compiling
from ringreduce.vocabulary.errors import ArrayError, ConfigError
from ringreduce.vocabulary.types import ReduceOp

# Indices, shape (n,), rising, int64; and their rows, shape (n, elements of a row).
_Rows = tuple[np.ndarray, np.ndarray]


def as_gradient(gradient: Any, variable: Any) -> Any:
    """`gradient`, whatever converts to one, as a tensor, `tf.IndexedSlices` of tensors, or None.

    Values without a TensorFlow dtype get that of `variable`, the variable or tensor that it is the
    gradient of. A gradient of another `tf.function` that has lost its static shape, in a tensor or
    in `dense_shape`, gets the variable's. ConfigError if TensorFlow cannot convert it.
    """
    if gradient is None:
        return None
    shape = tf.TensorShape(variable.shape)
    try:
        if not isinstance(gradient, tf.IndexedSlices):
            tensor = _as_tensor(gradient, variable.dtype)
            is_known = not shape.is_fully_defined() or tensor.shape.is_fully_defined()
            return tensor if is_known else tf.ensure_shape(tensor, shape)
        values = _as_tensor(gradient.values, variable.dtype)
        indices = tf.convert_to_tensor(gradient.indices)
        dense = gradient.dense_shape
        dense = None if dense is None else tf.convert_to_tensor(dense)
        made = tf.IndexedSlices(values, indices, dense)
        if shape.is_fully_defined() and not made.shape.is_fully_defined():
            kind = tf.int32 if dense is None else dense.dtype
            made = tf.IndexedSlices(values, indices, tf.constant(tuple(shape), kind))
        return made
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"got a gradient of {path_of(variable)} that is no tensor of its shape "
            f"{tuple(variable.shape)}, and cannot be made one: {error}",
            remedy="Pass a tensor, an array, tf.IndexedSlices, or None.",
        ) from error


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """`function` of a tensor, or slices with `function` of the values of `tf.IndexedSlices`."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)


def _as_tensor(value: Any, dtype: Any) -> Any:
    is_typed = isinstance(value, tf.Tensor) or hasattr(value, "__tf_tensor__")
    return tf.convert_to_tensor(value, None if is_typed else dtype)


def as_tensors(gradient: Any, sparse_as_dense: bool) -> Any:
    """Make a gradient of `as_gradient` one for `GradientBridge`: a tensor, or slices with shape.

    Sparse ones become dense with `sparse_as_dense`, if they are no floats, which are not merged
    here, and in what XLA compiles, since it fixes all shapes.
    """
    if gradient is None:
        return None
    is_sparse = isinstance(gradient, tf.IndexedSlices) and gradient.dtype.is_floating
    if not is_sparse or gradient.dense_shape is None or sparse_as_dense or is_compiling():
        return tf.convert_to_tensor(gradient)
    return gradient


def merged(gradient: Any) -> Any:
    """`gradient` with indices rising and unique: optimizers may square rows or take their signs."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rising = tf.unique(tf.sort(gradient.indices)).y
    positions = tf.searchsorted(rising, gradient.indices)
    values = gradient.values
    wide = values.dtype if values.dtype.size > 2 else tf.float32
    rows = tf.math.unsorted_segment_sum(tf.cast(values, wide), positions, tf.size(rising))
    return tf.IndexedSlices(tf.cast(rows, values.dtype), rising, gradient.dense_shape)


def mean_of_slices(reducer: BucketReducer, gradients: Sequence[Any]) -> dict[int, tf.IndexedSlices]:
    """The means of the sparse ones of a step's `gradients`, by their numbers.

    In a graph this adds the op that makes them. The gradients are of a float dtype, with any
    indices; those of the means are rising and unique. Whether they are all of the table's rows may
    change from step to step. ArrayError, on all ranks, if one is outside.
    """
    ring, numbers = reducer.communicator, reducer.plan.sparse
    if not numbers:
        return {}

    slices = [gradients[number] for number in numbers]
    # Indices and values of each, alternating.
    parts = [tensor for table in slices for tensor in (table.indices, table.values)]
    results = [([None, *tensor.shape[1:]], tensor.dtype) for tensor in parts]
    run = blocking(ring, partial(_reduced, reducer))
    means = call(ring, "reduce gradients", run, parts, results)
    by_table = zip(numbers, means[1::2], means[::2], slices, strict=True)
    return {number: tf.IndexedSlices(*mean, table.dense_shape) for number, *mean, table in by_table}


def _reduced(reducer: BucketReducer, *arrays: np.ndarray) -> list[np.ndarray]:
    """Indices and values of the means, alternating as in `arrays`, in new memory."""
    ring, plan, numerics = reducer.communicator, reducer.plan, reducer.numerics
    specs = [plan.gradients[index] for index in plan.sparse]
    pairs = zip(specs, arrays[::2], arrays[1::2], strict=True)
    own_rows = [_merged(ring, *pair) for pair in pairs]
    for spec, (indices, rows) in zip(specs, own_rows, strict=True):
        numerics.check_own(ring, rows.reshape(-1), [(spec, 0, indices)])
    # All ranks' numbers of rows, as a sum, since only reductions check a signature.
    counts = np.zeros((ring.size, len(own_rows)), np.int64)
    counts[ring.rank] = [len(indices) for indices, _ in own_rows]
    ring.all_reduce(counts, ReduceOp.SUM, signature=plan.signature)
    chosen = [
        place
        for place, spec in enumerate(specs)
        if gathers_rows(counts[:, place].tolist(), spec, own_rows[place][1].itemsize)
    ]
    gathered = _gathered(ring, own_rows, counts, chosen)
    means: list[np.ndarray] = []
    for place, spec in enumerate(specs):
        indices, rows = own_rows[place]
        if place in gathered:
            # Added in rank order; a row that a rank lacks is zero there.
            indices, values = map(np.concatenate, zip(*gathered[place], strict=True))
            indices, total = _added(indices, values)
            total /= ring.size
            rows = _narrowed(total, values.dtype)
        else:
            # All rows of the table, as a dense gradient.
            table = np.zeros((spec.shape[0], rows.shape[1]), rows.dtype)
            table[indices] = rows
            ring.all_reduce(table, ReduceOp.MEAN, signature=plan.signature)
            indices, rows = np.arange(spec.shape[0]), table
        numerics.check_mean(ring, rows.reshape(-1), [(spec, 0, indices)])
        values = rows.reshape(len(rows), *spec.shape[1:])
        means += indices.astype(arrays[2 * place].dtype, copy=False), values
    return means


def _merged(
    ring: Communicator, spec: GradientSpec, indices: np.ndarray, values: np.ndarray
) -> _Rows:
    """This rank's rows, indices rising and unique; duplicates are added in their order."""
    if indices.size and (indices.min() < 0 or indices.max() >= spec.shape[0]):
        outside = int(indices.min() if indices.min() < 0 else indices.max())
        text = f"has row {outside} in its gradient of {spec.describe()}"
        remedy = f"Rows are 0 to {spec.shape[0] - 1}: look at the indices the model is fed."
        error = ArrayError(text, **ring.config.who, operation="gradient reduction", remedy=remedy)
        raise fail(ring, error)
    rows = np.ascontiguousarray(values).reshape(len(indices), math.prod(spec.shape[1:]))
    rising, total = _added(indices.astype(np.int64, copy=False), rows)
    return rising, _narrowed(total, rows.dtype)


def _gathered(
    ring: Communicator, own_rows: Sequence[_Rows], counts: np.ndarray, chosen: Sequence[int]
) -> dict[int, list[_Rows]]:
    """Every rank's rows of the chosen gradients, in rank order.

    One message for all, in which indices begin at a multiple of 8 bytes, to be used where they are:

        indices of a | rows of a | pad | indices of b | rows of b | pad
    """
    if not counts[:, chosen].any():
        return {place: [own_rows[place]] * ring.size for place in chosen}  # All without rows.
    gathered: dict[int, list[_Rows]] = {place: [] for place in chosen}
    parts: list[np.ndarray] = []
    for place in chosen:
        indices, rows = own_rows[place]
        pad = np.zeros(-rows.nbytes % INDEX_BYTES, np.uint8)
        parts += indices.view(np.uint8), rows.reshape(-1).view(np.uint8), pad
    everyone = ring.all_gather(np.concatenate(parts))
    at = 0
    for rank in range(ring.size):
        for place in chosen:
            rows = own_rows[place][1]
            count, width = int(counts[rank, place]), rows.shape[1]
            middle = at + count * INDEX_BYTES
            end = middle + count * width * rows.itemsize
            values = everyone[middle:end].view(rows.dtype).reshape(count, width)
            gathered[place].append((everyone[at:middle].view(np.int64), values))
            at = end + -(end - middle) % INDEX_BYTES
    return gathered


def _added(indices: np.ndarray, rows: np.ndarray) -> _Rows:
    """Indices rising and unique; their rows added in the given order, in float32 at least."""
    rising, positions = np.unique(indices, return_inverse=True)
    dtype = rows.dtype if rows.itemsize > 2 else np.dtype(np.float32)
    total = np.zeros((rising.size, rows.shape[1]), dtype)
    kernels.add_rows(total, positions, rows.astype(dtype, copy=False))
    return rising, total


def _narrowed(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if rows.dtype == dtype:
        return rows
    narrow = np.empty(rows.shape, dtype)
    kernels.narrow(rows.reshape(-1), narrow.reshape(-1))
    return narrow
