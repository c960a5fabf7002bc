"""Each rank's part of data: of a `tf.data.Dataset`, of arrays, or of a `PyDataset`."""

from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.checks.users_line import DataWarning, warn_at_users_line
from ringreduce.keras.checks.warnings import note_sharding
from ringreduce.keras.data.arrays import Arrays, are_arrays, compare_arrays
from ringreduce.keras.data.fingerprint import FingerprintedPasses, fingerprinted
from ringreduce.keras.rows import Rows, as_tensor, from_windows, is_uneven, map_arrays
from ringreduce.vocabulary.errors import ConfigError

_WHAT = "the data given to rr.shard"
_REMEDY = (
    "Give every rank the same data in the same order: shuffle after sharding, or pass a seed to "
    "shuffle, and sort lists of files. check=False leaves this check out."
)


def shard(
    data: Any, communicator: Communicator | None = None, *, even: bool = True, check: bool = True
) -> Any:
    """The part of `data` that belongs to this rank: element i goes to rank i mod size.

    Elements are those of a `tf.data.Dataset`, rows of arrays, or batches of a
    `keras.utils.PyDataset`. Every rank gets equally many, so that all make equally many steps; up
    to size - 1 elements at the end are left out, of which rank 0 warns where they are more than
    1 %. With ``even=False`` none is, and some ranks get one more: batch such a dataset, and give it
    to `rr.fit` with ``per_rank_data=True``, or to `rr.joined`.

    `data` must be the same on every rank. Shard a dataset before batching, and batch by the global
    batch size divided by `size`. Of what is already batched each rank gets whole batches, of which
    `size` make the global batch. Shuffle after sharding; or before it with the same seed on every
    rank, and read it equally often on all. `rr.fit` does all this itself.

    Args:
        data: a dataset; an array, or arrays with equally many rows in tuples, lists or dicts; or a
            PyDataset, of which each rank makes its own batches only.
        check: compare what the ranks read: elements of a dataset as they pass (y only, where they
            are (x, y), since x may be random on purpose), arrays by their values now, and of a
            PyDataset the targets of batch 0 at the beginning of each epoch. A difference ends the
            job with a MismatchError that says where it is. Some microseconds for each element of a
            dataset, of all ranks; leave it out where data differs on purpose.

    Returns:
        What `data` was: a dataset, arrays in the same structure, or a PyDataset.

    Raises:
        ClosedError: `init` was not called.
        ConfigError: `data` is something else, or has fewer elements than there are ranks.
    """
    ring = communicator or default_communicator()
    note_sharding(ring)
    check = check and ring.size > 1
    if isinstance(data, tf.data.Dataset):
        _look_at_count(int(data.cardinality()), ring, even)
        checked = fingerprinted(data, _WHAT, _REMEDY, ring) if check else data
        return data if ring.size == 1 else _shard_dataset(checked, ring, even)
    if isinstance(data, keras.utils.PyDataset):
        _look_at_count(data.num_batches or 0, ring, even)
        return data if ring.size == 1 else _Dealt(data, ring, even, check)
    if not are_arrays(data):
        raise ConfigError(
            f"got {type(data).__name__} to shard",
            remedy="Pass a tf.data.Dataset, arrays, or a keras.utils.PyDataset. For a generator "
            "use rr.fit, or let it yield other data on each rank (rr.rank()).",
        )
    arrays = Arrays(data)
    if check:
        compare_arrays(arrays, _WHAT, ring)
    _look_at_count(arrays.count, ring, even)
    end = arrays.count // ring.size * ring.size if even else arrays.count
    return map_arrays(lambda array: _rows(array, ring, end), data)


def _look_at_count(count: int, ring: Communicator, even: bool) -> None:
    """ConfigError if no rank gets any of `count` (0 or less: unknown); warn if many are left."""
    left, size = 0 if count < 0 or not even else count % ring.size, ring.size
    remedy = (
        "divide samples instead of files; or pass even=False, and per_rank_data=True to rr.fit."
    )
    if 0 < left == count:
        text = f"got {count} elements to shard among {size} ranks, of which none would get any"
        remedy = f"Give every rank one: make more files, or {remedy}"
        raise ConfigError(text, **ring.config.who, remedy=remedy)
    if 0 < count < left * 100 and ring.rank == 0:
        warn_at_users_line(
            f"rr.shard leaves out the last {left} of {count} elements, so that each of {size} "
            f"ranks gets {count // size}. To use them, {remedy}",
            DataWarning,
        )


def _rows(array: Any, ring: Communicator, end: int) -> Any:
    if is_uneven(array := as_tensor(array)):
        return Rows(array)[ring.rank : end : ring.size]
    # With pandas the meaning of a plain slice depends on the index.
    rows = array.iloc if hasattr(array, "iloc") else array
    return rows[ring.rank : end : ring.size]


def _shard_dataset(dataset: tf.data.Dataset, ring: Communicator, even: bool) -> Any:
    size, rank, cardinality = ring.size, ring.rank, int(dataset.cardinality())
    if even and cardinality == tf.data.UNKNOWN_CARDINALITY:
        # Whole rounds only.
        return from_windows(dataset, size, rank, drop_remainder=True)
    if even and cardinality != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.take(cardinality // size * size)
    return dataset.shard(size, rank)


class _Dealt(keras.utils.PyDataset):
    """The batches of another PyDataset that belong to this rank."""

    def __init__(self, dataset: Any, ring: Communicator, even: bool, check: bool) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._even = dataset, even
        self._rank, self._size = ring.rank, ring.size
        self._passes = FingerprintedPasses(_WHAT, _REMEDY, ring) if check else None

    @property
    def num_batches(self) -> int | None:
        """The number of this rank's batches; None: endless."""
        count = self._dataset.num_batches
        if count is None:
            return None
        return count // self._size if self._even else len(range(self._rank, count, self._size))

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index * self._size + self._rank]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()
        if self._passes is not None:
            self._passes.claim_batch(self._dataset[0])

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
