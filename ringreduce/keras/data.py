"""Each rank's part of a `tf.data.Dataset`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.vocabulary.errors import ConfigError


def shard(dataset: Any, communicator: Communicator | None = None, *, even: bool = True) -> Any:
    """The part of `dataset` that belongs to this rank: element i goes to rank i mod size.

    Every rank gets equally many elements, so that all make equally many steps; up to size - 1
    elements at the end are left out. With ``even=False`` none is, and some ranks get one more: pass
    the result, batched, through `rr.join`.

    `dataset` must be the same on every rank. Shard before batching, and batch by the global batch
    size divided by `size`: then the ranks' batches of a step together are exactly the global batch.
    Of a dataset that is already batched each rank gets whole batches. Shuffle before sharding, with
    the same seed on every rank, or ranks see some elements twice.

    Raises:
        ClosedError: `init` was not called.
        ConfigError: `dataset` is no `tf.data.Dataset`.
    """
    ring = communicator or default_communicator()
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(
            f"got {type(dataset).__name__} to shard",
            remedy="Pass a tf.data.Dataset; tf.data.Dataset.from_tensor_slices(arrays) makes one.",
        )
    if ring.size == 1:
        return dataset
    if not even:
        return dataset.shard(ring.size, ring.rank)
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return _deal(dataset, ring.size, ring.rank)
    if cardinality != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.take(cardinality // ring.size * ring.size)
    return dataset.shard(ring.size, ring.rank)


def _deal(dataset: Any, size: int, rank: int) -> Any:
    """As `shard` for a dataset of unknown length: whole rounds of `size` elements only."""

    def own(*round_: Any) -> Any:
        parts = tf.nest.map_structure(
            lambda part: part.skip(rank).take(1),
            round_ if len(round_) > 1 else round_[0],
            expand_composites=False,
        )
        return tf.data.Dataset.zip(parts)

    return dataset.window(size, drop_remainder=True).flat_map(own)
