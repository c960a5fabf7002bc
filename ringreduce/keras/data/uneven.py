"""Unequal amounts of data in a loop of one's own: a rank without batches gets samples of zeros."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import weighting
from ringreduce.keras.rows import at_least_one, is_absent, map_arrays, rows_in
from ringreduce.vocabulary.errors import ConfigError


def joined(dataset: Any, *, communicator: Communicator | None = None) -> Iterator[Any]:
    """The batches of `dataset`, for a custom loop over unequal amounts of data.

    A rank that runs out gets a sample of zeros, shape (1, ...), until all have run out; its
    gradients count nothing. Gradients applied in the loop's body are weighted as within
    `step_weight` (see there for functions)::

        for (x, y), samples in rr.joined(dataset):
            with tf.GradientTape() as tape:
                loss = ...
            optimizer.apply(tape.gradient(loss, weights), weights)
            if samples:
                metric.update_state(loss)

    Collective, once for each batch. One such loop at a time in each thread. Leave it early only on
    all ranks after the same batch, and call ``close()`` on it where something still refers to it:
    until then gradients are weighted.

    Args:
        dataset: a batched tf.data.Dataset of tensors whose first dimension is the samples. May be
            empty.

    Yields:
        An element of the dataset, and its number of samples: 0 for a sample of zeros.

    Raises:
        ConfigError: the dataset is of another kind.
    """
    ring = communicator or default_communicator()
    empty = empty_batch(spec_of(dataset))
    if ring.size == 1:
        for batch in dataset:
            yield batch, int(rows_in(batch))
        return
    batches = iter(dataset)
    while True:
        batch = next(batches, None)
        count = 0 if batch is None else int(rows_in(batch))
        try:
            weight = weighting.exchanged(tf.constant(float(count)), ring)
        except tf.errors.OutOfRangeError:
            return
        with weighting.using(weight):
            yield filled(empty if count == 0 else batch), count


def spec_of(dataset: Any) -> Any:
    """The `element_spec` of a tf.data.Dataset of batches."""
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(
            f"got {type(dataset).__name__} as a rank's own data",
            remedy="Pass a tf.data.Dataset, batched; tf.data.Dataset.from_tensor_slices(arrays)"
            ".batch(n) makes one of arrays.",
        )
    for spec in tf.nest.flatten(dataset.element_spec):
        if not is_absent(spec) and spec.shape.rank in (None, 0):
            text = f"got a dataset with elements {spec}"
            raise ConfigError(text, remedy="Batch it, and give it tensors of known rank.")
    return dataset.element_spec


def empty_batch(spec: Any) -> Any:
    """Tensors like those of batches of an `element_spec`, with no samples."""
    return map_arrays(_empty, spec)


def _empty(spec: Any) -> Any:
    shape = [0, *(1 if n is None else n for n in spec.shape[1:])]
    if isinstance(spec, tf.RaggedTensorSpec):
        ends = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        flat = tf.zeros([0, *shape[spec.ragged_rank + 1 :]], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(flat, ends)
    zeros = tf.zeros(shape, spec.dtype)
    return tf.sparse.from_dense(zeros) if isinstance(spec, tf.SparseTensorSpec) else zeros


def filled(batch: Any) -> Any:
    """`batch`, or one sample of zeros where it has none."""
    return map_arrays(at_least_one, batch)
