"""Rows of dense, ragged and sparse tensors and matrices: counted, sliced, chosen."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.tensorflow.private import NoneTensorSpec
from ringreduce.tensorflow.xla import is_compiling

FIRST_ROWS = 64


def count_of(tensor: Any) -> Any:
    """The number of rows, a scalar int32 tensor."""
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    return tf.shape(tensor)[0]


def rows_in(batch: Any) -> Any:
    """The number of rows of a batch, a structure with None for what is absent, as of `count_of`."""
    return count_of(next(part for part in tf.nest.flatten(batch) if not is_absent(part)))


def rows_of(array: Any, first: Any, end: Any) -> Any:
    """Rows `first` to `end`, which must be there."""
    array = as_tensor(array)
    if isinstance(array, tf.SparseTensor):
        begin, count = tf.cast(first, tf.int64), tf.cast(end - first, tf.int64)
        rest = tf.zeros_like(array.dense_shape[1:])
        start = tf.concat([[begin], rest], 0)
        size = tf.concat([[count], array.dense_shape[1:]], 0)
        return _with_rows(tf.sparse.slice(array, start, size), count, array)
    # With pandas the meaning of a plain slice depends on the index.
    return (array.iloc if hasattr(array, "iloc") else array)[first:end]


def at_least_one(tensor: Any) -> Any:
    """`tensor`, or one row of zeros where it has none."""
    if isinstance(tensor, tf.SparseTensor):
        return _with_rows(tensor, tf.maximum(tensor.dense_shape[0], 1), tensor)
    if isinstance(tensor, tf.RaggedTensor):
        flat = tensor.flat_values
        zero = tf.zeros([1, *(n or 1 for n in flat.shape[1:])], flat.dtype)
        ends = [tf.constant([0, 1], tensor.row_splits.dtype)] * tensor.ragged_rank
        row = tf.RaggedTensor.from_nested_row_splits(zero, ends)
        return tf.concat([tensor, row], 0)[: tf.maximum(count_of(tensor), 1)]
    tensor = tf.convert_to_tensor(tensor)  # Eagerly `train_on_batch` gives an array.
    shape = tf.shape(tensor)
    if is_compiling():
        # For XLA a result of branches that differ in shape has none that is fixed.
        lacking = tf.maximum(0, 1 - shape[0])
        return tf.pad(tensor, [[0, lacking], *[[0, 0]] * (tensor.shape.rank - 1)])
    row = tf.zeros(tf.concat([[1], shape[1:]], 0), tensor.dtype)
    result = tf.cond(shape[0] > 0, lambda: tensor, lambda: row)
    result.set_shape([None, *tensor.shape[1:]])
    return result


def as_tensor(array: Any) -> Any:
    """A sparse matrix of scipy's or JAX's as a `tf.SparseTensor`; other arrays as they are."""
    package = type(array).__module__
    if package.startswith("scipy.sparse") and hasattr(array, "tocoo"):
        triples = array.tocoo()
        places = np.stack([triples.row, triples.col], 1).astype(np.int64)
        return tf.SparseTensor(places, triples.data, triples.shape)
    if package.startswith("jax.experimental.sparse") and hasattr(array, "indices"):
        places, values = np.asarray(array.indices, np.int64), np.asarray(array.data)
        return tf.sparse.reorder(tf.SparseTensor(places, values, array.shape))
    return array


def tensor_of(part: Any) -> Any:
    """An array, tensor or list as a numpy array or tensor; torch's may be on a GPU."""
    part = as_tensor(part)
    return part if tf.is_tensor(part) else np.asarray(part.cpu() if hasattr(part, "cpu") else part)


def is_absent(part: Any) -> bool:
    """Whether it is None, as an optional input may be, or the `tf.TypeSpec` of that."""
    return part is None or isinstance(part, NoneTensorSpec)


def map_arrays(function: Callable[[Any], Any], parts: Any) -> Any:
    """`parts` with `function` of every array, tensor or spec in it; what is absent is None."""
    return keras.tree.map_structure(lambda p: None if is_absent(p) else function(p), parts)


def of_any_rows(spec: Any) -> Any:
    """The spec of a tensor, of any number of rows if it is dense."""
    is_dense = isinstance(spec, tf.TensorSpec)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_dense else spec


def packed(tensors: Iterable[Any], spec: Any) -> Any:
    """The structure of `spec` with the dense `tensors` that its `components` would be."""
    rest = iter(tensors)

    def pack(part: Any) -> Any:
        flat = [next(rest) for _ in components(part)]
        return tf.nest.pack_sequence_as(part, flat, expand_composites=True)

    return map_arrays(pack, spec)


def slice_rows(parts: Any, first: Any, end: Any) -> Any:
    """Rows `first` to `end` of every array or tensor in `parts`; None stays."""
    return map_arrays(lambda array: rows_of(array, first, end), parts)


def first_rows(batch: Any) -> Any:
    """At most the first 64 rows of `batch`."""
    return slice_rows(batch, 0, tf.minimum(rows_in(batch), FIRST_ROWS))


def from_windows(dataset: tf.data.Dataset, size: int, index: int, **options: Any) -> Any:
    """That element of each window of `size` elements, if it has one; `options` of ``window``."""
    spec = dataset.element_spec
    are_there = [not is_absent(part) for part in tf.nest.flatten(spec)]
    if not all(are_there):  # Of which TensorFlow makes no windows.
        dataset = dataset.map(
            lambda *parts: tuple(itertools.compress(tf.nest.flatten(parts), are_there))
        )
    chosen = dataset.window(size, **options).flat_map(partial(_element_of, index))
    if all(are_there):
        return chosen

    def pack(*found: Any) -> Any:
        rest = iter(found)
        return tf.nest.pack_sequence_as(
            spec, [next(rest) if is_in else None for is_in in are_there]
        )

    return chosen.map(pack)


def _element_of(index: int, *window: Any) -> Any:
    """A tf.data.Dataset of that element of a window of another, if it has one."""
    parts = window if len(window) > 1 else window[0]
    return tf.data.Dataset.zip(tf.nest.map_structure(lambda p: p.skip(index).take(1), parts))


def none_for_optionals(dataset: tf.data.Dataset) -> Any:
    """`dataset` with None in place of each `Optional`, which is Keras's None in a batch."""
    spec = dataset.element_spec
    if not any(isinstance(part, tf.OptionalSpec) for part in tf.nest.flatten(spec)):
        return dataset

    def plain(*parts: Any) -> Any:
        element = parts if isinstance(spec, tuple) else parts[0]
        return keras.tree.map_structure(
            lambda part: None if isinstance(part, tf.experimental.Optional) else part, element
        )

    return dataset.map(plain)


class Rows:
    """Rows of a numpy array, not copied, or a ragged or sparse tensor; floats of Keras's type."""

    def __init__(self, array: Any) -> None:
        kind, shape = tf.as_dtype(array.dtype), [None, *array.shape[1:]]
        kind = tf.as_dtype(keras.config.floatx()) if kind.is_floating else kind
        self.shape, self.dtype = array.shape, array.dtype
        if isinstance(array, np.ndarray):
            self._tensor, self.nbytes = array, array.nbytes
            self.spec: Any = tf.TensorSpec(shape, kind)  # of any number of rows
            return
        self._tensor = tensor = tf.cast(array, kind) if kind.is_floating else array
        if isinstance(tensor, tf.RaggedTensor):
            ends = tensor.row_splits.dtype
            self.spec = tf.RaggedTensorSpec(shape, kind, tensor.ragged_rank, ends)
        else:
            self.spec = tf.SparseTensorSpec(shape, kind)
            self._tensor = tensor = tf.sparse.reorder(tensor)
            self._entries = tf.RaggedTensor.from_value_rowids(
                tf.range(tf.size(tensor.values)), tensor.indices[:, 0], self.shape[0]
            )
        self.nbytes = sum(part.numpy().nbytes for part in components(tensor))

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(self._tensor, np.ndarray):
            kind = None if self.spec.dtype == tf.string else self.spec.dtype.as_numpy_dtype
            return np.asarray(self._tensor[rows], kind)
        if isinstance(rows, slice):
            rows = np.arange(len(self))[rows]
        if isinstance(self._tensor, tf.RaggedTensor):
            return tf.gather(self._tensor, rows)
        chosen = tf.gather(self._entries, rows)
        places = tf.gather(self._tensor.indices, chosen.values)[:, 1:]
        places = tf.concat([tf.cast(chosen.value_rowids(), tf.int64)[:, None], places], 1)
        values = tf.gather(self._tensor.values, chosen.values)
        return tf.SparseTensor(places, values, [len(rows), *self.shape[1:]])


def is_uneven(array: Any) -> bool:
    """Whether it is ragged or sparse."""
    return isinstance(array, (tf.RaggedTensor, tf.SparseTensor))


def components(tensor: Any) -> list[Any]:
    """The dense tensors, or array, that it consists of."""
    flat = tf.nest.flatten(tensor, expand_composites=True)
    return [part for part in flat if not is_absent(part)]


def _with_rows(tensor: Any, count: Any, like: Any) -> Any:
    """A sparse tensor with that number of rows, whose other dimensions are as known as `like`'s."""
    rest = [like.dense_shape[i] if n is None else n for i, n in enumerate(like.shape)]
    shape = tf.stack([tf.cast(n, tf.int64) for n in (count, *rest[1:])])
    return tf.SparseTensor(tensor.indices, tensor.values, shape)
